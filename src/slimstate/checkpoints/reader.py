"""Model folders: found, and read without loading them. This is the only module that reads them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor

from slimstate.checkpoints.safetensors_io import TensorFile, TensorInfo
from slimstate.core.layout import Mixer, Slot
from slimstate.core.plan import PLAN
from slimstate.families import Config, Family, family_of
from slimstate.system import hub
from slimstate.system.errors import ModelError, SlimstateError
from slimstate.system.json_files import JsonObject, read_json
from slimstate.system.paths import expanded

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# weights in other formats would be stale beside the cut ones
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack"}
READERS, PIECE = 4, 4 * 2**20  # threads that digest files, and bytes at once: small pieces slow a running model


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model folder opened by its config and its tensor headers; no tensor is in memory."""

    source: str
    folder: Path
    config: Config
    files: Mapping[str, TensorFile]
    index: JsonObject | None

    @classmethod
    def open(cls, source: str | Path) -> Checkpoint:
        """A folder, or a hub id, which is downloaded."""
        folder = locate(source)
        config = read_json(folder / "config.json")
        family_of(config)
        index = read_json(folder / INDEX) if (folder / INDEX).exists() else None
        names = _shard_names(folder, index)
        files = {name: TensorFile.open(folder / name) for name in names}
        return cls(source=str(source), folder=folder, config=config, files=files, index=index)

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: info for file in self.files.values() for name, info in file.tensors.items()}

    @property
    def family(self) -> Family:
        return family_of(self.config)

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixers of this model; every slot was found with the size the config says."""
        mixers = described_mixers(self.config)
        check_shapes(self.tensors, mixers, str(self.folder))
        return mixers

    @cached_property
    def plan(self) -> JsonObject | None:
        """The plan that this model was cut by, where it was cut."""
        path = self.folder / PLAN
        return read_json(path) if self.config.get("slimstate") is not None and path.is_file() else None

    @property
    def cut(self) -> JsonObject | None:
        """What the last cut was, where the model was cut."""
        entry = self.config.get("slimstate")
        return entry if entry is not None and "key_dim" in entry else None

    def stored_names(self, name: str) -> tuple[str, ...]:
        """The tensors that make up the parameter `name` of the running model; none where the files do not have it."""
        for mixer in self.mixers:
            if parts := mixer.stored_parts(name):
                return parts
        running, stored = _roots(self.mixers[0])
        renamed = stored + name.removeprefix(running) if name.startswith(running) else name
        return tuple(known for known in (name, renamed) if known in self.tensors)[:1]

    def in_files(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parameters of the running model as the tensors that the files have; what they do not have is left out."""
        found: dict[str, Tensor] = {}
        for name, tensor in parameters.items():
            if names := self.stored_names(name):
                parts = tensor.split([self.tensors[part].shape[0] for part in names]) if len(names) > 1 else (tensor,)
                found |= dict(zip(names, parts, strict=True))
        return found

    @property
    def parameters(self) -> int:
        return sum(info.elements for info in self.tensors.values())

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the config and of every byte of the weights."""
        with ThreadPoolExecutor(READERS) as pool:
            digests = list(pool.map(lambda name: _digest(self.folder / name), sorted(self.files)))
        whole = json.dumps([self.config, sorted(self.files), digests], sort_keys=True)
        return "sha256:" + hashlib.sha256(whole.encode()).hexdigest()

    def read(self, name: str) -> Tensor:
        return next(file for file in self.files.values() if name in file.tensors).read(name)

    def read_rows(self, mixer: Mixer, slot: Slot) -> Tensor:
        """The rows of a projection by channel: [H, D, input size]."""
        weight = mixer.by_channel(slot, self.read(mixer.name_of(slot)))
        healthy = weight.isfinite().flatten(1).all(1)
        if not bool(healthy.all()):
            head = int((~healthy).nonzero()[0])
            raise ModelError(f"layer {mixer.layer}, head {head}: {mixer.name_of(slot)} holds NaN or infinite weights")
        return weight


def _roots(mixer: Mixer) -> tuple[str, str]:
    """How the names of the running model and of the files begin where they differ."""
    running, stored = mixer.path.split("."), mixer.place_in_files.split(".")
    while running and stored and running[-1] == stored[-1]:
        running.pop()
        stored.pop()
    return "".join(f"{part}." for part in running), "".join(f"{part}." for part in stored)


def locate(source: str | Path) -> Path:
    """The folder of a model: as it stands, or downloaded from the hub."""
    path = expanded(source)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} is not a model folder: it has no config.json")
        return path
    if path.exists():
        raise ModelError(f"{path} is a file; give the folder of a model")
    if not _looks_like_hub_id(str(source)):
        raise ModelError(f"no model at {source}")
    return download(str(source))


def _looks_like_hub_id(source: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(source)
    except HFValidationError:
        return False
    return source.count("/") == 1 and not source.startswith(("/", "./", "../", "~"))


def download(repository: str) -> Path:
    """A snapshot of a hub repository, without weights in other formats."""
    from huggingface_hub import snapshot_download

    skipped = [f"*{suffix}" for suffix in sorted(WEIGHT_SUFFIXES - {".safetensors"})]
    online = hub.reachable()
    with _hub_errors(repository, online):
        return Path(snapshot_download(repository, ignore_patterns=skipped, local_files_only=not online))


def open_headers(source: str) -> Checkpoint:
    """A model by its config and headers alone: of a hub repository nothing else is downloaded."""
    if expanded(source).exists() or not _looks_like_hub_id(source) or not hub.reachable():
        return Checkpoint.open(source)
    from huggingface_hub import HfApi, hf_hub_download

    with _hub_errors(source, online=True):
        config = read_json(Path(hf_hub_download(source, "config.json")))
        family_of(config)
        remote = HfApi().get_safetensors_metadata(source)
    files = {}
    for name, file in remote.files_metadata.items():
        tensors = {
            tensor: TensorInfo(
                dtype=info.dtype,
                shape=tuple(info.shape),
                start=info.data_offsets[0],
                size=info.data_offsets[1] - info.data_offsets[0],
            )
            for tensor, info in file.tensors.items()
        }
        files[name] = TensorFile(path=Path(source) / name, tensors=tensors, metadata=file.metadata)
    return Checkpoint(source=source, folder=Path(source), config=config, files=files, index=None)


@contextmanager
def _hub_errors(repository: str, online: bool) -> Iterator[None]:
    """Whatever the hub client raises, as one line."""
    try:
        yield
    except SlimstateError:
        raise
    except Exception as error:
        if not online:
            raise ModelError(f"no folder {repository}, and the hub cannot be reached from here") from error
        raise ModelError(f"no folder {repository}, and it cannot be had from the hub: {hub.reason(error)}") from error


def described_mixers(config: Config) -> tuple[Mixer, ...]:
    """The mixers that a config describes, none of them looked up in the weights."""
    try:
        mixers = family_of(config).mixers(config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"config.json cannot be understood: {type(error).__name__} {error}") from error
    if not mixers:
        raise ModelError("config.json gives every layer to softmax attention: there is no state to cut")
    return mixers


def check_shapes(tensors: Mapping[str, TensorInfo], mixers: tuple[Mixer, ...], where: str) -> None:
    """Every slot is there, with as many rows as its channels need."""
    for mixer in mixers:
        for slot in mixer.axis.slots:
            name = mixer.name_of(slot)
            if name not in tensors:
                raise ModelError(f"{where} has no tensor {name}, which its config asks for")
            rows, needed = slot.rows_in(tensors[name].shape), int(mixer.axis.all_rows(slot).max()) + 1
            if rows < needed:
                raise ModelError(f"{where}: {name} has {rows} rows where the config needs {needed}")
            if rows > needed and any(slot.parameter in parts for _, parts in mixer.joined):
                raise ModelError(
                    f"{where}: {name} has {rows} rows where the config needs {needed}: save_pretrained of transformers"
                    " splits joined tensors into equal parts; take the checkpoint as it was published"
                )


def _shard_names(folder: Path, index: JsonObject | None) -> list[str]:
    if index is not None:
        names = sorted(set(index.get("weight_map", {}).values()))
        for name in names:
            if not (folder / name).is_file():
                raise ModelError(f"{folder}: shard {name} is missing")
        return names
    if (folder / SINGLE).is_file():
        return [SINGLE]
    others = sorted(path.name for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)
    found = f"only {', '.join(others[:3])}; save it as safetensors first" if others else "no weights at all"
    raise ModelError(f"{folder} has no {SINGLE}: {found}")


def _digest(path: Path) -> str:
    digest, block = hashlib.sha256(), memoryview(bytearray(PIECE))
    with path.open("rb") as file:
        while size := file.readinto(block):
            digest.update(block[:size])
    return digest.hexdigest()
