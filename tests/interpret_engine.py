"""Run in a fresh process: how far an engine's kernels in Triton's interpreter are from our recurrences, on a CPU.

    python tests/interpret_engine.py vllm=PATH [KEY_DIM ...]
    python tests/interpret_engine.py sglang=PATH > docs/records/sglang-kernels.json

PATH holds the engine, unpacked from a wheel. Prints a record in JSON; a kernel that does not run at a key dim says why.
"""

from interpreting import counted  # noqa: I001  before anything that imports Triton

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import torch
import triton.language as tl
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpreterBuilder

import sglang_projections
from slimstate.benchmark.kernels import MODES, Work, loaded
from slimstate.benchmark.engine_kernels import EngineKernels
from slimstate.benchmark.sglang_kernels import SglangKernels
from slimstate.records.base import versions
from slimstate.records.benchmark import KernelRow, KernelSettings, KernelShape

KEY_DIMS = (128, 96, 77, 64, 48, 32, 16)


def looked_up(name: str) -> Callable:
    """A function of Triton's language as the interpreter has it by then."""

    def call(*args):
        return getattr(tl, name)(*args)

    return call


def masked(create: Callable, place: int) -> Callable:
    """Masks that are numbers: compiled, they are bits."""

    def call(self: InterpreterBuilder, *args):
        args[place].data = args[place].data.astype(bool)
        return create(self, *args)

    return call


def prepare(engine: str) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{engine}."):
            module.range = counted
            for function in ("exp", "exp2", "log", "log2", "gather"):
                if function in vars(module):
                    setattr(module, function, looked_up(function))
    torch.cpu.device = nullcontext  # one is not chosen as a GPU is
    InterpreterBuilder.create_masked_load = masked(InterpreterBuilder.create_masked_load, 1)
    InterpreterBuilder.create_masked_store = masked(InterpreterBuilder.create_masked_store, 2)


def works(kernels: EngineKernels) -> Iterator[tuple[str, Callable[[int], float]]]:
    """What there is to run, as a function of the key dim."""
    bench = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
    settings = KernelSettings(kernels="", sequences=3, length=128)
    for rule in ("gated_delta", "state_space"):
        shape = KernelShape(name=rule, rule=rule, key_heads=1, value_heads=2, value_dim=32, width=128)
        work = Work(shape=shape, settings=settings, kernels=kernels, bench=bench)
        for mode in MODES:
            yield (
                f"{rule} {mode}",
                lambda key_dim, work=work, mode=mode: work.difference(KernelRow(model="", key_dim=key_dim, mode=mode)),
            )
    if isinstance(kernels, SglangKernels):
        for name, difference in sglang_projections.DIFFERENCES.items():
            yield name, lambda key_dim, difference=difference: difference(kernels.projection, key_dim)


def row_of(name: str, key_dim: int, difference: Callable[[int], float]) -> dict[str, object]:
    try:
        with torch.inference_mode():
            return {"kernel": name, "key_dim": key_dim, "difference": difference(key_dim)}
    except InterpreterError as error:
        return {"kernel": name, "key_dim": key_dim, "error": str(error.__cause__)}


def main() -> None:
    given, *key_dims = sys.argv[1:]
    engine = given.partition("=")[0]
    kernels = loaded(given)
    prepare(engine)
    rows = [
        row_of(name, key_dim, difference)
        for name, difference in works(kernels)
        for key_dim in (map(int, key_dims) if key_dims else KEY_DIMS)
    ]
    command = " ".join(["python tests/interpret_engine.py", f"{engine}=PATH", *key_dims])
    about = {"command": command, "engine": engine, "version": kernels.version, "versions": versions()}
    print(json.dumps({**about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
