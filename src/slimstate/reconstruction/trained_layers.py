"""The run folder of a reconstruction: the trained weights of every finished layer.

Hidden states are not stored: computing them again from the weights takes a small part of the training time.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from slimstate.checkpoints.reader import Checkpoint
from slimstate.checkpoints.safetensors_io import Change
from slimstate.records.schema import from_json, to_json
from slimstate.records.training import LayerErrors
from slimstate.system.atomic import staged_file, writing
from slimstate.system.json_files import read_json, write_json
from slimstate.system.run_folders import RunFolder


@dataclass(frozen=True)
class TrainedLayers(RunFolder):
    """The folder of an unfinished reconstruction: the trained weights and the errors of each finished layer."""

    WORK = "reconstruction"
    REQUIRED_SETTINGS = frozenset({"teacher", "tokens", "steps", "learning_rate"})

    def has_progress(self) -> bool:
        return any(self.path.glob("layer-*.json"))

    def describe(self) -> str:
        count = len(list(self.path.glob("layer-*.json")))
        if not count:
            return "no layer is done yet; the same command starts again with the first"
        layers = "1 layer is" if count == 1 else f"{count} layers are"
        return f"{layers} kept in {self.path}; the same command continues there"

    def _files(self, layer: int) -> tuple[Path, Path]:
        """Return the files with the errors and with the weights of a layer."""
        return self.path / f"layer-{layer}.json", self.path / f"layer-{layer}.safetensors"

    def read(self, layer: int) -> tuple[LayerErrors, dict[str, Tensor]] | None:
        """Return the errors and the trained tensors of a layer that an earlier run finished, or None."""
        errors, weights = self._files(layer)
        return (from_json(LayerErrors, read_json(errors)), load_file(weights)) if errors.is_file() else None

    def write(self, errors: LayerErrors, weights: Mapping[str, Tensor]) -> None:
        """Save a finished layer; its errors are written last and mark it as finished."""
        errors_path, weights_path = self._files(errors.layer)
        with writing(self.path):
            with staged_file(weights_path) as file:
                save_file({name: tensor.contiguous().cpu() for name, tensor in weights.items()}, file)
            write_json(errors_path, dict(to_json(errors)))

    def outline(self, model: Checkpoint, cut: Change) -> "TrainedChange":
        """Return the shapes of the change, in which all tensors that may be trained change: mixers and vectors."""
        mixers = tuple(f"{mixer.place_in_files}." for mixer in model.mixers)
        names = (name for name, info in model.tensors.items() if name.startswith(mixers) or len(info.shape) < 2)
        return TrainedChange(dict.fromkeys(names, self.path), 0, cut)

    def change(self, cut: Change) -> "TrainedChange":
        """Return the trained tensors as a change of the model; the others change as in the cut."""
        places: dict[str, Path] = {}
        elements = 0
        for path in sorted(self.path.glob("layer-*.safetensors")):
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
                places |= dict.fromkeys(names, path)
                elements += sum(math.prod(file.get_slice(name).get_shape()) for name in names)
        return TrainedChange(places, elements, cut)


@dataclass(frozen=True)
class TrainedChange:
    """Trained tensors in files, each read when it is needed; the others change as in the cut."""

    places: Mapping[str, Path]
    elements: int
    cut: Change

    def touches(self, name: str) -> bool:
        return name in self.places or self.cut.touches(name)

    def shape(self, name: str, shape: Iterable[int]) -> list[int]:
        return self.cut.shape(name, shape)

    def dtype(self, name: str, dtype: str) -> str | None:
        return self.cut.dtype(name, dtype)

    def apply(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self.places:
            return self.cut.apply(name, tensor)
        with safe_open(self.places[name], framework="pt") as file:
            trained: Tensor = file.get_tensor(name)
        return trained.to(tensor.dtype)
