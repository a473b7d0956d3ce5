"""Peak memory and time of the distillation loss with its gradient, in chunks and all at once.

    python benchmarks/distilling.py [--batch 16 --length 2048 --vocabulary 32000 --hidden 2048 --device cuda]

Peak memory is counted above the hidden states of student and teacher and their two output heads. On a CPU each form
runs in a process of its own, whose peak is compared with that of a process that stops before the loss.
"""

from __future__ import annotations

import argparse
import json

import torch
import torch.nn.functional as F
from harness import arguments, last_line_of, peak_memory_kib, seconds

from slimstate.kernels.distillation import LOGITS_AT_ONCE, FullDistribution, distilled_loss

TEMPERATURE = 2.0


def chunked(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, teacher: FullDistribution) -> None:
    distilled_loss(hidden, head, targets, teacher, temperature=TEMPERATURE)[0].backward()


def at_once(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, teacher: FullDistribution) -> None:
    logits = (hidden @ head.mT).float()
    divergence = TEMPERATURE**2 * teacher.divergence(slice(None), logits, TEMPERATURE)
    (F.cross_entropy(logits, targets) + divergence / len(targets)).backward()


FORMS = {"chunked": chunked, "at once": at_once}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=(*FORMS, "nothing"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.toy:
        options.batch, options.length, options.vocabulary, options.hidden = 2, 128, 4000, 64
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokens = options.batch * options.length
    kind = {"device": device, "dtype": dtype}
    hidden = torch.randn(tokens, options.hidden, **kind).requires_grad_()
    head = torch.randn(options.vocabulary, options.hidden, **kind) * options.hidden**-0.5
    targets = torch.randint(options.vocabulary, (tokens,), device=device)
    teacher = FullDistribution(hidden=torch.randn(tokens, options.hidden, **kind), head=head.flip(0))
    if options.only:
        if options.only != "nothing":
            FORMS[options.only](hidden, head, targets, teacher)
        print(peak_memory_kib())
        return
    record = {
        "tokens": tokens,
        "vocabulary": options.vocabulary,
        "hidden": options.hidden,
        "dtype": str(dtype),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "logits_at_once": LOGITS_AT_ONCE,
        "peak_bytes_above": {},
        "seconds": {},
    }
    for name, form in FORMS.items():
        if device.type == "cuda":
            form(hidden, head, targets, teacher)
            hidden.grad = None
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            record["seconds"][name] = seconds(device, lambda form=form: form(hidden, head, targets, teacher))
            record["peak_bytes_above"][name] = torch.cuda.max_memory_allocated() - before
        else:
            record["seconds"][name] = seconds(device, lambda form=form: form(hidden, head, targets, teacher))
            record["peak_bytes_above"][name] = 1024 * (_peak_of(name, options) - _peak_of("nothing", options))
        hidden.grad = None
    print(json.dumps(record, indent=2))


def _peak_of(name: str, options: argparse.Namespace) -> int:
    sizes = [f"--{key}={getattr(options, key)}" for key in ("batch", "length", "vocabulary", "hidden", "device")]
    return int(last_line_of(__file__, f"--only={name}", *sizes))


if __name__ == "__main__":
    main()
