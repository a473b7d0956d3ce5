"""Choose channels and cut them: what is asked for becomes a plan, and a plan becomes a folder.

Everything before `Plan` decides; everything after it executes. Only what is the same whatever is decided is written
meanwhile. `prune` does both, `make_plan` the first and `apply_plan` the second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from slimstate.checkpoints.model_card import cut_card
from slimstate.checkpoints.reader import Checkpoint
from slimstate.checkpoints.writer import CARD, CheckpointWriter, check_output, new_checkpoint
from slimstate.core.plan import PLAN, Plan
from slimstate.core.surgery import Cutter, outline
from slimstate.data.text import Windows
from slimstate.families.fla_layout import SHARED_FILTERS
from slimstate.models.offload import LoadOptions
from slimstate.models.stock import stock_differences
from slimstate.pruning.budget import Budget, state_bytes
from slimstate.pruning.evidence import Gathering, read_windows
from slimstate.pruning.inspect import parameters_after
from slimstate.pruning.key_dim import Target
from slimstate.pruning.options import Calibration, CutOptions
from slimstate.pruning.planning import check_epsilon, check_rotatable, choose_channels, read_plan
from slimstate.records.cut import CutRecord, Parameters, StateBytes
from slimstate.records.speed import SpeedOfCut
from slimstate.selectors import ROTATIONS, selector_named
from slimstate.serving.model_card import serving_lines
from slimstate.serving.widths import speed_of_cut
from slimstate.system import distributed
from slimstate.system.errors import ModelError
from slimstate.system.json_files import JsonObject
from slimstate.system.progress import SILENT, Reporter


def prune(
    model: str | Path,
    out: str | Path | None,
    *,
    key_dim: int | None = None,
    compression: float | None = None,
    budget: Budget | None = None,
    method: str = "drrqr",
    calibration: Calibration | str | Path | None = None,
    options: CutOptions = CutOptions(),
    run: LoadOptions = LoadOptions(),
    reporter: Reporter = SILENT,
) -> CutRecord:
    """Cut a model and write it to `out`; with None, choose the channels and write nothing. Returns the record.

    How much is kept is said by `key_dim`, by `compression` (the share of channels to remove) or by a `budget`. A
    `calibration` is a text, or a `Calibration` that says more.

    Several processes share the calibration, and the main one writes; all return when it has.
    """
    started = time.perf_counter()
    checkpoint = opened(model, out, options.force, reporter)
    target = Target(key_dim=key_dim, compression=compression, budget=budget)
    choice = Choosing.prepare(checkpoint, target, method, Calibration.of(calibration), options, run, reporter)
    with cutting(checkpoint, choice.key_dim, out, options.force, choice.line, reporter) as cut:
        plan, kernels = choice.plan(meanwhile=cut.copy)
        return cut.finish(plan, kernels, started)


def make_plan(
    model: str | Path,
    *,
    key_dim: int | None = None,
    compression: float | None = None,
    budget: Budget | None = None,
    method: str = "drrqr",
    calibration: Calibration | str | Path | None = None,
    options: CutOptions = CutOptions(),
    run: LoadOptions = LoadOptions(),
    reporter: Reporter = SILENT,
) -> Plan:
    """Which channels every head of a model would keep; nothing is written. The same options as `prune`."""
    record = prune(
        model,
        None,
        key_dim=key_dim,
        compression=compression,
        budget=budget,
        method=method,
        calibration=calibration,
        options=options,
        run=run,
        reporter=reporter,
    )
    return record.plan


def apply_plan(
    model: str | Path,
    plan: str | Path,
    out: str | Path | None,
    *,
    force: bool = False,
    reporter: Reporter = SILENT,
) -> CutRecord:
    """Cut a model by a plan: a `slimstate_plan.json`, or the folder of a model that was cut by one."""
    started = time.perf_counter()
    checkpoint = opened(model, out, force, reporter)
    given = read_plan(Path(plan), checkpoint)
    line = f"applying {plan}: {given.method}, key dim {given.key_dim} of {given.width}"
    with cutting(checkpoint, given.key_dim, out, force, line, reporter) as cut:
        return cut.finish(given, None, started)


def opened(model: str | Path, out: str | Path | None, force: bool, reporter: Reporter) -> Checkpoint:
    """The model, and a place for its cut that is free."""
    checkpoint = Checkpoint.open(model)
    if out is not None:
        check_output(checkpoint, Path(out), force)
    if checkpoint.cut is not None:
        widths = f"from key dim {checkpoint.cut['width']} to {checkpoint.cut['key_dim']}"
        reporter.say(f"cut before, {widths}; both cuts are recorded")
    return checkpoint


@dataclass(frozen=True, kw_only=True)
class Choosing:
    """A choice of channels that is about to be made, with all that it takes at hand."""

    checkpoint: Checkpoint
    key_dim: int
    line: str
    method: str
    options: CutOptions
    calibration: Calibration
    windows: Windows | None
    run: LoadOptions
    reporter: Reporter

    @classmethod
    def prepare(
        cls,
        checkpoint: Checkpoint,
        target: Target,
        method: str,
        calibration: Calibration,
        options: CutOptions,
        run: LoadOptions,
        reporter: Reporter,
    ) -> Choosing:
        """Whatever can be refused is refused here, before a model is loaded; the text is read."""
        key_dim, line = target.resolve(checkpoint.mixers, whole=method in ROTATIONS)
        selector = selector_named(method)
        check_rotatable(checkpoint, method)
        check_epsilon(checkpoint, key_dim, corrected=not options.keep_norm_eps)
        windows = read_windows(checkpoint, selector, calibration, reporter)
        line = f"{line} (a key dim would set it exactly)" if "rounded" in line else line
        return cls(
            checkpoint=checkpoint, key_dim=key_dim, line=line, method=method, options=options,
            calibration=calibration, windows=windows, run=run, reporter=reporter,
        )  # fmt: skip

    def plan(self, meanwhile: Callable[[], None]) -> tuple[Plan, str | None]:
        """The plan, and the kernels that ran for it; `meanwhile` is called once, when there is time for it."""
        gathering = Gathering(calibration=self.calibration, windows=self.windows, run=self.run, meanwhile=meanwhile)
        needs = selector_named(self.method).needs
        gathered, kernels = gathering.gather(self.checkpoint, needs, self.reporter)
        meanwhile()  # where no model had to run
        request = self.options.request(self.key_dim, self.run.place.type)
        plan = choose_channels(
            self.checkpoint, self.method, request, gathered,
            corrected=not self.options.keep_norm_eps, reporter=self.reporter,
        )  # fmt: skip
        return plan, kernels


@dataclass(frozen=True, kw_only=True)
class Cutting:
    """A cut under way; without a writer, because nothing is to be written or another process does it."""

    checkpoint: Checkpoint
    out: Path | None
    writer: CheckpointWriter | None
    reporter: Reporter

    def copy(self) -> None:
        """Begin to copy what no cut to this key dim changes."""
        if self.writer is not None:
            self.writer.copy()

    def finish(self, plan: Plan, kernels: str | None, started: float) -> CutRecord:
        """Write what the plan says, where something is to be written; returns the record."""
        if plan.method in ROTATIONS and (others := self.checkpoint.mixers[0].noncommuting):
            self.reporter.say(
                f"a rotation, and not exact here: {' and '.join(others)} act on the channels as they were"
            )
        record = describe(self.checkpoint, plan, kernels)
        if self.out is not None:
            left_out = distributed.from_main(lambda: self._write(plan, record))
            record = replace(record, out=str(self.out), left_out=tuple(left_out))
        return replace(record, seconds=time.perf_counter() - started)

    def _write(self, plan: Plan, record: CutRecord) -> list[str]:
        """Returns the files that were left out."""
        assert self.writer is not None
        assert self.out is not None
        config = cut_config(self.checkpoint, plan)
        card = cut_card(plan, self.out.name, record, config["slimstate"]["history"])
        card += serving_lines(plan.model_type, plan.key_dim)
        cutter = Cutter(self.checkpoint.mixers, plan.selections, corrected=plan.corrected)
        documents = {PLAN: plan.to_json() + "\n", CARD: card}
        return self.writer.finish(cutter, config, documents, reporter=self.reporter)


@contextmanager
def cutting(
    checkpoint: Checkpoint, key_dim: int, out: str | Path | None, force: bool, line: str, reporter: Reporter
) -> Iterator[Cutting]:
    """What every cut to this key dim has in common is written while the channels are still being chosen.

    By the main process; there is no writer in the others, nor where nothing is to be written.
    """
    check_stock_shapes(checkpoint, key_dim, reporter)
    reporter.say(line)
    tell_speed(checkpoint, key_dim, reporter)
    target = None if out is None else Path(out)
    with ExitStack() as stack:
        begun: list[CheckpointWriter] = []
        if target is not None:
            writer = new_checkpoint(checkpoint, outline(checkpoint.mixers, key_dim), target, force=force)
            distributed.from_main(lambda: begun.append(stack.enter_context(writer)))
        yield Cutting(checkpoint=checkpoint, out=target, writer=begun[0] if begun else None, reporter=reporter)


def tell_speed(checkpoint: Checkpoint, key_dim: int, reporter: Reporter) -> SpeedOfCut | None:
    """Say and return what the key dim does to the speed of a layer, where that was measured."""
    speed = speed_of_cut(checkpoint.family.model_type, checkpoint.mixers[0].axis.width, key_dim)
    if speed is not None:
        reporter.say(speed.advice)
    return speed


def check_stock_shapes(checkpoint: Checkpoint, key_dim: int, reporter: Reporter = SILENT) -> None:
    """Every tensor the stock class would make of the config is there, in that shape, and will be after the cut."""
    with reporter.waiting("comparing the tensors with the stock class"):
        shapes = {name: list(info.shape) for name, info in checkpoint.tensors.items()}
        for name, shape, expected in stock_differences(checkpoint.config, shapes):
            if shape is None:
                raise ModelError(f"{checkpoint.folder} has no tensor {name}, which its config asks for")
            raise ModelError(f"{checkpoint.folder}: {name} is {shape} where the config says {expected}")
        cut = outline(checkpoint.mixers, key_dim)
        after = {name: cut.shape(name, shape) for name, shape in shapes.items()}
        for name, shape, expected in stock_differences(checkpoint.family.resize(checkpoint.config, key_dim), after):
            raise AssertionError(f"{name} would be {shape} where the stock class makes {expected}")


def cut_config(checkpoint: Checkpoint, plan: Plan) -> JsonObject:
    """The config of the cut model, with what was done under the key `slimstate`."""
    config = dict(checkpoint.family.resize(checkpoint.config, plan.key_dim, corrected=plan.corrected))
    previous = checkpoint.config.get("slimstate")
    config["slimstate"] = {
        "version": plan.versions.get("slimstate"),
        "base_model": plan.model["source"],
        "base_fingerprint": plan.model["fingerprint"],
        "method": plan.method,
        "score": plan.score,
        "width": plan.width,
        "key_dim": plan.key_dim,
        "corrected": plan.corrected,
        "correction": plan.correction,
        **_lasting(previous),
        "history": [] if previous is None else [*previous.get("history", []), _without_history(previous)],
    }
    return config


def _lasting(previous: Mapping[str, object] | None) -> JsonObject:
    """What is true of a model after a cut as before it: which channels share a filter."""
    return {name: value for name, value in (previous or {}).items() if name == SHARED_FILTERS}


def _without_history(entry: Mapping[str, object]) -> JsonObject:
    return {key: value for key, value in entry.items() if key != "history"}


def describe(checkpoint: Checkpoint, plan: Plan, kernels: str | None) -> CutRecord:
    """What the cut changes, in numbers; nothing is written yet."""
    mixers = checkpoint.mixers
    return CutRecord(
        model=checkpoint.source,
        model_type=plan.model_type,
        method=plan.method,
        score=plan.score,
        width=plan.width,
        key_dim=plan.key_dim,
        compression=plan.compression,
        corrected=plan.corrected,
        noncommuting=(mixers[0].noncommuting or ()) if plan.method in ROTATIONS else None,
        correction=plan.correction,
        state_bytes=StateBytes(before=state_bytes(mixers, plan.width), after=state_bytes(mixers, plan.key_dim)),
        parameters=Parameters(before=checkpoint.parameters, after=parameters_after(checkpoint, plan.key_dim)),
        speed=speed_of_cut(plan.model_type, plan.width, plan.key_dim),
        calibration=plan.calibration,
        certificate=plan.summary(),
        versions=plan.versions,
        kernels=kernels,
        out=None,
        seconds=0.0,
        plan=plan,
    )
