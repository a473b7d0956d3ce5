"""Print results, and upload them.

Results go to standard output; everything else goes to standard error. Of several processes only the main one prints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from slimstate.system import distributed
from slimstate.system.progress import Reporter

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def pushed_to(name: str | None, reporter: Reporter) -> Iterator[Callable[[str | None], None]]:
    """Check that a repository can be written before the work of the body; yield a function that uploads a folder."""
    from slimstate.system import hub

    if name is not None:
        distributed.from_main(lambda: hub.check_repository(name))

    def push(folder: str | None) -> None:
        if name is not None and folder is not None:
            with reporter.waiting(f"uploading to {name}"):
                address = distributed.from_main(lambda: hub.push(Path(folder), name))
            reporter.say(f"uploaded to {address}")

    yield push


def print_json(record: Mapping[str, object]) -> None:
    if distributed.is_main():
        print(json.dumps(record, indent=2))


def printer() -> Console:
    """Return a console for standard output that does not wrap lines."""
    from slimstate.system.console import console

    return console(stderr=False)
