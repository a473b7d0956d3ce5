"""Choose channels and cut them: what is asked for becomes a plan, and a plan becomes a folder.

Everything before `Plan` decides; everything after it executes. Only what is the same whatever is decided is written
meanwhile. `prune` does both, `make_plan` the first and `apply_plan` the second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

from slimstate.checkpoints.reader import Checkpoint
from slimstate.checkpoints.writer import CheckpointWriter, check_output, new_checkpoint
from slimstate.core.plan import Plan
from slimstate.core.surgery import Cutter, outline
from slimstate.data.text import Windows
from slimstate.models.options import LoadOptions
from slimstate.pruning.budget import Budget
from slimstate.pruning.description import begin_cut, cut_config, describe, documents_of
from slimstate.pruning.evidence import Gathering, read_windows
from slimstate.pruning.key_dim import Target
from slimstate.pruning.options import Calibration, CutOptions
from slimstate.pruning.planning import check_epsilon, check_rotatable, choose_channels, read_plan
from slimstate.pruning.reconstructing import Reconstructing, chosen_on_the_way
from slimstate.records.cut import CutRecord
from slimstate.records.provenance import non_defaults, run_config
from slimstate.selectors import Method, Selector, selector_named
from slimstate.system import distributed
from slimstate.system.errors import PlanError
from slimstate.system.progress import SILENT, Reporter


def prune(
    model: str | PathLike[str],
    out: str | Path | None,
    *,
    key_dim: int | None = None,
    compression: float | None = None,
    budget: Budget | None = None,
    method: Method = "drrqr",
    calibration: Calibration | str | Path | Iterable[object] | None = None,
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
    options = replace(options, reconstruct=None) if out is None else options
    choice = Choosing.prepare(checkpoint, target, method, Calibration.of(calibration), options, run, reporter)
    if options.reconstruct is not None and out is not None:
        return choice.reconstructed(Path(out), started)
    begin_cut(checkpoint, choice.key_dim, choice.line, options.engine, reporter)
    with cutting(checkpoint, choice.key_dim, out, options.force, reporter) as cut:
        plan, kernels = choice.plan(meanwhile=cut.copy)
        return cut.finish(plan, kernels, started)


def make_plan(
    model: str | PathLike[str],
    *,
    key_dim: int | None = None,
    compression: float | None = None,
    budget: Budget | None = None,
    method: Method = "drrqr",
    calibration: Calibration | str | Path | Iterable[object] | None = None,
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
    model: str | PathLike[str],
    plan: str | PathLike[str],
    out: str | Path | None,
    *,
    force: bool = False,
    engine: str | None = None,
    reporter: Reporter = SILENT,
) -> CutRecord:
    """Cut a model by a plan: a `slimstate_plan.json`, or the folder of a model that was cut by one."""
    started = time.perf_counter()
    checkpoint = opened(model, out, force, reporter)
    given = read_plan(Path(plan), checkpoint)
    line = f"applying {plan}: {given.method}, key dim {given.key_dim} of {given.width}"
    begin_cut(checkpoint, given.key_dim, line, engine, reporter)
    with cutting(checkpoint, given.key_dim, out, force, reporter) as cut:
        return cut.finish(given, None, started)


def opened(model: str | PathLike[str], out: str | Path | None, force: bool, reporter: Reporter) -> Checkpoint:
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
    method: Selector
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
        method: Method,
        calibration: Calibration,
        options: CutOptions,
        run: LoadOptions,
        reporter: Reporter,
    ) -> Choosing:
        """Whatever can be refused is refused here, before a model is loaded; the text is read."""
        selector = selector_named(method)
        key_dim, line = target.resolve(checkpoint.mixers, whole=selector.rotates)
        check_rotatable(checkpoint, selector)
        check_epsilon(checkpoint, key_dim, corrected=not options.keep_norm_eps)
        on_the_way = options.reconstruct is not None and chosen_on_the_way(selector, calibration.evidence)
        if options.reconstruct is not None and calibration.data is None:
            raise PlanError("a reconstruction is trained on text: give it with `calibration`")
        windows = None if on_the_way else read_windows(checkpoint, selector, calibration, reporter)
        line = f"{line} (a key dim would set it exactly)" if "rounded" in line else line
        return cls(
            checkpoint=checkpoint, key_dim=key_dim, line=line, method=selector, options=options,
            calibration=calibration, windows=windows, run=run, reporter=reporter,
        )  # fmt: skip

    def plan(self, meanwhile: Callable[[], None]) -> tuple[Plan, str | None]:
        """The plan, and the kernels that ran for it; `meanwhile` is called once, when there is time for it."""
        gathering = Gathering(calibration=self.calibration, windows=self.windows, run=self.run, meanwhile=meanwhile)
        needs = self.method.needs
        gathered, kernels = gathering.gather(self.checkpoint, needs, self.reporter)
        meanwhile()  # where no model had to run
        request = self.options.request(self.key_dim, self.run.place.type)
        plan = choose_channels(
            self.checkpoint, self.method, request, gathered,
            corrected=not self.options.keep_norm_eps, reporter=self.reporter,
        )  # fmt: skip
        return plan, kernels

    def reconstructed(self, out: Path, started: float) -> CutRecord:
        """Cut and reconstruct; the channels are chosen on the way where they can be."""
        begin_cut(self.checkpoint, self.key_dim, self.line, self.options.engine, self.reporter)
        options, data = self.options, self.calibration.data
        assert options.reconstruct is not None
        assert data is not None
        plan = None
        if not chosen_on_the_way(self.method, self.calibration.evidence):
            plan, _ = self.plan(meanwhile=lambda: None)
        told = {
            "key_dim": self.key_dim, "method": self.method.name, "reconstruct": True, "score": options.score,
            "rrqr_f": None if options.f == CutOptions.f else options.f, "keep_norm_eps": options.keep_norm_eps,
            "out": out, **dict(non_defaults(self.run)), **dict(non_defaults(self.calibration, exclude=("seed",))),
            "seed": options.seed or None,
            **{
                f"reconstruct_{name}": value
                for name, value in non_defaults(options.reconstruct, exclude=("seed", "distill"))
            },
        }  # fmt: skip
        return Reconstructing(
            checkpoint=self.checkpoint,
            out=out,
            data=data,
            method=self.method,
            request=options.request(self.key_dim, self.run.place.type),
            corrected=not options.keep_norm_eps and self.checkpoint.family.correction(self.checkpoint.config).possible,
            options=replace(options.reconstruct, documents=self.calibration.documents),
            run=self.run,
            force=options.force,
            reporter=self.reporter,
        ).finish(plan, run_config("prune", {"model": self.checkpoint.source}, told), started)


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
        if plan.rotates and (others := self.checkpoint.mixers[0].noncommuting):
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
        cutter = Cutter(self.checkpoint.mixers, plan.selections, corrected=plan.corrected)
        documents = documents_of(plan, self.out.name, record, config)
        return self.writer.finish(cutter, config, documents, reporter=self.reporter)


@contextmanager
def cutting(
    checkpoint: Checkpoint, key_dim: int, out: str | Path | None, force: bool, reporter: Reporter
) -> Iterator[Cutting]:
    """What every cut to this key dim has in common is written while the channels are still being chosen.

    By the main process; there is no writer in the others, nor where nothing is to be written.
    """
    target = None if out is None else Path(out)
    with ExitStack() as stack:
        begun: list[CheckpointWriter] = []
        if target is not None:
            writer = new_checkpoint(checkpoint, outline(checkpoint.mixers, key_dim), target, force=force)
            distributed.from_main(lambda: begun.append(stack.enter_context(writer)))
        yield Cutting(checkpoint=checkpoint, out=target, writer=begun[0] if begun else None, reporter=reporter)
