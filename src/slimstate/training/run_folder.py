"""Where a training happens that is not finished: a folder beside the one it will become, and what goes into it.

Recoveries and pre-trainings share all of this.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slimstate.data.corpus import Corpus, Schedule, held_out_count
from slimstate.system.errors import DataError, OutputError, PlanError
from slimstate.system.json_files import difference, read_json, write_json
from slimstate.system.progress import Reporter

SETTINGS = "settings.json"


def workplace_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.training")


def prepare_workplace(work: Path, decided: Mapping[str, Any], resume: bool, force: bool, reporter: Reporter) -> bool:
    """Make the folder of an unfinished training, or check that the one there is of the same one; True to go on."""
    begun = (work / SETTINGS).is_file()
    if not begun and work.exists() and any(not path.name.startswith(".") for path in work.iterdir()):
        raise OutputError(f"{work} is in the way and is no unfinished training: it has no {SETTINGS}")
    if not begun or (force and not resume):
        if resume:
            reporter.say(f"nothing to resume in {work}: starting")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        write_json(work / SETTINGS, decided)
        return False
    if not resume:
        raise OutputError(f"{work} holds an unfinished training: --resume goes on with it, --force starts anew")
    if (other := difference(read_json(work / SETTINGS), decided)) is not None:
        raise PlanError(f"{work} was begun with other settings: {other}")
    return True


def steps_for(steps: int | None, tokens: int | None, per_step: int, default: int) -> int:
    """The number of steps that was asked for, as it is or in tokens."""
    if steps is not None and tokens is not None:
        raise PlanError("give either --steps or --tokens")
    if tokens is None:
        return default if steps is None else steps
    if tokens < per_step:
        raise PlanError(f"--tokens {tokens}: one step alone takes {per_step}")
    return tokens // per_step


def logs_to(report_to: str) -> tuple[str, ...]:
    """The names in a comma list of places to log to; `none` is none."""
    return tuple(name for name in map(str.strip, report_to.split(",")) if name not in ("", "none"))


def check_extras(report_to: tuple[str, ...], *packages: str) -> None:
    """What training needs is installed, and the Trainer knows where to log to."""
    for name in packages:
        if find_spec(name) is None:
            raise PlanError(f"{name} cannot be imported: pip install 'slimstate[recover]'")
    from transformers.integrations import get_reporting_integration_callbacks

    try:
        get_reporting_integration_callbacks(list(report_to))
    except ValueError as error:
        raise PlanError(f"--report-to {','.join(report_to)}: {error}") from error
    for name in report_to:
        if find_spec(name) is None:
            cure = "'slimstate[recover]'" if name == "tensorboard" else name
            raise PlanError(f"{name} cannot be imported: pip install {cure}, or --report-to none")


def training_corpus(
    tokenizer: Any,
    data: str,
    work: Path,
    *,
    steps: int,
    batch_size: int,
    length: int,
    seed: int,
    measured_elsewhere: bool,
    no_repeat: bool,
    reporter: Reporter,
) -> Corpus:
    """The tokens of a training: read now, or left by an earlier run of it."""
    samples = steps * batch_size
    if Corpus.lies_in(work):
        corpus = Corpus.open(work)
    else:
        held_out = 0 if measured_elsewhere else held_out_count(samples)
        with reporter.waiting(f"reading {data}"):
            corpus = Corpus.collect(tokenizer, data, length, samples, held_out, work)
    epochs = Schedule(corpus, samples, seed).epochs
    if epochs > 1:
        size = f"{corpus.source} has {corpus.count - corpus.held_out:,} windows of {corpus.length} tokens to train on"
        line = f"{size}, {samples:,} are wanted: {epochs:.2f} epochs"
        if no_repeat:
            raise DataError(f"{line}; with --no-repeat at most --steps {int(samples / epochs) // batch_size}")
        reporter.say(line)
    return corpus
