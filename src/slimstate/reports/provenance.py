"""Where records come from: their model, text, seed and software, and the commands that repeat them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from slimstate.core.stock_class import FLA, StockClass
from slimstate.records.base import Record
from slimstate.records.evaluation import EvaluationRecord, SweepRecord
from slimstate.records.folder import RecordFile, Records
from slimstate.records.parts import Text
from slimstate.records.provenance import command_line, run_config
from slimstate.records.serving import VerificationRecord
from slimstate.records.states import FiltersRecord, TraceRecord
from slimstate.records.training import ReconstructionRecord, RecoveryRecord

if TYPE_CHECKING:
    from slimstate.records.plan import Plan

ModelRecord: TypeAlias = (
    ReconstructionRecord | RecoveryRecord | TraceRecord | FiltersRecord | EvaluationRecord | VerificationRecord
)
AGAIN = Path("again")  # where the commands on the page write to


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The provenance of one record. `base` is the uncut model, `digest` that of the text."""

    file: RecordFile[Record]
    model: str
    base: str
    loader: StockClass | None = None
    fingerprint: str | None = None
    digest: str | None = None
    seed: int | None = None
    kernels: str | None = None
    versions: Mapping[str, str]
    commands: tuple[str | None, ...] = ()


def provenances(records: Records) -> list[Provenance]:
    """Return the provenance of all records, in the order of the work."""
    return [
        *map(_of_sweep, records.sweep),
        *map(_of_plan, records.plan),
        *(_of_model(file, file.record.calibration) for file in records.reconstruction),
        *(_of_model(file, file.record.corpus, file.record.settings.seed) for file in records.recovery),
        *(_of_model(file, file.record.text) for file in records.trace),
        *(_of_model(file, file.record.text) for file in records.filters),
        *(_of_model(file, file.record) for file in records.evaluation),
        *(_of_model(file, file.record.text) for file in records.verification),
    ]


def _of_sweep(file: RecordFile[SweepRecord]) -> Provenance:
    sweep, settings, best = file.record, file.record.settings, file.record.recommended
    commands = (sweep.command, None if best is None else best.command)
    seed = settings.seed if sweep.seed is None else sweep.seed
    return _provenance(
        file, settings.text, base=sweep.model, fingerprint=settings.fingerprint, seed=seed, commands=commands
    )


def _of_plan(file: RecordFile[Plan]) -> Provenance:
    model, options = file.record.model, {"apply": file.path, "out": file.path.parent}
    command = command_line(run_config("prune", {"model": model.source}, options))
    named = {"model": model.source, "base": model.source, "loader": model.loader, "fingerprint": model.fingerprint}
    return _provenance(file, file.record.calibration, commands=(command,), **named)


def _of_model(
    file: RecordFile[ModelRecord], text: Text | EvaluationRecord | None, seed: int | None = None
) -> Provenance:
    record = file.record
    base = (None if record.cut is None else record.cut.base_model) or record.model
    seed = seed if record.seed is None else record.seed
    return _provenance(file, text, base=base, seed=seed, commands=(record.command,))


def _provenance(file: RecordFile[Record], text: Text | EvaluationRecord | None, **values: Any) -> Provenance:
    """Return the provenance with these values; the others are fields of the record."""
    names = ("model", "loader", "fingerprint", "seed", "kernels", "versions")
    fields: dict[str, Any] = {name: getattr(file.record, name, None) for name in names}
    return Provenance(file=file, digest=None if text is None else text.digest, **fields | values)


def reproduce_section(sources: Sequence[Provenance], records: Records, folder: Path) -> dict[str, Any]:
    """Return the commands that repeat the records, the code that loads the cut model, and commands for more records."""
    cut = "SLIM"
    if records.plan:  # the model lies beside its plan, or where the plan was copied from
        plan = records.plan[0]
        is_beside = (plan.path.parent / "config.json").exists()
        cut = str(plan.path.parent) if is_beside else plan.record.folder or cut
    loader = next((source.loader for source in sources if source.loader is not None), FLA)
    return {
        "folder": AGAIN,
        "commands": redirected(line for source in sources for line in source.commands if line),
        "code": loader.loading_code(json.dumps(cut, ensure_ascii=False)),
        "missing": missing_records(records, next((source.base for source in sources), "MODEL"), cut, folder),
    }


def missing_records(records: Records, base: str, cut: str, folder: Path) -> dict[str, str]:
    """Return what could be on the page and is not, with the command that adds it."""
    configs = {}
    if not records.evaluation:
        options = {"baseline": base, "text": "TEXT", "out": folder / "evaluation.json"}
        configs["the cost of the cut, compared with the uncut model"] = run_config("eval", {"model": cut}, options)
    if not records.trace:
        options = {"text": "TEXT", "out": folder / "states"}
        configs["how much of the state is used"] = run_config("analyze", {"models": [base, cut]}, options)
    if not records.sweep:
        options = {"data": "TEXT", "text": "OTHER_TEXT", "out": folder / "sweep"}
        configs["the cost of other methods and key dims"] = run_config("sweep", {"model": base}, options)
    return {title: command_line(config) for title, config in configs.items()}


def redirected(commands: Iterable[str]) -> list[str]:
    """Return each command once, writing into `again/` under its own name, with a number where that is taken.

    As they are, most commands would be refused or would replace what the page shows.
    """
    names: set[str] = set()
    lines = []
    for command in dict.fromkeys(commands):
        try:
            words = shlex.split(command)
            place = words.index("--out") + 1
            path = Path(words[place])
        except (ValueError, IndexError):  # not a command, or one that writes nothing
            lines.append(command)
            continue
        numbered = (f"{path.stem}-{number}{path.suffix}" for number in range(2, len(names) + 3))
        words[place] = str(AGAIN / next(name for name in (path.name, *numbered) if name not in names))
        names.add(Path(words[place]).name)
        lines.append(shlex.join(words))
    return lines


def merged_versions(sources: Sequence[Provenance]) -> dict[str, list[str]]:
    """Return each package with every version that a record names."""
    pairs = dict.fromkeys(pair for source in sources for pair in source.versions.items())
    return {name: [version for package, version in pairs if package == name] for name, _ in pairs}
