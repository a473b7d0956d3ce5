"""Where records come from: their model, text, seed and software, and the commands that repeat them."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from slimstate.core.stock_class import FLA, StockClass
from slimstate.records.base import Record
from slimstate.records.folder import KINDS, RecordFile, Records
from slimstate.records.provenance import command_line, run_config
from slimstate.records.training import ReconstructionRecord, TrainingRecord
from slimstate.system.value import Value

AGAIN = Path("again")  # where the commands on the page write to
COMMANDS = ("slimstate ", "vllm serve ")  # a record may have been written by anybody


class Provenance(Value):
    """The provenance of one record. `base` is the uncut model, `digest` that of the text."""

    file: RecordFile[Record]
    model: str
    base: str
    loader: StockClass | None
    fingerprint: str | None
    digest: str | None
    seed: int | None
    kernels: str | None
    versions: Mapping[str, str]
    commands: tuple[str | None, ...]


def provenances(records: Records) -> list[Provenance]:
    """Return the provenance of all records, in the order of the work."""
    return [_provenance(file) for kind in KINDS for file in getattr(records, kind)]


def _provenance(file: RecordFile[Record]) -> Provenance:
    """Return the provenance of a record; each kind has some of these fields."""

    def first(*paths: str) -> Any:
        record: Any = file.record
        values = (reduce(lambda part, name: getattr(part, name, None), path.split("."), record) for path in paths)
        return next((value for value in values if value is not None), None)

    commands = (first("command"), first("recommended.command"))
    timed = ", ".join(getattr(file.record, "settings", {}).get("models", ())) if file.record.KIND == "bench" else ""
    if file.record.KIND == "plan" and not (file.path.parent / ReconstructionRecord.FILE).is_file():
        options = {"apply": file.path, "out": file.path.parent}
        commands = (command_line(run_config("prune", {"model": first("model.source")}, options)), None)
    # a training may have started from a config alone
    origin = "out" if isinstance(file.record, TrainingRecord) else "cut.base_model"
    return Provenance(
        file=file,
        model=first("model.source", "model") or timed,
        base=first(origin, "model.source", "model") or timed,
        loader=first("loader", "model.loader"),
        fingerprint=first("fingerprint", "settings.fingerprint", "model.fingerprint"),
        digest=first("settings.text.digest", "calibration.digest", "corpus.digest", "text.digest", "digest"),
        seed=first("seed", "settings.seed"),
        kernels=first("kernels"),
        versions=first("versions"),
        commands=commands,
    )


def reproduce_section(sources: Sequence[Provenance], records: Records, folder: Path) -> dict[str, Any]:
    """Return the commands that repeat the records, the code that loads the cut model, and commands for more records."""
    cut = "SLIM"
    if records.plan:  # the model lies beside its plan, or where the plan was copied from
        plan = records.plan[0]
        is_beside = (plan.path.parent / "config.json").exists()
        cut = str(plan.path.parent) if is_beside else plan.record.folder or cut
    bases = (source.base for source in sources if source.base and source.file.record.KIND != "bench")
    loader = next((source.loader for source in sources if source.loader is not None), FLA)
    return {
        "folder": AGAIN,
        "commands": redirect_outputs(
            line for source in sources for line in source.commands if line and line.startswith(COMMANDS)
        ),
        "code": loader.loading_code(json.dumps(cut, ensure_ascii=False)),
        "missing": missing_records(records, next(bases, "MODEL"), cut, folder),
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


def redirect_outputs(commands: Iterable[str]) -> list[str]:
    """Return each command once, with an output of its own in `again/`: as it is, it would replace what is shown."""
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
