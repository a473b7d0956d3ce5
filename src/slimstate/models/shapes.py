"""Shapes of models that come with slimstate: configs without weights, by name."""

import json
from importlib.resources import files

from slimstate.checkpoints.reader import read_config
from slimstate.system.errors import ModelError, quoted
from slimstate.system.input_files import expand_home
from slimstate.system.json_files import JsonObject

FOLDER = files("slimstate.models") / "configs"


def shipped_shapes() -> list[str]:
    """Return the names of the shapes that come with slimstate."""
    return sorted(entry.name.removesuffix(".json") for entry in FOLDER.iterdir())


def read_shape(name: str) -> JsonObject:
    """Return the config of a shipped shape, or of a file."""
    if name in shipped_shapes():
        return dict(json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")))
    path = expand_home(name)
    if not path.is_file():
        raise ModelError(
            f"no config {quoted(name)}: give a file, a model folder, or one of {', '.join(shipped_shapes())}"
        )
    return dict(read_config(path))
