"""What a reconstruction needs to go on after any interruption: the trained weights of every layer that is done.

Hidden states are not kept. They are made again from the weights, which takes a small part of the training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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
from slimstate.system.run_folders import empty, go_on_or_begin, opened

ALWAYS_SET = {"teacher", "tokens", "steps", "learning_rate"}  # by which our settings are known


def run_folder_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.reconstruction")


@dataclass(frozen=True)
class RunFolder:
    """The folder of a reconstruction that is not finished."""

    path: Path
    # what is open until there is a layer to go on with
    without_layers: ExitStack = field(default_factory=ExitStack)

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
            with STOP.keeping(folder.kept), folder._kept_with_layers_alone():
                yield folder
            distributed.from_main(lambda: empty(folder.path))

    @contextmanager
    def _kept_with_layers_alone(self) -> Iterator[None]:
        """Without a layer there is nothing to go on with, and a stop or an error leaves nothing."""
        with self.without_layers:
            if distributed.is_main() and not self._done():
                self.without_layers.enter_context(STOP.unfinished(self.path))
            try:
                yield
            except BaseException as error:
                if self._done() and isinstance(error, OutputError):
                    raise OutputError(f"{error}; {self.kept()}") from error
                if distributed.is_main() and not self._done():
                    empty(self.path)
                raise

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
            self.without_layers.close()
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
