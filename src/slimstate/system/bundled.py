"""Files that come with slimstate, recipes and a small model with texts: in the wheel, or beside the package."""

from pathlib import Path

from slimstate.system.atomic import check_place, copy_files, staged_folder
from slimstate.system.errors import OutputError, quoted

PACKAGE = Path(__file__).parents[1]
DEMO_FILES = ("model", "calibration.txt", "evaluation.txt")


def bundled_folder(name: str) -> Path:
    """Return the folder `recipes` or `demo`."""
    in_wheel = PACKAGE / "bundled" / name
    return in_wheel if in_wheel.is_dir() else PACKAGE.parents[1] / name


def recipes() -> dict[str, Path]:
    """Return the path of every recipe by its name."""
    return {path.stem: path for path in sorted(bundled_folder("recipes").glob("*.toml"))}


def write_demo(out: Path) -> bool:
    """Copy the small model and its texts to a folder; return False if they are there already."""
    source = bundled_folder("demo")
    if all((out / name).exists() for name in DEMO_FILES):
        return False
    check_place(out, folder=True)
    if out.exists():
        raise OutputError(f"{quoted(out)} exists and holds something else: choose another `out`")
    with staged_folder(out, force=False) as folder:
        for name in DEMO_FILES:
            copy_files(source / name, folder / name)
    return True
