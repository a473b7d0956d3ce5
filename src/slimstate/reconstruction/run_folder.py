"""What a reconstruction needs to go on after any interruption: the trained weights of every layer that is done.

Hidden states are not kept. They are made again from the weights, which takes a small part of the training.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from slimstate.records.reconstruction import LayerErrors
from slimstate.records.schema import read, written
from slimstate.system import distributed
from slimstate.system.atomic import staged_file, writing
from slimstate.system.errors import OutputError, PlanError
from slimstate.system.json_files import JsonObject, difference, read_json, write_json
from slimstate.system.progress import Reporter

SETTINGS = "settings.json"


def run_folder_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.reconstruction")


@dataclass(frozen=True)
class RunFolder:
    """The folder of a reconstruction that is not finished."""

    path: Path

    @classmethod
    def begin(cls, out: Path, settings: Mapping[str, object], force: bool, reporter: Reporter) -> RunFolder:
        """A new one, or the one that the same command left behind."""
        folder = cls(run_folder_of(out))
        distributed.from_main(lambda: folder._prepare(json.loads(json.dumps(settings)), force, reporter))
        return folder

    def _prepare(self, settings: JsonObject, force: bool, reporter: Reporter) -> None:
        path = self.path
        if (path / SETTINGS).is_file():
            other = difference(read_json(path / SETTINGS), settings)
            if other is None:
                reporter.say(f"going on with {path}")
                return
            if not force:
                raise PlanError(f"{path} was begun with other settings: {other}; `force` starts anew")
            shutil.rmtree(path)
        elif path.exists():
            raise OutputError(f"{path} is in the way and is no unfinished reconstruction: it has no {SETTINGS}")
        with writing(path):
            path.mkdir(parents=True)
            write_json(path / SETTINGS, settings)

    def _weights(self, layer: int) -> Path:
        return self.path / f"layer-{layer}.safetensors"

    def _errors(self, layer: int) -> Path:
        return self.path / f"layer-{layer}.json"

    def found(self, layer: int) -> tuple[LayerErrors, dict[str, Tensor]] | None:
        """What a layer became in an earlier run, by the names of the files."""
        if not self._errors(layer).is_file():
            return None
        return read(LayerErrors, read_json(self._errors(layer))), load_file(self._weights(layer))

    def keep(self, errors: LayerErrors, weights: Mapping[str, Tensor]) -> None:
        """The weights of a layer that is done, as they will be written; the errors go last, and say that it is."""
        with writing(self.path):
            with staged_file(self._weights(errors.layer)) as file:
                save_file({name: tensor.contiguous().cpu() for name, tensor in weights.items()}, file)
            write_json(self._errors(errors.layer), dict(written(errors)))

    def trained(self) -> TrainedTensors:
        """All that was trained, read from here when it is written."""
        places: dict[str, Path] = {}
        elements = 0
        for path in sorted(self.path.glob("layer-*.safetensors")):
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
                places |= dict.fromkeys(names, path)
                elements += sum(math.prod(file.get_slice(name).get_shape()) for name in names)
        return TrainedTensors(places, elements)

    def remove(self) -> None:
        distributed.from_main(lambda: shutil.rmtree(self.path, ignore_errors=True))


@dataclass(frozen=True)
class TrainedTensors:
    """Tensors of files, each read when it is asked for."""

    places: Mapping[str, Path]
    elements: int

    def __contains__(self, name: str) -> bool:
        return name in self.places

    def read(self, name: str) -> Tensor:
        with safe_open(self.places[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor
