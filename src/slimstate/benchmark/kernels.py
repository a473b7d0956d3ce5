"""An engine's kernels at every key dim: a decoding step of many sequences, and a prefill; checked against ours.

A decoding step reads and writes every state once, which takes at least as long as copying them. B sequences, T tokens,
H key heads, G value heads, K key dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from slimstate.benchmark.bench import Bench, BenchOptions, with_ratios
from slimstate.benchmark.engine_kernels import EngineKernels, Given
from slimstate.benchmark.sglang_kernels import SglangKernels
from slimstate.benchmark.timing import copy_bandwidth, timed, timed_as_graph
from slimstate.benchmark.vllm_kernels import VllmKernels
from slimstate.kernels import delta_rule, mamba2
from slimstate.kernels.autotune import compile_side_by_side, tune_briefly
from slimstate.kernels.fla_calls import unit
from slimstate.models.options import RunOptions
from slimstate.records.benchmark import KernelRecord, KernelRow, KernelSettings, KernelShape
from slimstate.system.errors import PlanError, reason_of
from slimstate.system.progress import SILENT, Reporter

SHAPES = (
    KernelShape(name="qwen3_next", rule="gated_delta", key_heads=16, value_heads=32, value_dim=128, width=128),
    KernelShape(name="qwen3_5", rule="gated_delta", key_heads=16, value_heads=48, value_dim=128, width=128),
    KernelShape(name="mamba2", rule="state_space", key_heads=8, value_heads=128, value_dim=64, width=128),
)
MODES = KernelSettings.MODES
CHUNK = 256  # tokens of a chunk in Mamba-2, as published models have it
CHECKED = 256  # tokens, and sequences, on which outputs are compared
COMPILING = 16  # threads
USUAL = BenchOptions(rounds=20)
ENGINES: Mapping[str, type[EngineKernels]] = {"vllm": VllmKernels, "sglang": SglangKernels}


def named(shapes: Sequence[str]) -> tuple[KernelShape, ...]:
    known = {shape.name: shape for shape in SHAPES}
    for name in shapes:
        if name not in known:
            raise PlanError(f"unknown shape {name!r}; there are {', '.join(known)}")
    return tuple(known[name] for name in shapes)


def loaded(kernels: str) -> EngineKernels:
    """Those of an engine in a folder, as `vllm=PATH`."""
    name, _, path = kernels.partition("=")
    if name not in ENGINES or not path:
        known = " or ".join(f"{engine}=PATH" for engine in ENGINES)
        raise PlanError(f"`kernels` {kernels}: {known}, where PATH holds the engine as it is unpacked from a wheel")
    return ENGINES[name].load(path)


def bench_kernels(
    kernels: str,
    shapes: Sequence[KernelShape] = SHAPES,
    key_dims: Sequence[int] | None = None,
    *,
    settings: KernelSettings | None = None,
    options: BenchOptions = USUAL,
    run: RunOptions | None = None,
    out: str | Path | None = None,
    reporter: Reporter = SILENT,
) -> KernelRecord:
    """Time an engine's kernels, as `vllm=PATH`, at key dims: by default every multiple of 16 up to a shape's width.

    `settings` say how many sequences and tokens; the rest of them is what is given here.
    """
    found = loaded(kernels)
    asked = replace(
        settings or KernelSettings(kernels=kernels),
        kernels=kernels,
        shapes=tuple(shapes),
        key_dims=tuple(sorted(key_dims, reverse=True)) if key_dims else None,
    )
    told = f"{found.title}, Triton"
    bench = Bench.begin("kernels", options, run, out=out, reporter=reporter, kernels=told)
    if bench.device.type == "cuda":
        tune_briefly()
        compile_side_by_side(COMPILING)
    return time_kernels(asked, found, bench)


def time_kernels(settings: KernelSettings, kernels: EngineKernels, bench: Bench) -> KernelRecord:
    bandwidth = copy_bandwidth(bench.device)
    rows = [
        bench.attempt(
            KernelRow(model=shape.name, key_dim=key_dim, mode=mode),
            partial(_measure, Work(shape=shape, settings=settings, kernels=kernels, bench=bench), bandwidth),
        )
        for shape in settings.shapes
        for mode in settings.modes
        for key_dim in settings.key_dims or range(shape.width, 0, -16)
        if key_dim <= shape.width
    ]
    options = {
        "models": tuple(shape.name for shape in settings.shapes),
        "key_dims": settings.key_dims,
        "batches": settings.sequences,
        "kernels": settings.kernels,
    }
    asked = ("decode", options)
    return bench.finish(KernelRecord, settings, with_ratios(rows), asked, copy_bandwidth=bandwidth)


def _measure(work: Work, bandwidth: float, row: KernelRow) -> KernelRow:
    """What a kernel does at a width, or why it cannot be compiled for it."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources

    try:
        with torch.inference_mode():
            difference = work.difference(row)
            return replace(work.timed(row, bandwidth), difference=difference)
    except (CompilationError, OutOfResources) as error:
        return replace(row, error=reason_of(error))


