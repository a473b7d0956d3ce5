"""Time every recurrence on a CPU: token by token, by chunks, and against the projections of its layer.

    python benchmarks/recurrences.py [--widths 64 8 --length 1024 --heads 4 --threads 2 --rounds 5]

Forward alone and with gradients, in turns; the shortest of all rounds, by the clock and in processor time, which adds
up all threads. Memory is the peak of what one run allocates, with one thread, because the profiler sees only one. The
plain products are the projections to queries, keys, values and outputs, with a hidden size of heads x width.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from harness import arguments
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from slimstate.kernels import delta_rule, gla, rwkv6

UPDATES = 2  # of a token in the delta product
Form = Callable[..., tuple[Tensor, Tensor]]


def random_inputs(length: int, heads: int, width: int) -> dict[str, Tensor]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(1, length, heads, *shape)

    by_channel = -normal(width).exp() / 10
    return {
        "q": normal(width),
        "k": F.normalize(normal(width), dim=-1),
        "v": normal(width),
        "beta": normal().sigmoid(),
        "g": -normal().exp() / 10,
        "channels": by_channel,
        "strong": torch.where(by_channel < -0.1, 50 * by_channel.tanh(), by_channel),
        "erase": F.normalize(normal(width), dim=-1),
    }


def spread(form: Form) -> Form:
    """Return the delta product, computed with the gated delta rule: queries and decays belong to one of n updates."""

    def product(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        k, v, beta = (x.repeat_interleave(UPDATES, 1) for x in (k, v, beta))
        return form(delta_rule.spread(q, UPDATES, -1), k, v, beta, delta_rule.spread(g, UPDATES, 0), scale=scale)

    return product


def families(x: dict[str, Tensor]) -> dict[str, tuple[Form, Form, list[Tensor], dict[str, Tensor]]]:
    """Return each recurrence token by token and by chunks, with the inputs of both."""
    head, channel, strong = ([x[name] for name in ("q", "k", "v", last)] for last in ("g", "channels", "strong"))
    rule, gated = ([x[name] for name in ("q", "k", "v", "beta", *more)] for more in ((), ("g",)))
    bonus = {"bonus": torch.randn(x["q"].shape[2:])}
    forms = (delta_rule.recurrence, delta_rule.chunked)
    return {
        "linear attention": (gla.recurrence, gla.chunked, head[:3], {}),
        "Mamba-2": (gla.recurrence, gla.chunked, head, {}),
        "GLA": (gla.recurrence, gla.chunked, channel, {}),
        "GLA, decays down to e^-50": (gla.recurrence, gla.chunked, strong, {}),
        "RWKV-6": (rwkv6.recurrence, rwkv6.chunked, channel, bonus),
        "DeltaNet": (*forms, rule, {}),
        "Gated DeltaNet": (*forms, gated, {}),
        "Gated DeltaProduct": (spread(forms[0]), spread(forms[1]), gated, {}),
        "Comba": (*forms, gated, {"erase": x["erase"]}),
        "KDA": (*forms, [*rule, x["channels"]], {}),
        "KDA, decays down to e^-50": (*forms, [*rule, x["strong"]], {}),
    }


def plain_products(length: int, size: int) -> Callable[[], Tensor]:
    x, weights = torch.randn(length, size), [torch.randn(size, size, requires_grad=True) for _ in range(4)]
    return lambda: F.linear(sum(F.linear(x, weight) for weight in weights[:3]), weights[3])


def with_and_without_gradients(work: Callable[[], Tensor], inputs: Iterable[Tensor]) -> dict[str, Callable[[], None]]:
    """Return the forward pass alone, and with the gradients of a loss."""
    leaves, weight = [x for x in inputs if x.requires_grad], torch.randn_like(work().detach())

    def forward() -> None:
        with torch.no_grad():
            work()

    def backward() -> None:
        o = work()
        torch.autograd.grad(o, leaves, weight) if leaves else o.backward(weight)

    return {"forward": forward, "with gradients": backward}


def peak_bytes(work: Callable[[], None]) -> int:
    """Return the peak of what the work allocates."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    torch.set_num_threads(threads)
    results = profiler.profiler.kineto_results
    assert results is not None
    now = peak = 0
    for event in sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def shortest(works: dict[str, Callable[[], None]], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the shortest seconds by the clock and in processor time; in turns, so that all share other load."""
    clock, processor = dict.fromkeys(works, float("inf")), dict.fromkeys(works, float("inf"))
    for _ in range(rounds):
        for name, work in works.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            work()
            clock[name] = min(clock[name], time.perf_counter() - start)
            processor[name] = min(processor[name], time.process_time() - cpu_start)
    return clock, processor


def row(name: str, width: int, length: int, heads: int, rounds: int) -> dict[str, object]:
    torch.manual_seed(0)
    tensors = {key: x.requires_grad_() for key, x in random_inputs(length, heads, width).items()}
    naive, chunked, inputs, named = families(tensors)[name]
    works: dict[str, Callable[[], None]] = {}
    outputs = []
    for kind, form in (("token by token", naive), ("chunked", chunked)):

        def work(form: Form = form) -> Tensor:
            return form(*inputs, **named, scale=width**-0.5)[0]

        outputs.append(work().detach())
        works |= {
            f"{kind}, {way}": run for way, run in with_and_without_gradients(work, [*inputs, *named.values()]).items()
        }
    products = with_and_without_gradients(plain_products(length, heads * width), [])
    works |= {f"plain products, {way}": run for way, run in products.items()}
    seconds, processor = shortest(works, rounds)
    error = float((outputs[1] - outputs[0]).abs().max() / outputs[0].std())
    peaks = {kind: peak_bytes(run) for kind, run in works.items() if kind.startswith("chunked")}
    input_bytes = sum(x.nbytes for x in inputs)
    print(f"{name}, {width}", file=sys.stderr, flush=True)
    times = {"seconds": seconds, "processor_seconds": processor}
    return {"family": name, "width": width, "error": error, **times, "peak_bytes": peaks, "inputs": input_bytes}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 8])
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.toy:
        options.widths, options.length, options.heads, options.rounds = [4], 40, 1, 1
    torch.set_num_threads(options.threads)
    names = families(random_inputs(1, 1, 1))
    shape = (options.length, options.heads, options.rounds)
    rows = [row(name, width, *shape) for width in options.widths for name in names]
    settings = {"length": options.length, "heads": options.heads, "threads": options.threads, "rounds": options.rounds}
    machine = {"machine": platform.machine(), "torch": torch.__version__}
    print(json.dumps({"benchmark": "recurrences", **machine, **settings, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
