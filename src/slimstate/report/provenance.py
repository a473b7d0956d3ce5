"""What records of every kind say of themselves: what they are of, with what they were made, and how to make them again.

In the order of the work: a sweep, a cut, its recovery, and what was found of the models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from slimstate.core.stock_class import StockClass
from slimstate.records.evaluation import EvaluationRecord
from slimstate.records.folder import Found, Records
from slimstate.records.parts import Text
from slimstate.records.provenance import command_line, run_config
from slimstate.records.reconstruction import ReconstructionRecord
from slimstate.records.states import FiltersRecord, TraceRecord
from slimstate.records.sweep import SweepRecord
from slimstate.records.training import RecoveryRecord
from slimstate.records.verification import VerificationRecord

if TYPE_CHECKING:
    from slimstate.records.plan import Plan

OfModel: TypeAlias = (
    ReconstructionRecord | RecoveryRecord | TraceRecord | FiltersRecord | EvaluationRecord | VerificationRecord
)
Digested: TypeAlias = Text | EvaluationRecord


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """One record. `base` is what its model was cut from, or that model itself; `digest` is that of the text."""

    path: Path
    kind: str
    model: str
    base: str
    loader: StockClass | None = None
    fingerprint: str | None = None
    digest: str | None = None
    seed: int | None = None
    kernels: str | None = None
    versions: Mapping[str, str]
    commands: tuple[str, ...] = ()


def provenances(records: Records) -> list[Provenance]:
    """Of all records, in the order of the work."""
    return [
        *map(of_sweep, records.sweep),
        *map(of_plan, records.plan),
        *(of_model(found, found.record.calibration) for found in records.reconstruction),
        *(of_model(found, found.record.corpus, found.record.settings.seed) for found in records.recovery),
        *(of_model(found, found.record.text) for found in records.trace),
        *(of_model(found, found.record.text) for found in records.filters),
        *(of_model(found, found.record) for found in records.evaluation),
        *(of_model(found, found.record.text) for found in records.verification),
    ]


def of_sweep(found: Found[SweepRecord]) -> Provenance:
    sweep, settings = found.record, found.record.settings
    recommended = None if sweep.recommended is None else sweep.recommended.command
    return Provenance(
        path=found.path,
        kind=sweep.KIND,
        model=sweep.model,
        base=sweep.model,
        loader=sweep.loader,
        fingerprint=settings.fingerprint,
        digest=_digest(settings.text),
        seed=settings.seed if sweep.seed is None else sweep.seed,
        kernels=sweep.kernels,
        versions=sweep.versions,
        commands=tuple(line for line in (sweep.command, recommended) if line),
    )


def of_plan(found: Found[Plan]) -> Provenance:
    plan, model = found.record, found.record.model
    options = {"apply": found.path, "out": found.path.parent}
    return Provenance(
        path=found.path,
        kind=found.record.KIND,
        model=model.source,
        base=model.source,
        loader=model.loader,
        fingerprint=model.fingerprint,
        digest=_digest(found.record.calibration),
        seed=plan.seed,
        versions=plan.versions,
        commands=(command_line(run_config("prune", {"model": model.source}, options)),),
    )


def of_model(found: Found[OfModel], text: Digested | None, seed: int | None = None) -> Provenance:
    record = found.record
    return Provenance(
        path=found.path,
        kind=record.KIND,
        model=record.model,
        base=(None if record.cut is None else record.cut.base_model) or record.model,
        loader=record.loader,
        fingerprint=record.fingerprint,
        digest=_digest(text),
        seed=seed if record.seed is None else record.seed,
        kernels=record.kernels,
        versions=record.versions,
        commands=(record.command,) if record.command else (),
    )


def _digest(text: Digested | None) -> str | None:
    return None if text is None else text.digest
