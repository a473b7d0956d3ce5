"""Commands to copy: those that made the records, and those that would add more to the page.

Run as they were, the first would be refused, or replace what the page shows: each gets a place of its own.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from slimstate.records.folder import Records
from slimstate.records.provenance import command_line, run_config
from slimstate.report.provenance import Provenance

AGAIN = Path("again")
OUT = "out"  # the option that says where a command writes


def distinct(lines: Iterable[str]) -> list[str]:
    """Every command once, writing into `again/` under the name it wrote to, with a number where that is taken."""
    taken: set[str] = set()
    return [_moved(line, taken) for line in dict.fromkeys(lines)]


def _moved(line: str, taken: set[str]) -> str:
    try:
        words = shlex.split(line)
        place = words.index(f"--{OUT}") + 1
        words[place] = str(AGAIN / _free(Path(words[place]).name, taken))
    except (ValueError, IndexError):  # not a command, or one that writes nothing
        return line
    return shlex.join(words)


def _free(name: str, taken: set[str]) -> str:
    stem, suffix = Path(name).stem, Path(name).suffix
    names = (name, *(f"{stem}-{number}{suffix}" for number in range(2, len(taken) + 3)))
    free = next(each for each in names if each not in taken)
    taken.add(free)
    return free


def missing(records: Records, sources: Iterable[Provenance], cut: str, folder: Path) -> Iterator[tuple[str, str]]:
    """What could be on the page and is not, and the command that puts it there."""
    base = next((source.base for source in sources), "MODEL")
    if not records.evaluation:
        options = {"baseline": base, "text": "TEXT", "out": folder / "evaluation.json"}
        yield "What the cut costs, beside the uncut model", command_line(run_config("eval", {"model": cut}, options))
    if not records.trace:
        options = {"text": "TEXT", "out": folder / "states"}
        yield "How much of the state is used", command_line(run_config("analyze", {"models": [base, cut]}, options))
    if not records.sweep:
        options = {"data": "TEXT", "text": "OTHER_TEXT", "out": folder / "sweep"}
        yield "What other methods and key dims would cost", command_line(run_config("sweep", {"model": base}, options))
