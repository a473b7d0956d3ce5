"""Run in a fresh process, with -O: how far vLLM's kernels in Triton's interpreter are from our recurrences.

    python -O interpret_vllm.py FOLDER

FOLDER holds `vllm`, unpacked from a wheel. Prints JSON: the difference by rule, mode and key dim. Some kernels refuse
float32 by an assertion, hence the -O.
"""

from interpreting import counted  # noqa: I001  before anything that imports Triton

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace

import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

from slimstate.benchmark.kernels import MODES, Work
from slimstate.benchmark.vllm_kernels import vllm_kernels
from slimstate.records.benchmark import KernelRow, KernelSettings, KernelShape


def looked_up(name: str) -> Callable:
    """A function of Triton's language as the interpreter has it by then."""

    def call(x):
        return getattr(tl, name)(x)

    return call


def masked(create: Callable, place: int) -> Callable:
    """Masks that are numbers: compiled, they are bits."""

    def call(self: InterpreterBuilder, *args):
        args[place].data = args[place].data.astype(bool)
        return create(self, *args)

    return call


def prepare() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm."):
            module.range = counted
            for function in ("exp", "exp2", "log", "log2"):
                if function in vars(module):
                    setattr(module, function, looked_up(function))
    InterpreterBuilder.create_masked_load = masked(InterpreterBuilder.create_masked_load, 1)
    InterpreterBuilder.create_masked_store = masked(InterpreterBuilder.create_masked_store, 2)


def main() -> None:
    kernels = vllm_kernels(sys.argv[1])
    prepare()
    bench, found = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32), {}
    for rule in ("gated_delta", "state_space"):
        shape = KernelShape(name=rule, rule=rule, key_heads=1, value_heads=2, value_dim=32, width=128)
        settings = KernelSettings(kernels="vllm", sequences=3, length=128)
        work = Work(shape=shape, settings=settings, kernels=kernels, bench=bench)
        for mode in MODES:
            for key_dim in (128, 96, 48, 32, 16):
                with torch.inference_mode():
                    row = KernelRow(model=rule, key_dim=key_dim, mode=mode)
                    found[f"{rule} {mode} {key_dim}"] = work.difference(row)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
