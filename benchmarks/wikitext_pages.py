"""Split a raw WikiText file into pages, as lm-eval's task `wikitext` has them, so that it runs without the hub.

    python benchmarks/wikitext_pages.py wiki.test.raw DIR/wikitext.jsonl
    slimstate sweep MODEL --tasks wikitext --task-data DIR ...

A page begins at a heading of the first level, ` = Title = `.
"""

from __future__ import annotations

import json
from pathlib import Path

from harness import arguments

from slimstate.evaluation.wikitext import is_heading


def split_pages(text: str) -> list[str]:
    pages: list[list[str]] = [[]]
    for line in text.replace("\r\n", "\n").split("\n"):
        if is_heading(line):
            pages.append([])
        pages[-1].append(line)
    return [page for lines in pages if (page := "\n".join(lines)).strip()]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("source", type=Path, nargs="?")
    parser.add_argument("target", type=Path, nargs="?")
    options = parser.parse_args()
    if options.toy:
        print(len(split_pages(" = A = \n\n text \n = = B = = \n more \n = C = \n text \n")), "pages")
        return
    pages = split_pages(options.source.read_text(encoding="utf-8"))
    options.target.write_text("".join(json.dumps({"page": page}) + "\n" for page in pages), encoding="utf-8")
    print(f"{len(pages)} pages in {options.target}")


if __name__ == "__main__":
    main()
