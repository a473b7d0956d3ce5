"""Choose channels and cut them: what is asked for becomes a plan, and a plan becomes a folder.

Everything before `Plan` decides; everything after it executes. Only what is the same whatever is decided is written
meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from slimstate.checkpoints.model_card import write_card
from slimstate.checkpoints.reader import Checkpoint
from slimstate.checkpoints.writer import CARD, Draft, check_output, drafted
from slimstate.core.plan import PLAN, Plan
from slimstate.core.surgery import Cutter, outline
from slimstate.families.fla_layout import SHARED_FILTERS
from slimstate.models.devices import pick_device
from slimstate.models.stock import stock_differences
from slimstate.pruning.budget import Budget, state_bytes
from slimstate.pruning.estimate import estimate
from slimstate.pruning.inspect import parameters_after
from slimstate.pruning.planning import Calibration, decide_key_dim, gather_evidence, make_plan, read_plan, read_windows
from slimstate.records.schema import written
from slimstate.records.speed import SpeedOfCut
from slimstate.selectors import ROTATIONS, Request, selector_named
from slimstate.serving.widths import speed_of_cut
from slimstate.system import distributed
from slimstate.system.errors import ModelError, PlanError
from slimstate.system.progress import SILENT, Reporter


def prune(
    model: str | Path,
    out: str | Path | None = None,
    *,
    method: str = "drrqr",
    compression: float | None = None,
    key_dim: int | None = None,
    state_mb: float | None = None,
    sequences: int | None = None,
    memory_gb: float | None = None,
    state_dtype: str = "fp32",
    data: str | None = None,
    samples: int = 128,
    length: int = 2048,
    score: str = "kq",
    seed: int = 0,
    f: float = 1.5,
    device: str | None = None,
    dtype: str | None = None,
    device_map: str | None = None,
    max_memory: str | None = None,
    keep_norm_eps: bool = False,
    evidence: str | Path | None = None,
    apply: str | Path | None = None,
    dry_run: bool = False,
    plan_only: bool = False,
    force: bool = False,
    reporter: Reporter = SILENT,
) -> dict[str, Any]:
    """Cut a model and write it to `out`; with `dry_run`, only say what would be done. Returns the record.

    With `plan_only` nothing is loaded: the record estimates time and memory.

    Several processes share the calibration, and the main one writes; all return when it has.
    """
    started = time.perf_counter()
    checkpoint = Checkpoint.open(model)
    if out is None and not (dry_run or plan_only):
        raise PlanError("give --out DIR, or --dry-run to write nothing")
    if out is not None:
        check_output(checkpoint, Path(out), force)
    if checkpoint.cut is not None:
        widths = f"from key dim {checkpoint.cut['width']} to {checkpoint.cut['key_dim']}"
        reporter.say(f"cut before, {widths}; both cuts are recorded")
    if apply is not None and plan_only:
        raise PlanError("--apply has its plan already and loads no model: there is nothing for --plan-only to estimate")
    if apply is not None and any(x is not None for x in (compression, key_dim, state_mb, sequences, memory_gb)):
        raise PlanError(
            "--apply has its plan, which says how much is kept: leave out --compression, --key-dim and budgets"
        )
    if apply is not None:
        given = read_plan(Path(apply), checkpoint)
        keep = given.key_dim
        line = f"applying {apply}: {given.method}, key dim {keep} of {given.width}"
    else:
        budget = Budget.of(state_mb, sequences, memory_gb, state_dtype)
        keep, line = decide_key_dim(checkpoint.mixers, compression, key_dim, budget, whole=method in ROTATIONS)
        request = Request(keep=keep, score=score, seed=seed, f=f, device=pick_device(device).type)
        selector = selector_named(method)
        path = None if evidence is None else Path(evidence)
        calibration = Calibration(
            data=data, samples=samples, length=length, seed=seed, device=device, dtype=dtype, path=path,
            device_map=device_map, max_memory=max_memory,
        )  # fmt: skip
        if plan_only:
            reporter.say(line)
            speed = written(tell_speed(checkpoint, keep, reporter))
            return {"kind": "estimate", "model": checkpoint.source, "method": method, "key_dim": keep, "speed": speed,
                    **estimate(checkpoint, selector, calibration)}  # fmt: skip
        windows = read_windows(checkpoint, selector, calibration, reporter)
        line = f"{line} (--key-dim sets it exactly)" if "rounded" in line else line
    check_stock_shapes(checkpoint, keep, reporter)
    reporter.say(line)
    tell_speed(checkpoint, keep, reporter)
    target = None if dry_run or out is None else Path(out)
    with _drafted(checkpoint, keep, target, force) as draft:
        copy = (lambda: None) if draft is None else draft.copy
        if apply is not None:
            plan, kernels = given, None
        else:
            gathered, kernels = gather_evidence(
                checkpoint, selector.needs, calibration, windows, reporter, meanwhile=copy
            )
            copy()  # where no model had to run
            plan = make_plan(checkpoint, method, request, gathered, corrected=not keep_norm_eps, reporter=reporter)
        if plan.method in ROTATIONS and (noncommuting := checkpoint.mixers[0].noncommuting):
            reporter.say(
                f"a rotation, and not exact here: {' and '.join(noncommuting)} act on the channels as they were"
            )
        record = describe(checkpoint, plan)
        record |= {"kernels": kernels, "out": None if target is None else str(target)}
        if target is not None:
            record["left_out"] = distributed.from_main(lambda: _finish(draft, checkpoint, plan, record, reporter))
    record["seconds"] = time.perf_counter() - started
    return record


@contextmanager
def _drafted(checkpoint: Checkpoint, key_dim: int, out: Path | None, force: bool) -> Iterator[Draft | None]:
    """What every cut to this key dim has in common is written while the channels are still being chosen.

    By the main process; there is no draft in the others, nor where nothing is to be written.
    """
    with ExitStack() as stack:
        begun: list[Draft] = []
        if out is not None:
            draft = drafted(checkpoint, outline(checkpoint.mixers, key_dim), out, force=force)
            distributed.from_main(lambda: begun.append(stack.enter_context(draft)))
        yield begun[0] if begun else None


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


def cut_config(checkpoint: Checkpoint, plan: Plan) -> dict[str, Any]:
    """The config of the cut model, with what was done under the key `slimstate`."""
    config = checkpoint.family.resize(checkpoint.config, plan.key_dim, corrected=plan.corrected)
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


def _lasting(previous: Mapping[str, Any] | None) -> dict[str, Any]:
    """What is true of a model after a cut as before it: which channels share a filter."""
    return {name: value for name, value in (previous or {}).items() if name == SHARED_FILTERS}


def _without_history(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != "history"}


def _finish(
    draft: Draft | None, checkpoint: Checkpoint, plan: Plan, record: Mapping[str, Any], reporter: Reporter
) -> list[str]:
    """Write what the plan says into the draft; returns the files that were left out."""
    assert draft is not None
    config = cut_config(checkpoint, plan)
    states, parameters = record["state_bytes"], record["parameters"]
    card = write_card(
        plan,
        Path(record["out"]).name,
        (states["before"]["fp32"], states["after"]["fp32"]),
        (parameters["before"], parameters["after"]),
        config["slimstate"]["history"],
    )
    cutter = Cutter(checkpoint.mixers, plan.selections, corrected=plan.corrected)
    return draft.finish(cutter, config, {PLAN: plan.to_json() + "\n", CARD: card}, reporter=reporter)


def describe(checkpoint: Checkpoint, plan: Plan) -> dict[str, Any]:
    """What the cut changes, in numbers."""
    mixers = checkpoint.mixers
    return {
        "model": checkpoint.source,
        "model_type": plan.model_type,
        "method": plan.method,
        "score": plan.score,
        "width": plan.width,
        "key_dim": plan.key_dim,
        "compression": plan.compression,
        "corrected": plan.corrected,
        "noncommuting": list(mixers[0].noncommuting or ()) if plan.method in ROTATIONS else None,
        "correction": plan.correction,
        "state_bytes": {"before": state_bytes(mixers, plan.width), "after": state_bytes(mixers, plan.key_dim)},
        "parameters": {"before": checkpoint.parameters, "after": parameters_after(checkpoint, plan.key_dim)},
        "speed": written(speed_of_cut(plan.model_type, plan.width, plan.key_dim)),
        "calibration": plan.calibration,
        "certificate": plan.summary(),
        "versions": dict(plan.versions),
    }