@dataclass(frozen=True, kw_only=True)
class Work:
    """One shape in the kernels of an engine."""

    shape: KernelShape
    settings: KernelSettings
    kernels: EngineKernels
    bench: Bench

    @property
    def rule(self) -> type[GatedDelta] | type[Mamba2]:
        return GatedDelta if self.shape.rule == "gated_delta" else Mamba2

    def inputs(self, key_dim: int) -> GatedDelta | Mamba2:
        return self.rule(shape=self.shape, key_dim=key_dim, device=self.bench.device, dtype=self.bench.dtype)

    def difference(self, row: KernelRow) -> float:
        """The largest difference from our recurrence on the same numbers, of outputs and of states.

        Each is over the deviation of ours.
        """
        inputs = self.inputs(row.key_dim)
        if row.mode == "decode":
            given = inputs.decoding(min(self.settings.sequences, CHECKED))
            state = given["state"].clone()
            found, expected = (inputs.decode(self.kernels, given, state), state[1:]), inputs.expected_decode(given)
        else:
            given = inputs.prefilling(1, min(self.settings.length, CHECKED))
            found, expected = inputs.prefill(self.kernels, given), inputs.expected_prefill(given)
        pairs = zip(found, expected, strict=True)
        return max(float((x.float() - ours.float()).abs().max() / ours.float().std()) for x, ours in pairs)

    def timed(self, row: KernelRow, bandwidth: float) -> KernelRow:
        inputs, sizes, bench = self.inputs(row.key_dim), self.settings, self.bench
        rounds, state_bytes = bench.options.rounds, 4 * self.shape.value_heads * self.shape.value_dim * row.key_dim
        if row.mode == "prefill":
            given = inputs.prefilling(sizes.prompts, sizes.length)
            timing = timed(lambda: inputs.prefill(self.kernels, given), bench.device, rounds=rounds)
            tokens = sizes.prompts * sizes.length
            return replace(timing.fill(row), tokens_per_second=tokens / timing.median, state_bytes=state_bytes)
        given = inputs.decoding(sizes.sequences)
        step: Callable[[], object] = partial(inputs.decode, self.kernels, given, given["state"])
        row = timed_as_graph(step, bench.device, rounds=rounds, say=bench.reporter.say).fill(row)
        moved = 2 * state_bytes * sizes.sequences / row.time
        return replace(
            row,
            tokens_per_second=sizes.sequences / row.time,
            state_bytes=state_bytes,
            share_of_copy_bandwidth=moved / bandwidth,
        )


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Random numbers of one shape at one key dim, on one device; the same whenever they are drawn."""

    shape: KernelShape
    key_dim: int
    device: torch.device
    dtype: torch.dtype

    def normal(self, *shape: int, wide: bool = False) -> Tensor:
        found = torch.randn(*shape, device=self.device, generator=torch.Generator(self.device).manual_seed(sum(shape)))
        return found if wide else found.to(self.dtype)

    def slots(self, sequences: int) -> Tensor:
        return torch.arange(1, sequences + 1, device=self.device, dtype=torch.int32)

    def starts(self, prompts: int, length: int) -> Tensor:
        return torch.arange(prompts + 1, device=self.device, dtype=torch.int32) * length


class GatedDelta(Drawn):
    """Qwen3-Next and Qwen3.5: decoding makes its gates from what the projections give, prefill gets them made."""

    def decoding(self, sequences: int) -> Given:
        h, g, v, k = self.shape.key_heads, self.shape.value_heads, self.shape.value_dim, self.key_dim
        return {
            "mixed": self.normal(sequences, 2 * h * k + g * v),
            "a": self.normal(sequences, g),
            "b": self.normal(sequences, g),
            "A_log": self.normal(g, wide=True).abs().log(),
            "dt_bias": self.normal(g, wide=True),
            "slots": self.slots(sequences),
            "out": torch.empty(sequences, 1, g, v, device=self.device, dtype=self.dtype),
            "state": self.normal(sequences + 1, g, v, k, wide=True),
        }

    def decode(self, kernels: EngineKernels, given: Given, state: Tensor) -> Tensor:
        return kernels.gated_decode(given, state)

    def expected_decode(self, given: Given) -> tuple[Tensor, Tensor]:
        h, v, k = self.shape.key_heads, self.shape.value_dim, self.key_dim
        mixed = given["mixed"].float()
        q, key = (mixed[:, place * h * k : (place + 1) * h * k].unflatten(-1, (h, k)) for place in (0, 1))
        decay = -given["A_log"].exp() * F.softplus(given["a"].float() + given["dt_bias"])
        o, last = delta_rule.recurrence(
            unit(q).unsqueeze(1),
            unit(key).unsqueeze(1),
            mixed[:, 2 * h * k :].unflatten(-1, (-1, v)).unsqueeze(1),
            given["b"].float().sigmoid().to(self.dtype).float().unsqueeze(1),
            decay.unsqueeze(1),
            scale=k**-0.5,
            state=given["state"][1:].mT.contiguous(),
        )
        return o, last.mT

    def prefilling(self, prompts: int, length: int) -> Given:
        h, g, v, k = self.shape.key_heads, self.shape.value_heads, self.shape.value_dim, self.key_dim
        tokens = prompts * length
        return {
            "q": unit(self.normal(1, tokens, h, k, wide=True)).to(self.dtype),
            "k": unit(self.normal(1, tokens, h, k + 1, wide=True)[..., :k]).to(self.dtype),
            "v": self.normal(1, tokens, g, v),
            "g": -F.softplus(self.normal(1, tokens, g, wide=True)),
            "beta": self.normal(1, tokens, g).sigmoid(),
            "begun": torch.zeros(prompts, g, v, k, device=self.device),
            "starts": self.starts(prompts, length),
        }

    def prefill(self, kernels: EngineKernels, given: Given) -> tuple[Tensor, Tensor]:
        return kernels.gated_prefill(given)

    def expected_prefill(self, given: Given) -> tuple[Tensor, Tensor]:
        q, k, v, beta, g = (given[name].float() for name in ("q", "k", "v", "beta", "g"))
        o, last = delta_rule.chunked(q, k, v, beta, g, scale=self.key_dim**-0.5)
        return o, last.mT


class Mamba2(Drawn):
    """Nemotron-H, Codestral Mamba and their kin: heads of 64 channels in groups."""

    def _shared(self, *leading: int) -> dict[str, Tensor]:
        heads, groups, p = self.shape.value_heads, self.shape.key_heads, self.shape.value_dim
        return {
            "x": self.normal(*leading, heads, p),
            "B": self.normal(*leading, groups, self.key_dim),
            "C": self.normal(*leading, groups, self.key_dim + 1)[..., : self.key_dim].contiguous(),
        }

    @property
    def _rate(self) -> Tensor:
        return -self.normal(self.shape.value_heads, wide=True).abs()

    def decoding(self, sequences: int) -> Given:
        heads, p, n = self.shape.value_heads, self.shape.value_dim, self.key_dim
        by_head = {"dt_bias": self.normal(heads, wide=True), "D": self.normal(heads)}
        return {
            **self._shared(sequences),
            **{name: each.unsqueeze(-1).expand(-1, p) for name, each in by_head.items()},
            "dt": self.normal(sequences, heads).unsqueeze(-1).expand(-1, -1, p),
            "A": self._rate.view(-1, 1, 1).expand(-1, p, n),
            "slots": self.slots(sequences),
            "out": torch.empty(sequences, heads, p, device=self.device, dtype=self.dtype),
            "state": self.normal(sequences + 1, heads, p, n, wide=True),
        }

    def decode(self, kernels: EngineKernels, given: Given, state: Tensor) -> Tensor:
        return kernels.mamba_decode(given, state)

    def expected_decode(self, given: Given) -> tuple[Tensor, Tensor]:
        tokens = {name: given[name].unsqueeze(1) for name in ("x", "B", "C")}
        dt, begun = given["dt"][..., 0].unsqueeze(1), given["state"][1:]
        by_head = (given["A"][:, 0, 0], given["dt_bias"][:, 0], given["D"][:, 0])
        o, last = self._expected(tokens, dt, *by_head, begun)
        return o[:, 0], last

    def prefilling(self, prompts: int, length: int) -> Given:
        heads, tokens = self.shape.value_heads, prompts * length
        chunk = min(CHUNK, length)
        if length % chunk:
            raise PlanError(f"`length` {length}: prompts of Mamba-2 are timed in whole chunks of {chunk}")
        each = length // chunk
        return {
            **self._shared(tokens),
            "dt": self.normal(tokens, heads),
            "A": self._rate,
            "D": self.normal(heads),
            "dt_bias": self.normal(heads, wide=True),
            "out": torch.empty(tokens, heads, self.shape.value_dim, device=self.device, dtype=self.dtype),
            "starts": self.starts(prompts, length),
            "chunk_starts": self.starts(prompts * each, chunk),
            "last_chunks": torch.arange(1, prompts + 1, device=self.device, dtype=torch.int32) * each - 1,
            "chunk_sequences": torch.arange(prompts, device=self.device, dtype=torch.int32).repeat_interleave(each),
        }

    def prefill(self, kernels: EngineKernels, given: Given) -> tuple[Tensor, Tensor]:
        chunk = int(given["x"].shape[0] // (len(given["chunk_starts"]) - 1))
        return kernels.mamba_prefill(given, chunk)

    def expected_prefill(self, given: Given) -> tuple[Tensor, Tensor]:
        tokens = {name: given[name].unsqueeze(0) for name in ("x", "B", "C")}
        o, last = self._expected(tokens, given["dt"].unsqueeze(0), given["A"], given["dt_bias"], given["D"], None)
        return o[0], last

    def _expected(
        self, tokens: Given, dt: Tensor, rate: Tensor, bias: Tensor, skip: Tensor, begun: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        found = mamba2.state_space_scan(
            tokens["x"].float(), dt.float(), rate, tokens["B"].float(), tokens["C"].float(), CHUNK, skip.float(),
            dt_bias=bias, initial_states=begun, dt_softplus=True, return_final_states=True,
        )  # fmt: skip
        assert isinstance(found, tuple)
        return found
