"""Time an engine's Triton kernels at every key dim, in a decoding step and in a prefill, and check them.

    python benchmarks/kernels.py vllm=PATH --out DIR          PATH contains the engine, unpacked from its wheel

A decoding step reads and writes every state once, which takes at least as long as copying them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from engine_kernels.inputs import GatedDelta, KernelInputs, KernelShape, Mamba2
from engine_kernels.loading import EngineKernels
from engine_kernels.sglang_kernels import SglangKernels
from engine_kernels.vllm_kernels import VllmKernels

from slimstate.benchmark.bench import Bench, with_ratios
from slimstate.benchmark.options import BenchConfig
from slimstate.benchmark.tables import as_markdown, check_output, write_output
from slimstate.benchmark.timing import copy_bandwidth
from slimstate.kernels.autotune import compile_in_threads, tune_briefly
from slimstate.records.benchmark import KernelRecord, KernelRow
from slimstate.records.schema import Whole, to_json
from slimstate.system.errors import PlanError, reason_of
from slimstate.system.options import Options

SHAPES = (
    KernelShape(name="qwen3_next", rule="gated_delta", key_heads=16, value_heads=32, value_dim=128, width=128),
    KernelShape(name="qwen3_5", rule="gated_delta", key_heads=16, value_heads=48, value_dim=128, width=128),
    KernelShape(name="mamba2", rule="state_space", key_heads=8, value_heads=128, value_dim=64, width=128),
)
RULES: Mapping[str, type[GatedDelta] | type[Mamba2]] = {"gated_delta": GatedDelta, "state_space": Mamba2}
ENGINES: Mapping[str, type[EngineKernels]] = {"vllm": VllmKernels, "sglang": SglangKernels}
CHECK_SIZE = 256  # largest number of tokens or sequences on which outputs are compared
COMPILE_THREADS = 16


class KernelSettings(Options):
    """The kernels to time, as `vllm=PATH`: with `sequences` decoded together and `prompts` of `length` tokens."""

    kernels: str
    shapes: tuple[Any, ...] = ()  # KernelShape
    key_dims: tuple[Whole, ...] | None = None
    modes: tuple[Literal["decode", "prefill"], ...] = ("decode", "prefill")
    sequences: Whole = 1024
    prompts: Whole = 8
    length: Whole = 2048


def shapes_named(names: Sequence[str]) -> tuple[KernelShape, ...]:
    shapes = {shape.name: shape for shape in SHAPES}
    for name in names:
        if name not in shapes:
            raise PlanError(f"unknown shape {name!r}; choose from {', '.join(shapes)}")
    return tuple(shapes[name] for name in names)


def load_kernels(source: str) -> EngineKernels:
    """Load the kernels of an engine from a folder; `source` is ENGINE=PATH."""
    engine, _, path = source.partition("=")
    if engine not in ENGINES or not path:
        forms = " or ".join(f"{name}=PATH" for name in ENGINES)
        raise PlanError(f"`kernels` must be {forms}, where PATH contains the unpacked wheel, got {source}")
    return ENGINES[engine].load(path)


def time_kernels(settings: KernelSettings, kernels: EngineKernels, bench: Bench) -> KernelRecord:
    """Time the kernels of an engine at key dims; default: every multiple of 16 up to a shape's width."""
    if bench.device.type == "cuda":
        tune_briefly()
        compile_in_threads(COMPILE_THREADS)
    bandwidth = copy_bandwidth(bench.device)
    rows = [
        bench.attempt(
            KernelRow(model=shape.name, key_dim=key_dim, mode=mode),
            partial(_measure, bench, settings, kernels, inputs_for(shape, key_dim, bench.device, bench.dtype)),
        )
        for shape in settings.shapes
        for mode in settings.modes
        for key_dim in settings.key_dims or range(shape.width, 0, -16)
        if key_dim <= shape.width
    ]
    rows = [replace(row, share_of_copy_bandwidth=_share(row, settings, bandwidth)) for row in rows]
    return bench.finish(KernelRecord, to_json(settings), with_ratios(rows), copy_bandwidth=bandwidth)


def inputs_for(shape: KernelShape, key_dim: int, device: torch.device, dtype: torch.dtype) -> KernelInputs:
    return RULES[shape.rule](shape=shape, key_dim=key_dim, device=device, dtype=dtype)


def largest_difference(kernels: EngineKernels, inputs: KernelInputs, mode: str, settings: KernelSettings) -> float:
    """Compare outputs and states with our own recurrence and return the largest difference, in its deviations."""
    if mode == "decode":
        arguments = inputs.for_decode(min(settings.sequences, CHECK_SIZE))
        expected = inputs.expected_decode(arguments)  # first: the kernel updates the states in place
        actual = inputs.decode(kernels, arguments)
    else:
        arguments = inputs.for_prefill(1, min(settings.length, CHECK_SIZE))
        expected = inputs.expected_prefill(arguments)
        actual = inputs.prefill(kernels, arguments)
    pairs = zip(actual, expected, strict=True)
    return max(float((x.float() - ours.float()).abs().max() / ours.float().std()) for x, ours in pairs)


def _measure(
    bench: Bench, settings: KernelSettings, kernels: EngineKernels, inputs: KernelInputs, row: KernelRow
) -> KernelRow:
    """Fill in the row, or the reason why the kernel cannot be compiled for its key dim."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources

    try:
        with torch.inference_mode():
            difference = largest_difference(kernels, inputs, row.mode, settings)
            if row.mode == "prefill":
                arguments = inputs.for_prefill(settings.prompts, settings.length)
                row = bench.time(row, lambda: inputs.prefill(kernels, arguments))
                tokens = settings.prompts * settings.length
            else:
                arguments = inputs.for_decode(settings.sequences)
                row = bench.time_as_graph(row, lambda: inputs.decode(kernels, arguments))
                tokens = settings.sequences
    except (CompilationError, OutOfResources) as error:
        return replace(row, error=reason_of(error))
    shape = inputs.shape
    return replace(
        row,
        tokens_per_second=tokens / row.time,
        state_bytes=4 * shape.value_heads * shape.value_dim * row.key_dim,
        difference=difference,
    )


def _share(row: KernelRow, settings: KernelSettings, bandwidth: float) -> float | None:
    """Return what a decoding step moves in a second, as a share of the copy bandwidth."""
    if row.mode != "decode" or row.state_bytes is None:
        return None
    return 2 * row.state_bytes * settings.sequences / row.time / bandwidth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", metavar="ENGINE=PATH")
    parser.add_argument("--shapes", default=",".join(shape.name for shape in SHAPES))
    parser.add_argument("--key-dims", help="default: every multiple of 16")
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="folder for the record, the tables and the figure")
    parser.add_argument("--toy", action="store_true", help="load nothing: the kernels need a GPU and an engine")
    arguments = parser.parse_args()
    if arguments.toy:
        return
    if arguments.out is not None:
        check_output(arguments.out, "kernels")
    engine = load_kernels(arguments.source or "")
    settings = KernelSettings(
        kernels=arguments.source, shapes=shapes_named(arguments.shapes.split(",")), sequences=arguments.sequences,
        key_dims=arguments.key_dims and tuple(map(int, arguments.key_dims.split(","))),
    )  # fmt: skip
    bench = Bench.prepare("kernels", BenchConfig(rounds=arguments.rounds), f"{engine.title}, Triton")
    record = time_kernels(settings, engine, bench)
    print(as_markdown(record))
    if arguments.out is not None:
        write_output(record, arguments.out)


if __name__ == "__main__":
    main()
