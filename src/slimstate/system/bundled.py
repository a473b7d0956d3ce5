"""What comes with slimstate beside its code: recipes, and a small model with texts to try things on.

In a wheel they lie in the package, in a clone beside it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from slimstate.system.atomic import check_place, staged
from slimstate.system.errors import OutputError, named

PACKAGE = Path(__file__).parents[1]
DEMO = ("model", "calibration.txt", "evaluation.txt")  # what of the demo is no program


def bundled(name: str) -> Path:
    """The folder `recipes` or `demo`."""
    packed = PACKAGE / "bundled" / name
    return packed if packed.is_dir() else PACKAGE.parents[1] / name


def recipes() -> dict[str, Path]:
    """Every recipe by its name."""
    return {path.stem: path for path in sorted(bundled("recipes").glob("*.toml"))}


def write_demo(out: Path) -> bool:
    """The small model and its texts, copied to a folder; False where they are there already."""
    source = bundled("demo")
    if all((out / name).exists() for name in DEMO):
        return False
    check_place(out, folder=True)
    if out.exists():
        raise OutputError(f"{named(out)} is there, and holds something else: choose another `out`")
    with staged(out, force=False) as place:
        for name in DEMO:
            copy = shutil.copytree if (source / name).is_dir() else shutil.copyfile
            copy(source / name, place / name)
    return True
