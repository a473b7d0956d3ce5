"""Run the notebooks in `examples` from their first cell to their last; an error in a cell is the exit code.

With arguments only those named: `python docs/notebooks.py first-cut`.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
# what each notebook must leave in its folder or print
RESULTS: dict[str, Callable[[str], bool]] = {
    "first-cut": lambda output: Path("slim").is_dir(),
    "own-selector": lambda output: "loudest: perplexity" in output,
}


def run(path: Path) -> bool:
    """Run the cells with code in an empty folder; return whether the notebook has its result."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    namespace: dict[str, object] = {"__name__": "__main__"}
    output = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="slimstate-notebook-") as folder, redirect_stdout(output):
        os.chdir(folder)
        for number, text in enumerate(code, start=1):
            exec(compile(text, f"{path.name}, cell {number}", "exec"), namespace)
        has_result = RESULTS[path.stem](output.getvalue())
        os.chdir(EXAMPLES)
    return has_result


def main() -> int:
    stored = {path.stem: path for path in sorted(EXAMPLES.glob("*.ipynb"))}
    names = sys.argv[1:] or list(stored)
    if stored.keys() != RESULTS.keys() or not stored.keys() >= {*names}:
        print(f"the notebooks must be {', '.join(RESULTS)}, found {', '.join(stored) or 'none'}", file=sys.stderr)
        return 1
    for name in names:
        if not run(stored[name]):
            print(f"{name} ran to its end without its result", file=sys.stderr)
            return 1
        print(f"{name}: ran to its end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
