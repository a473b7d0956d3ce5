"""Fill the pages with the numbers of the records in `docs/records`.

    python docs/render.py            # rewrite the pages
    python docs/render.py --check    # change nothing; exit 1 if a page is out of date

A page marks a table by `<!-- table: NAME -->` above and `<!-- end -->` below, and a number in a sentence by a comment
behind it: `1.64x<!-- =NAME -->`. The modules in `docs/tables` declare what each name stands for.
"""

from __future__ import annotations

import re
import sys

from tables import (
    as_published,
    beside,
    experiments,
    front,
    measured,
    performance,
    reconstruct,
    recovery,
    serving,
    support,
)
from tables.layout import DOCS, RECORDS

MODULES = (as_published, beside, experiments, front, measured, performance, reconstruct, recovery, serving, support)
TABLES = {name: text for module in MODULES for name, text in module.TABLES.items()}
NUMBERS = {name: text for module in MODULES for name, text in getattr(module, "NUMBERS", {}).items()}
TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
NUMBER = re.compile(r"[^\s(|]*(<!-- =([\w-]+) -->)")
RECORD = re.compile(r"records/([\w.-]+\.json)")
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


def rendered(page: str) -> str:
    """Return the page with every table and number as the records have it."""
    page = TABLE.sub(lambda mark: f"{mark[1]}{TABLES[mark[2]]}\n{mark[3]}", page)
    return NUMBER.sub(lambda mark: NUMBERS[mark[2]] + mark[1], page)


def wrong_marks(text: str) -> list[str]:
    """Return what is wrong with the marks on the pages: every table and number must be declared and used."""
    wrong = []
    for kind, declared, mark in (("table", TABLES, TABLE), ("number", NUMBERS, NUMBER)):
        used = {match[2] for match in mark.finditer(text)}
        wrong += [f"no {kind} is called {name}" for name in sorted(used - declared.keys())]
        wrong += [f"no page uses the {kind} {name}" for name in sorted(declared.keys() - used)]
    return wrong


def wrong_names(text: str) -> list[str]:
    """Return what is wrong with the names on rendered pages: records must be cited and present, tests present."""
    wrong = []
    cited, stored = set(RECORD.findall(text)), {path.name for path in RECORDS.glob("*.json")}
    wrong += [f"a page cites records/{name}, which does not exist" for name in sorted(cited - stored)]
    wrong += [f"no page cites records/{name}" for name in sorted(stored - cited)]
    for path, test in TEST.findall(text):
        source = DOCS.parent / "tests" / path
        if not source.is_file() or f"def {test}(" not in source.read_text(encoding="utf-8"):
            wrong.append(f"a page names the test {path}::{test}, which does not exist")
    return wrong


def main() -> int:
    paths = [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]
    pages = {path: path.read_text(encoding="utf-8") for path in paths}
    wrong = wrong_marks("\n".join(pages.values()))
    results = {} if wrong else {path: rendered(page) for path, page in pages.items()}
    wrong = wrong or wrong_names("\n".join(results.values()))
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    stale = [path for path, page in results.items() if page != pages[path]]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(DOCS.parent)} is out of date: run python docs/render.py", file=sys.stderr)
        return int(bool(stale))
    for path in stale:
        path.write_text(results[path], encoding="utf-8")
        print(f"rewrote {path.relative_to(DOCS.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
