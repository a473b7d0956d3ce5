"""The records in a folder, each as the type of its kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from slimstate.core.file_names import PLAN
from slimstate.records.base import Record
from slimstate.records.evaluation import EvaluationRecord
from slimstate.records.reconstruction import RECONSTRUCTION, ReconstructionRecord
from slimstate.records.schema import Misfit
from slimstate.records.states import FiltersRecord, TraceRecord
from slimstate.records.sweep import SweepRecord
from slimstate.records.training import RECOVERY, RecoveryRecord
from slimstate.records.verification import VerificationRecord
from slimstate.system.errors import DataError, quoted
from slimstate.system.json_files import read_any

if TYPE_CHECKING:
    from slimstate.records.plan import PlanRecord

R_co = TypeVar("R_co", bound=Record, covariant=True)
OF_JSON = (
    SweepRecord, TraceRecord, FiltersRecord, EvaluationRecord, ReconstructionRecord, RecoveryRecord, VerificationRecord
)  # fmt: skip
TYPES: Mapping[str, type[Record]] = {kind.KIND: kind for kind in OF_JSON}
MOST_OF_A_RECORD = 2**30  # bytes: a plan of directions is one
KINDS = ("sweep", "trace", "filters", "evaluation", "plan", "reconstruction", "recovery", "verification")


@dataclass(frozen=True, kw_only=True)
class Found(Generic[R_co]):
    """A record and the file it came from."""

    path: Path
    record: R_co


@dataclass(frozen=True, kw_only=True)
class Records:
    """All that was found, by kind, and a line on each file that looked like a record and cannot be used."""

    sweep: tuple[Found[SweepRecord], ...] = ()
    trace: tuple[Found[TraceRecord], ...] = ()
    filters: tuple[Found[FiltersRecord], ...] = ()
    evaluation: tuple[Found[EvaluationRecord], ...] = ()
    plan: tuple[Found[PlanRecord], ...] = ()
    reconstruction: tuple[Found[ReconstructionRecord], ...] = ()
    recovery: tuple[Found[RecoveryRecord], ...] = ()
    verification: tuple[Found[VerificationRecord], ...] = ()
    skipped: tuple[str, ...] = ()

    def counts(self) -> dict[str, int]:
        """How many there are of each kind that there is."""
        return {kind: len(found) for kind in KINDS if (found := getattr(self, kind))}


def read_records(folder: Path) -> Records:
    """Every record under a folder. Of a model folder only what slimstate wrote is read."""
    if not folder.is_dir():
        raise DataError(f"no folder {folder}")
    found: dict[str, list[Found[Any]]] = {kind: [] for kind in KINDS}
    skipped = []
    for path in _candidates(folder):
        try:
            data = read_any(path, DataError, MOST_OF_A_RECORD)
        except DataError as error:
            skipped.append(f"{quoted(path)} was skipped: {error}")
            continue
        kind = "plan" if path.name == PLAN else data.get("kind") if isinstance(data, dict) else None
        if not isinstance(kind, str) or kind not in KINDS:
            continue
        try:
            found[kind].append(Found(path=path, record=_typed(kind, data)))
        except Misfit as error:
            skipped.append(f"{quoted(path)} was skipped: as a record of a {kind}, {error}")
    return Records(skipped=tuple(skipped), **{kind: tuple(entries) for kind, entries in found.items()})


def _candidates(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*.json")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not hidden and (path.name in (PLAN, RECOVERY, RECONSTRUCTION) or not (path.parent / "config.json").exists()):
            yield path


def _typed(kind: str, data: object) -> Record:
    if not isinstance(data, dict):
        raise Misfit("it is not an object with something in it")
    if kind != "plan":
        return TYPES[kind].from_json(data)
    from slimstate.records.plan import PlanRecord  # a plan holds tensors: where there is none, torch is not needed

    return PlanRecord.from_json(data)
