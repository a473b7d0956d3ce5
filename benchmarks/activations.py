"""How much memory a training step of one layer takes on a CPU, against what the layer keeps, at several lengths.

    python benchmarks/activations.py [--hidden 256 --heads 4 --lengths 512 1024 2048 4096]

A layer is all of a mixer: projections, convolutions, recurrence, norm, gate and output, in float32, for one sequence.
Its activations are every tensor that autograd keeps for the backward pass, once each, with the input and the output,
without the weights. The peak is the most that is allocated at one time from the beginning of the forward pass to the
end of the backward pass, with the input, without the weights and their gradients, which were there before. With one
thread, since a profiler sees no other; threads share out heads, and all of them together hold what one does.
"""

from __future__ import annotations

import json
import sys

import torch
from harness import arguments
from recurrences import peak_bytes
from torch import Tensor, nn

from slimstate.benchmark.random_models import mixer_of
from slimstate.models.prepare import prepare

TYPES = ("delta_net", "gated_deltanet", "gated_deltaproduct", "comba", "gla", "kda", "rwkv6", "mamba2")


def config(model_type: str, hidden: int, heads: int) -> dict[str, object]:
    """One layer with heads of the hidden size over their number, for keys and for values."""
    width = hidden // heads
    found = {"model_type": model_type, "hidden_size": hidden, "num_heads": heads, "num_hidden_layers": 1}
    found |= {"intermediate_size": hidden, "vocab_size": 64, "head_dim": width, "expand_k": 1.0, "expand_v": 1.0}
    if model_type == "mamba2":
        found |= {"expand": 1, "state_size": width, "n_groups": 1}
    return found


def kept_bytes(layer: nn.Module, given: Tensor) -> int:
    """The activations of a forward pass."""
    held = {x.untyped_storage().data_ptr(): 0 for x in layer.parameters()}
    alive = [given]

    def pack(x: Tensor) -> Tensor:
        alive.append(x)
        held.setdefault(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output = output_of(layer, given)
    for x in (given, output):
        held.setdefault(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes())
    return sum(held.values())


def output_of(layer: nn.Module, given: Tensor) -> Tensor:
    found = layer(given)
    output: Tensor = found[0] if isinstance(found, tuple) else found
    return output


def measured(layer: nn.Module, length: int, hidden: int) -> dict[str, int]:
    given = torch.randn(1, length, hidden, requires_grad=True)
    weight = torch.randn(1, length, hidden)

    def step() -> None:
        output_of(layer, given).backward(weight)
        given.grad = None

    step()
    activations = kept_bytes(layer, given)
    return {"length": length, "activations": activations, "peak": peak_bytes(step) + given.nbytes}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--types", nargs="+", default=list(TYPES))
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    options = parser.parse_args()
    if options.toy:
        options.types, options.hidden, options.heads, options.lengths = ["gla", "kda"], 32, 2, [80]
    torch.set_num_threads(1)
    rows = []
    for name in options.types:
        prepare(name)
        layer = mixer_of(config(name, options.hidden, options.heads), torch.device("cpu"), torch.float32).train()
        rows += [{"type": name, **measured(layer, length, options.hidden)} for length in options.lengths]
        print(name, [f"{row['peak'] / row['activations']:.2f}" for row in rows if row["type"] == name], file=sys.stderr)
    about = {"hidden": options.hidden, "heads": options.heads, "torch": torch.__version__}
    print(json.dumps({"benchmark": "activations", **about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
