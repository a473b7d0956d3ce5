"""What a reconstruction needs to go on after any interruption: the trained weights of every layer that is done.

Hidden states are not kept. They are made again from the weights, which takes a small part of the training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from slimstate.records.reconstruction import LayerErrors
from slimstate.records.schema import read, written
from slimstate.system import distributed
from slimstate.system.atomic import staged_file, writing
from slimstate.system.errors import OutputError
from slimstate.system.interruption import STOP
from slimstate.system.json_files import read_json, write_json
from slimstate.system.progress import Reporter
from slimstate.system.run_folders import empty, go_on_or_begin, kept_only_with, opened

ALWAYS_SET = {"teacher", "tokens", "steps", "learning_rate"}  # by which our settings are known


def run_folder_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.reconstruction")


@dataclass(frozen=True)
class RunFolder:
    """The folder of a reconstruction that is not finished."""

    path: Path

    @classmethod
    @contextmanager
    def begun(cls, out: Path, settings: Mapping[str, object], force: bool, reporter: Reporter) -> Iterator[RunFolder]:
        """A new one, or the one that the same command left behind; held by the main process, and gone with the work."""
        folder = cls(run_folder_of(out))
        with ExitStack() as stack:

            def begin() -> None:
                stack.enter_context(opened(folder.path))
                go_on_or_begin(folder.path, settings, ALWAYS_SET, "reconstruction", force, reporter)

            distributed.from_main(begin)
            with kept_only_with(folder.path, folder._any_done), STOP.keeping(folder.kept):
                try:
                    yield folder
                except OutputError as error:
                    if folder._any_done():
                        raise OutputError(f"{error}; {folder.kept()}") from error
                    raise
            distributed.from_main(lambda: empty(folder.path))

    def _any_done(self) -> bool:
        return self._done() > 0

    def _done(self) -> int:
        return len(list(self.path.glob("layer-*.json")))

    def kept(self) -> str:
        """What a stop leaves, and how to go on."""
        done = self._done()
        if not done:
            return "no layer is done yet; the same command starts again with the first"
        return f"{done} {'layer is' if done == 1 else 'layers are'} kept in {self.path}; the same command goes on there"

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
