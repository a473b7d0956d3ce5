"""What a cut makes of a model, in shapes, in its config and in numbers, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping

from slimstate.checkpoints.model_card import cut_card
from slimstate.checkpoints.reader import Checkpoint
from slimstate.checkpoints.writer import CARD
from slimstate.core.plan import PLAN, Plan
from slimstate.core.surgery import outline
from slimstate.families.contract import Config
from slimstate.families.fla_layout import SHARED_FILTERS
from slimstate.models.prepare import has_library
from slimstate.models.stock import as_published, stock_differences
from slimstate.pruning.budget import key_dims_worth_choosing, state_bytes
from slimstate.pruning.inspect import parameters_after
from slimstate.records.cut import CutRecord, Parameters, StateBytes
from slimstate.records.speed import SpeedOfCut
from slimstate.serving.engines import Served, advice, key_dims_for, warning
from slimstate.serving.model_card import serving_lines
from slimstate.serving.widths import speed_of_cut
from slimstate.system.errors import ModelError
from slimstate.system.json_files import JsonObject
from slimstate.system.progress import SILENT, Reporter


def tell_speed(checkpoint: Checkpoint, key_dim: int, reporter: Reporter) -> SpeedOfCut | None:
    """Say and return what the key dim does to the speed of a layer, where that was measured."""
    speed = speed_of_cut(checkpoint.family.model_type, checkpoint.mixers[0], key_dim)
    if speed is not None:
        reporter.say(speed.advice)
    return speed


def tell_serving(checkpoint: Checkpoint, key_dim: int, engine: str | None, reporter: Reporter) -> None:
    """Warn where the engine, or without one every engine that is known, cannot serve the key dim; advise others."""
    served = Served.of(checkpoint.config, key_dim)
    if (words := warning(served, engine)) is not None:
        reporter.say(words)
    if engine is not None:
        for rule in advice(served, engine):
            if not rule.stops:
                reporter.say(rule.describe())
        candidates = key_dims_worth_choosing(checkpoint.mixers[0].axis.width)
        reporter.say(key_dims_for(engine, checkpoint.config, candidates).describe(engine))


def check_stock_shapes(checkpoint: Checkpoint, key_dim: int, reporter: Reporter = SILENT) -> None:
    """Every tensor the stock class would make of the config is there, in that shape, and will be after the cut."""
    if not has_library(checkpoint.family.library):
        reporter.say("flash-linear-attention is not installed: the tensors are not compared with its class")
        return
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
    config = as_published(checkpoint.family.resize(checkpoint.config, plan.key_dim, corrected=plan.corrected))
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


def documents_of(plan: Plan, name: str, record: CutRecord, config: Config) -> dict[str, str]:
    """The texts that go into the folder of a cut model: its plan, and the card under its name."""
    card = cut_card(plan, name, record, config["slimstate"]["history"])
    return {PLAN: plan.to_json() + "\n", CARD: card + serving_lines(config)}


def begin_cut(checkpoint: Checkpoint, key_dim: int, line: str, engine: str | None, reporter: Reporter) -> None:
    """What every cut begins with: it is seen to be possible, and what it will do is said."""
    check_stock_shapes(checkpoint, key_dim, reporter)
    reporter.say(line)
    tell_speed(checkpoint, key_dim, reporter)
    tell_serving(checkpoint, key_dim, engine, reporter)


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
        noncommuting=(mixers[0].noncommuting or ()) if plan.rotates else None,
        correction=plan.correction,
        state_bytes=StateBytes(before=state_bytes(mixers, plan.width), after=state_bytes(mixers, plan.key_dim)),
        parameters=Parameters(before=checkpoint.parameters, after=parameters_after(checkpoint, plan.key_dim)),
        speed=speed_of_cut(plan.model_type, mixers[0], plan.key_dim),
        calibration=plan.calibration,
        certificate=plan.summary(),
        versions=plan.versions,
        kernels=kernels,
        out=None,
        seconds=0.0,
        plan=plan,
    )
