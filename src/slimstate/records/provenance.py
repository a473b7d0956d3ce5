"""Provenance: the config of a run as plain data, the command line that repeats it, and the progress of a recipe."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from slimstate.records.base import Record
from slimstate.system.options import plain_value

INPUTS = ("model", "models", "shape", "folder", "dir")  # positional; benchmarks take their models as options


def run_config(command: str, inputs: Mapping[str, object], options: Mapping[str, object]) -> dict[str, Any]:
    """Return the config of a run as plain data; options that are None or False are left out."""
    values = {**inputs, **options}.items()
    return {"command": command, **{name: plain_value(value) for name, value in values if _is_set(value)}}


def config_file(config: Mapping[str, Any]) -> str:
    """Return the text of the file that lies beside a result; it does not name the folder it lies in."""
    return json.dumps({name: value for name, value in config.items() if name != "out"}, indent=1) + "\n"


def command_line(config: Mapping[str, Any]) -> str:
    """Return a config as a shell command, with its inputs before its options."""
    command = config.get("command")
    if not isinstance(command, str):
        raise ValueError("a config must name its command")
    inputs = () if command.startswith("bench") else INPUTS
    words = ["slimstate", *command.split()]
    for name in inputs:
        value = config.get(name, ())
        words += map(str, value if isinstance(value, (list, tuple)) else [value])
    for name, value in config.items():
        if name not in ("command", *inputs) and _is_set(value):
            words.append(f"--{name.replace('_', '-')}")
            words += [] if value is True else [",".join(map(str, value)) if isinstance(value, list) else str(value)]
    return shlex.join(words)


def _is_set(value: object) -> bool:
    return value is not None and value is not False  # 0 is a value


class RecipeRecord(Record):
    """The progress of a recipe, so that it continues where it was interrupted."""

    KIND = "recipe"

    recipe: str
    title: str
    scale: str
    versions: Mapping[str, str] = field(default_factory=dict)
    steps: Mapping[str, float] = field(default_factory=dict)  # the seconds of each step that is done, by command line
    outputs: tuple[str, ...] = ()  # paths that steps have written or begun to write
    out: str

    @property
    def seconds(self) -> float:
        return sum(self.steps.values())
