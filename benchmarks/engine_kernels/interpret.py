"""Compare an engine's kernels, in Triton's interpreter on a CPU, with our recurrences. Runs in a fresh process.

    python benchmarks/engine_kernels/interpret.py vllm=PATH [KEY_DIM ...]
    python benchmarks/engine_kernels/interpret.py sglang=PATH > docs/records/sglang-kernels.json

PATH contains the engine, unpacked from a wheel. Prints a record as JSON, with the reason where a kernel does not run.
"""

# ruff: noqa: E402, I001 - the interpreter must be prepared before anything imports Triton

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from interpreting import loop_range

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import torch
import triton.language as tl
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpreterBuilder

from engine_kernels import sglang_projections
from engine_kernels.loading import EngineKernels
from engine_kernels.sglang_kernels import SglangKernels
from engine_kernels.inputs import KernelShape
from kernels import KernelSettings, inputs_for, largest_difference, load_kernels
from slimstate.records.base import versions

KEY_DIMS = (128, 96, 77, 64, 48, 32, 16)


def late_bound(name: str) -> Callable:
    """Return a function of Triton's language that is looked up on each call, as the interpreter replaces it."""

    def call(*args):
        return getattr(tl, name)(*args)

    return call


def with_boolean_mask(create: Callable, index: int) -> Callable:
    """Convert masks that are numbers: compiled, they are bits."""

    def call(self: InterpreterBuilder, *args):
        args[index].data = args[index].data.astype(bool)
        return create(self, *args)

    return call


def prepare(engine: str) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{engine}."):
            module.range = loop_range
            for function in ("exp", "exp2", "log", "log2", "gather"):
                if function in vars(module):
                    setattr(module, function, late_bound(function))
    torch.cpu.device = nullcontext  # a CPU is not selected as a GPU is
    InterpreterBuilder.create_masked_load = with_boolean_mask(InterpreterBuilder.create_masked_load, 1)
    InterpreterBuilder.create_masked_store = with_boolean_mask(InterpreterBuilder.create_masked_store, 2)


def difference_of(kernels: EngineKernels, rule: str, mode: str, key_dim: int) -> float:
    shape = KernelShape(name=rule, rule=rule, key_heads=1, value_heads=2, value_dim=32, width=128)
    inputs = inputs_for(shape, key_dim, torch.device("cpu"), torch.float32)
    return largest_difference(kernels, inputs, mode, KernelSettings(kernels="", sequences=3, length=128))


def cases(kernels: EngineKernels) -> Iterator[tuple[str, Callable[[int], float]]]:
    """Yield the name of each kernel and its difference as a function of the key dim."""
    for rule in ("gated_delta", "state_space"):
        for mode in ("decode", "prefill"):
            yield f"{rule} {mode}", partial(difference_of, kernels, rule, mode)
    if isinstance(kernels, SglangKernels):
        for name, difference in sglang_projections.DIFFERENCES.items():
            yield name, partial(difference, kernels.projection)


def row_of(name: str, key_dim: int, difference: Callable[[int], float]) -> dict[str, object]:
    try:
        with torch.inference_mode():
            return {"kernel": name, "key_dim": key_dim, "difference": difference(key_dim)}
    except InterpreterError as error:
        return {"kernel": name, "key_dim": key_dim, "error": str(error.__cause__)}


def main() -> None:
    source, *key_dims = sys.argv[1:]
    engine = source.partition("=")[0]
    kernels = load_kernels(source)
    prepare(engine)
    rows = [
        row_of(name, key_dim, difference)
        for name, difference in cases(kernels)
        for key_dim in (map(int, key_dims) if key_dims else KEY_DIMS)
    ]
    command = " ".join(["python benchmarks/engine_kernels/interpret.py", f"{engine}=PATH", *key_dims])
    facts = {"command": command, "engine": engine, "version": kernels.version, "versions": versions()}
    print(json.dumps({**facts, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
