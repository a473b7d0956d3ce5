"""Compare the peak memory of a training step of one layer on a CPU with its activations, at several lengths.

    python benchmarks/activations.py [--hidden 256 --heads 4 --lengths 512 1024 2048 4096]

A layer is a whole mixer in float32 with one sequence: projections, convolutions, recurrence, norm, gate and output.
Its activations are the tensors that autograd saves for the backward pass, once each, with the input and the output, but
without the weights. The peak is the most memory allocated at one time from the start of the forward pass to the end of
the backward pass, with the input, but without the weights and their gradients, which exist before. One thread is used,
because the profiler sees only one; several threads share the heads and allocate the same in total.
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
    """Return a config of one layer whose key and value dim are the hidden size over the number of heads."""
    width = hidden // heads
    fields = {"model_type": model_type, "hidden_size": hidden, "num_heads": heads, "num_hidden_layers": 1}
    fields |= {"intermediate_size": hidden, "vocab_size": 64, "head_dim": width, "expand_k": 1.0, "expand_v": 1.0}
    if model_type == "mamba2":
        fields |= {"expand": 1, "state_size": width, "n_groups": 1}
    return fields


def saved_bytes(layer: nn.Module, hidden: Tensor) -> int:
    """Return the bytes of the activations of a forward pass."""
    sizes = {x.untyped_storage().data_ptr(): 0 for x in layer.parameters()}
    alive = [hidden]

    def pack(x: Tensor) -> Tensor:
        alive.append(x)
        sizes.setdefault(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output = output_of(layer, hidden)
    for x in (hidden, output):
        sizes.setdefault(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes())
    return sum(sizes.values())


def output_of(layer: nn.Module, hidden: Tensor) -> Tensor:
    result = layer(hidden)
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def measure(layer: nn.Module, length: int, size: int) -> dict[str, int]:
    hidden = torch.randn(1, length, size, requires_grad=True)
    gradient = torch.randn(1, length, size)

    def step() -> None:
        output_of(layer, hidden).backward(gradient)
        hidden.grad = None

    step()
    activations = saved_bytes(layer, hidden)
    return {"length": length, "activations": activations, "peak": peak_bytes(step) + hidden.nbytes}


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
        rows += [{"type": name, **measure(layer, length, options.hidden)} for length in options.lengths]
        print(name, [f"{row['peak'] / row['activations']:.2f}" for row in rows if row["type"] == name], file=sys.stderr)
    settings = {"hidden": options.hidden, "heads": options.heads, "torch": torch.__version__}
    print(json.dumps({"benchmark": "activations", **settings, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
