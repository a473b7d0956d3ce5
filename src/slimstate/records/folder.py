"""The records in a folder by kind, and which files slimstate has written and may therefore replace."""

import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from slimstate.core.file_names import PLAN
from slimstate.records.base import Record
from slimstate.records.benchmark import BenchRecord
from slimstate.records.evaluation import EvaluationRecord, SweepRecord
from slimstate.records.schema import ValidationError, Value
from slimstate.records.serving import VerificationRecord
from slimstate.records.states import FiltersRecord, TraceRecord
from slimstate.records.training import ReconstructionRecord, RecoveryRecord, TrainingRecord
from slimstate.system.atomic import check_place
from slimstate.system.errors import DataError, OutputError, quoted
from slimstate.system.input_files import open_regular, read_bytes
from slimstate.system.json_files import parse_any, read_json

if TYPE_CHECKING:
    from slimstate.records.plan import Plan

R_co = TypeVar("R_co", bound=Record, covariant=True)
RECORD_FILES = (PLAN, *(each.FILE for each in (EvaluationRecord, ReconstructionRecord, RecoveryRecord, TrainingRecord)))
RECORD_HEAD, MAX_HEAD_BYTES = re.compile(rb'\s*\{\s*"kind":\s*"\w+",\s*"format":'), 64
MAX_RECORD_BYTES = 2**30  # plans of directions are large
DRAWN_SUFFIXES = (".csv", ".md", ".tex", ".png", ".pdf")
TYPES: dict[str, type[Record]] = {
    kind.KIND: kind
    for kind in (
        SweepRecord, TraceRecord, FiltersRecord, EvaluationRecord, ReconstructionRecord, RecoveryRecord,
        VerificationRecord, TrainingRecord, BenchRecord,
    )
}  # fmt: skip


class RecordFile(Value, Generic[R_co]):
    """A record and the file it came from."""

    path: Path
    record: R_co


class Records(Value):
    """The records of a folder by kind, in the order of the work, and a line on each file that is not valid."""

    training: tuple[RecordFile[TrainingRecord], ...] = ()
    sweep: tuple[RecordFile[SweepRecord], ...] = ()
    plan: "tuple[RecordFile[Plan], ...]" = ()
    reconstruction: tuple[RecordFile[ReconstructionRecord], ...] = ()
    recovery: tuple[RecordFile[RecoveryRecord], ...] = ()
    trace: tuple[RecordFile[TraceRecord], ...] = ()
    filters: tuple[RecordFile[FiltersRecord], ...] = ()
    evaluation: tuple[RecordFile[EvaluationRecord], ...] = ()
    verification: tuple[RecordFile[VerificationRecord], ...] = ()
    bench: tuple[RecordFile[BenchRecord], ...] = ()
    skipped: tuple[str, ...] = ()

    def counts(self) -> dict[str, int]:
        """Return the number of records of each kind in the folder."""
        return {kind: len(files) for kind in KINDS if (files := getattr(self, kind))}


KINDS = tuple(item.name for item in fields(Records) if item.name != "skipped")


def read_records(folder: Path) -> Records:
    """Return every record under a folder; in a model folder, only files that slimstate wrote are read, copies once."""
    if not folder.is_dir():
        raise DataError(f"no folder {folder}")
    files: dict[str, list[RecordFile[Any]]] = {kind: [] for kind in KINDS}
    skipped, copied = [], set()
    for path in sorted(folder.rglob("*.json")):
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        try:
            if path.name not in RECORD_FILES and (path.parent / "config.json").exists():  # in a model folder
                if not is_record(path) or (content := read_bytes(path, DataError, MAX_RECORD_BYTES)) in copied:
                    continue
                copied.add(content)  # `prune` copies what lies beside the weights
            data = parse_any(read_bytes(path, DataError, MAX_RECORD_BYTES), "it", DataError)
            kind = "plan" if path.name == PLAN else data.get("kind") if isinstance(data, dict) else None
            if kind == "plan":
                from slimstate.records.plan import Plan  # plans hold tensors: without one, torch is not needed

                files[kind].append(RecordFile(path=path, record=Plan.from_json(data)))
            elif isinstance(kind, str) and kind in TYPES:
                files[kind].append(RecordFile(path=path, record=TYPES[kind].from_json(data)))
        except ValidationError as error:
            skipped.append(f"{quoted(path)} was skipped: not a valid {kind} record: {error}")
        except DataError as error:
            skipped.append(f"{quoted(path)} was skipped: {error}")
    return Records(skipped=tuple(skipped), **{kind: tuple(entries) for kind, entries in files.items()})


def is_record(path: Path) -> bool:
    """Return whether a file begins as records do, without reading the rest, such as a vocabulary."""
    with open_regular(path, DataError) as file:
        return RECORD_HEAD.match(file.read(MAX_HEAD_BYTES)) is not None


def check_record(path: Path, force: bool = True) -> None:
    """Refuse a place that cannot be written, or has a file that is not a record; without `force` a record too."""
    check_place(path, folder=False)
    if path.exists() and not _has_entry(path, "kind", str):
        raise OutputError(f"{path} exists and is not a slimstate record: choose another place")
    if path.exists() and not force:
        raise OutputError(f"{path} exists already; choose another folder or use `force`")


def check_drawings(folder: Path, names: Iterable[str], beside: str) -> None:
    """Refuse to replace tables and figures without a record beside them; `names` and `beside` are patterns."""
    for path in (path for name in names for path in folder.glob(name) if path.suffix in DRAWN_SUFFIXES):
        if not any(_has_entry(record, "kind", str) for record in folder.glob(beside)):
            raise OutputError(f"{path} exists and no slimstate record is beside it: choose another place")


def check_model_folder(out: Path, force: bool) -> None:
    """Refuse an output folder that cannot be written or exists; `force` replaces one that slimstate wrote."""
    check_place(out, folder=True)
    if not out.exists():
        return
    if not force:
        raise OutputError(f"{out} exists already; choose another folder or use `force`")
    has_record = any((out / name).is_file() for name in (PLAN, RecoveryRecord.FILE, TrainingRecord.FILE))
    if any(out.iterdir()) and not (has_record and _has_entry(out / "config.json", "slimstate", dict)):
        raise OutputError(f"{out} was not written by slimstate and is not replaced: choose another folder or remove it")


def _has_entry(path: Path, name: str, kind: type) -> bool:
    try:
        return path.is_file() and isinstance(read_json(path, DataError).get(name), kind)
    except DataError:
        return False
