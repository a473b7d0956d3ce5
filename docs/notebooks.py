"""Run the notebooks in `examples` from their first cell to their last; an error in a cell is the exit code.

With arguments only those named: `python docs/notebooks.py first-cut`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(path: Path) -> None:
    """Run the cells with code in an empty folder, where a notebook writes its files."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    namespace: dict[str, object] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory(prefix="slimstate-notebook-") as folder:
        os.chdir(folder)
        for number, text in enumerate(code, start=1):
            exec(compile(text, f"{path.name}, cell {number}", "exec"), namespace)
        os.chdir(EXAMPLES)


def main() -> int:
    stored = {path.stem: path for path in sorted(EXAMPLES.glob("*.ipynb"))}
    names = sys.argv[1:] or list(stored)
    if not names or not stored.keys() >= {*names}:
        print(f"the notebooks in {EXAMPLES} are {', '.join(stored) or 'gone'}", file=sys.stderr)
        return 1
    for name in names:
        run(stored[name])
        print(f"{name}: ran to its end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
