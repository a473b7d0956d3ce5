"""The records in a folder, by kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from slimstate.core.file_names import PLAN
from slimstate.records.base import Record
from slimstate.records.evaluation import EvaluationRecord
from slimstate.records.reconstruction import RECONSTRUCTION, ReconstructionRecord
from slimstate.records.schema import ValidationError
from slimstate.records.states import FiltersRecord, TraceRecord
from slimstate.records.sweep import SweepRecord
from slimstate.records.training import RECOVERY, RecoveryRecord
from slimstate.records.verification import VerificationRecord
from slimstate.system.errors import DataError, quoted
from slimstate.system.json_files import read_any

if TYPE_CHECKING:
    from slimstate.records.plan import Plan

R_co = TypeVar("R_co", bound=Record, covariant=True)
MAX_RECORD_BYTES = 2**30  # plans of directions are large
TYPES: dict[str, type[Record]] = {
    kind.KIND: kind
    for kind in (
        SweepRecord, TraceRecord, FiltersRecord, EvaluationRecord, ReconstructionRecord, RecoveryRecord,
        VerificationRecord,
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RecordFile(Generic[R_co]):
    """A record and the file it came from."""

    path: Path
    record: R_co


@dataclass(frozen=True, kw_only=True)
class Records:
    """The records of a folder by kind, and a line on each file that is not valid."""

    sweep: tuple[RecordFile[SweepRecord], ...] = ()
    trace: tuple[RecordFile[TraceRecord], ...] = ()
    filters: tuple[RecordFile[FiltersRecord], ...] = ()
    evaluation: tuple[RecordFile[EvaluationRecord], ...] = ()
    plan: tuple[RecordFile[Plan], ...] = ()
    reconstruction: tuple[RecordFile[ReconstructionRecord], ...] = ()
    recovery: tuple[RecordFile[RecoveryRecord], ...] = ()
    verification: tuple[RecordFile[VerificationRecord], ...] = ()
    skipped: tuple[str, ...] = ()

    def counts(self) -> dict[str, int]:
        """Return the number of records of each kind in the folder."""
        return {kind: len(files) for kind in KINDS if (files := getattr(self, kind))}


KINDS = tuple(item.name for item in fields(Records) if item.name != "skipped")


def read_records(folder: Path) -> Records:
    """Return every record under a folder; in a model folder, only files that slimstate wrote are read."""
    if not folder.is_dir():
        raise DataError(f"no folder {folder}")
    files: dict[str, list[RecordFile[Any]]] = {kind: [] for kind in KINDS}
    skipped = []
    for path in _candidates(folder):
        try:
            data = read_any(path, DataError, MAX_RECORD_BYTES)
            kind = "plan" if path.name == PLAN else data.get("kind") if isinstance(data, dict) else None
            if isinstance(kind, str) and kind in KINDS:
                files[kind].append(RecordFile(path=path, record=_type_of(kind).from_json(data)))
        except ValidationError as error:
            skipped.append(f"{quoted(path)} was skipped: not a valid {kind} record: {error}")
        except DataError as error:
            skipped.append(f"{quoted(path)} was skipped: {error}")
    return Records(skipped=tuple(skipped), **{kind: tuple(entries) for kind, entries in files.items()})


def _candidates(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*.json")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not hidden and (path.name in (PLAN, RECOVERY, RECONSTRUCTION) or not (path.parent / "config.json").exists()):
            yield path


def _type_of(kind: str) -> type[Record]:
    if kind != "plan":
        return TYPES[kind]
    from slimstate.records.plan import Plan  # plans hold tensors: without one, torch is not needed

    return Plan
