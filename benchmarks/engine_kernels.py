"""vLLM's kernels at every multiple of 16 of the key dim, on a machine with torch, Triton and no command line.

    python benchmarks/engine_kernels.py FOLDER OUT.json [--shapes qwen3_next qwen3_5 mamba2] [--modes decode prefill]
        [--key-dims 128 64] [--sequences 1024] [--prompts 8 --length 2048] [--rounds 20]

FOLDER holds `vllm`, unpacked from a wheel. It is `slimstate bench decode --kernels vllm=FOLDER` without tables and
figures, and with a line for each row as it is measured.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from slimstate.benchmark.bench import BenchOptions
from slimstate.benchmark.kernels import MODES, SHAPES, bench_kernels, named
from slimstate.records.benchmark import KernelSettings
from slimstate.system.progress import Reporter


class Printing(Reporter):
    def say(self, line: str) -> None:
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", nargs="+", default=[shape.name for shape in SHAPES])
    parser.add_argument("--modes", nargs="+", default=MODES)
    parser.add_argument("--key-dims", nargs="+", type=int)
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args()
    record = bench_kernels(
        asked.folder,
        named(asked.shapes),
        asked.key_dims,
        settings=KernelSettings(
            kernels=f"vllm={asked.folder}",
            modes=tuple(asked.modes),
            sequences=asked.sequences,
            prompts=asked.prompts,
            length=asked.length,
        ),
        options=BenchOptions(rounds=asked.rounds),
        reporter=Printing(),
    )
    record.write(asked.out)
    for row in record.rows:
        if row.error:
            continue
        share = "" if row.share_of_copy_bandwidth is None else f"  {row.share_of_copy_bandwidth:.0%} of copying"
        gain = f"{row.speedup:.2f}x  differs by {row.difference:.1e}{share}"
        print(f"{row.model:12} {row.mode:8} {row.key_dim:4} {1e6 * row.time:10.1f} us  {gain}")


if __name__ == "__main__":
    main()
