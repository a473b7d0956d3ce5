"""Find model folders and read them without loading the model. No other module reads them."""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from slimstate.checkpoints.formats import Module, Quantisation, QuantisedWeight, quantisation_of
from slimstate.checkpoints.safetensors_io import Digests, StoredTensor, TensorFile, TensorInfo
from slimstate.core.file_names import PLAN
from slimstate.core.layout import Mixer, Slot
from slimstate.families import Config, Family, family_of
from slimstate.families.config_values import check_values
from slimstate.records.parts import ConfigEntry, Cut, Model
from slimstate.records.plan import MAX_PLAN_BYTES, Plan
from slimstate.records.schema import ValidationError, from_json
from slimstate.system import hub
from slimstate.system.errors import ModelError, SlimstateError, quoted, reason_of
from slimstate.system.input_files import check_name, expand_home, files_inside
from slimstate.system.json_files import JsonObject, read_json
from slimstate.system.value import Value

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
MODELOPT_CONFIG = "hf_quant_config.json"
OUTPUTS = ("out_proj", "o_proj")  # projections that do not read the input of a layer
# weights in other formats would be stale beside those of a cut
WEIGHT_SUFFIXES = {
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".npz", ".pkl", ".distcp",
}  # fmt: skip
READERS, READ_SIZE = 4, 4 * 2**20  # threads that compute digests, and bytes that each reads at once


class Checkpoint(Value):
    """A model folder opened by its config and its tensor headers; no tensor is in memory."""

    source: str
    folder: Path
    config: Config
    files: Mapping[str, TensorFile]
    index: JsonObject | None

    @classmethod
    def open(cls, source: str | PathLike[str]) -> "Checkpoint":
        """Open a folder, or a hub id, which is downloaded; refuse links out of it and special files."""
        folder = locate(source)
        for _ in files_inside(folder, ModelError):
            pass
        if os.path.lexists(folder / ADAPTER_CONFIG):
            raise ModelError(
                f"{quoted(folder)} has an {ADAPTER_CONFIG}, which makes libraries load other weights:"
                " merge the adapter into the weights first, or remove the file"
            )
        config = read_config(folder / "config.json")
        index = _read_index(folder)
        files = {name: TensorFile.open(folder / name) for name in _shard_names(folder, index)}
        _check_index(folder, index, files)
        return cls(source=str(source), folder=folder, config=config, files=files, index=index)

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: info for file in self.files.values() for name, info in file.tensors.items()}

    @property
    def family(self) -> Family:
        return family_of(self.config)

    @property
    def language_config(self) -> Config:
        """The part of the config that describes the language model."""
        return self.family.language_config(self.config)

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixers of this model; the weights have every slot with the size that the config says."""
        check_shapes(self.shapes, self._mixers, quoted(self.folder))
        return self._mixers

    @cached_property
    def _mixers(self) -> tuple[Mixer, ...]:
        mixers = described_mixers(self.config)
        if len(mixers) > len(self.tensors):
            raise ModelError(f"config.json has {len(mixers):,} layers, and the files {len(self.tensors):,} tensors")
        # by transformers, if taken from a larger model, or saved by the names of the running model
        renames = [("model.", "model.language_model."), ("backbone.", "model.")]
        if self.quantisation is not None and self.quantisation.method == "mlx":
            renames.insert(0, ("model.language_model.", "language_model.model."))
        for before, after in renames if mixers else ():
            paths = [mixer.place_in_files.replace(before, after, 1) for mixer in mixers]
            if not self._has(mixers[0].place_in_files) and self._has(paths[0]):
                return tuple(replace(mixer, stored_path=path) for mixer, path in zip(mixers, paths, strict=True))
        return mixers

    def _has(self, place: str) -> bool:
        return any(name.startswith(f"{place}.") for name in self.tensors)

    @cached_property
    def quantisation(self) -> Quantisation | None:
        """How the weights are quantised, or None; ModelOpt may say so in a file of its own."""
        path = self.folder / MODELOPT_CONFIG
        if (quantisation := quantisation_of(self.config)) is None and path.is_file():
            return quantisation_of({"quantization_config": read_json(path)})
        return quantisation

    def check_plain(self, purpose: str) -> None:
        """Refuse a quantised model for a purpose that changes or needs plain weights: "trained"."""
        if self.quantisation is not None:
            problem = f"is quantised ({quoted(self.quantisation.method)}) and cannot be {purpose}"
            raise ModelError(f"{quoted(self.source)} {problem}: use the unquantised model, and quantise the result")

    @cached_property
    def modules(self) -> dict[str, Module]:
        modules: dict[str, dict[str, TensorInfo]] = {}
        for name, info in self.tensors.items():
            path, _, part = name.rpartition(".")
            modules.setdefault(path, {})[part] = info
        return {path: Module(path=path, tensors=parts) for path, parts in modules.items()}

    @cached_property
    def quantised(self) -> dict[str, QuantisedWeight]:
        """The quantised weights that a cut changes, by their names as plain weights."""
        weights: dict[str, QuantisedWeight] = {}
        for mixer in self._mixers:
            names = dict.fromkeys(mixer.name_of(slot) for slot in mixer.axis.slots)
            own = [weight for name in names if (weight := self._quantised_weight(name, mixer)) is not None]
            if any(weight.block_scale for weight in own):  # they become bfloat16, and so do those fused with them
                inputs = (f"{mixer.place_in_files}.{name}.weight" for name in mixer.projections if name not in OUTPUTS)
                fused = (self._quantised_weight(name, mixer) for name in inputs if name not in names)
                own += [weight for weight in fused if weight is not None and weight.block_scale]
            weights |= {weight.name: weight for weight in own}
        return weights

    @property
    def dequantised(self) -> list[QuantisedWeight]:
        """The weights that become bfloat16 in a cut, because their scales belong to blocks of rows."""
        return [weight for weight in self.quantised.values() if weight.block_scale is not None]

    def _quantised_weight(self, name: str, mixer: Mixer) -> QuantisedWeight | None:
        module = self.modules.get(name.removesuffix(".weight"))
        if not name.endswith(".weight") or module is None or module.is_plain:
            return None
        if self.quantisation is None:
            part = min(module.tensors, key=lambda part: (part != "weight", part))
            dtype = module.tensors[part].dtype
            raise ModelError(f"{quoted(module.name(part))} is of {dtype}, and config.json has no quantization_config")
        return self.quantisation.read(module, mixer.input_size)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors, and of quantised weights that a cut changes as if they were plain."""
        shapes = {name: info.shape for name, info in self.tensors.items()}
        return {**shapes, **{name: weight.shape for name, weight in self.quantised.items()}}

    @cached_property
    def plan(self) -> Plan | None:
        """The plan of the last cut, or None."""
        path = self.folder / PLAN
        if self.config.get("slimstate") is None or not path.is_file():
            return None
        try:
            return Plan.from_json(read_json(path, max_bytes=MAX_PLAN_BYTES))
        except ValidationError as error:
            raise ModelError(f"{quoted(path)} is not the plan of a cut: {error}") from error

    @property
    def cut(self) -> JsonObject | None:
        return cut_in(self.config)

    @property
    def roots(self) -> tuple[str, str]:
        """The prefixes of names in the running model and in the files, where they differ."""
        running, stored = self.mixers[0].path.split("."), self.mixers[0].place_in_files.split(".")
        while running and stored and running[-1] == stored[-1]:
            running.pop()
            stored.pop()
        return "".join(f"{part}." for part in running), "".join(f"{part}." for part in stored)

    def stored_names(self, name: str) -> tuple[str, ...]:
        """Return the tensors in the files that make up a parameter of the running model, if there are any."""
        for mixer in self.mixers:
            if parts := mixer.stored_parts(name):
                return parts
        running, stored = self.roots
        renamed = stored + name.removeprefix(running) if name.startswith(running) else name
        return tuple(candidate for candidate in (name, renamed) if candidate in self.tensors)[:1]

    def in_files(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return parameters of the running model as tensors of the files, without those that the files do not have."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in parameters.items():
            if names := self.stored_names(name):
                parts = tensor.split([self.tensors[part].shape[0] for part in names]) if len(names) > 1 else (tensor,)
                tensors |= dict(zip(names, parts, strict=True))
        return tensors

    @property
    def parameters(self) -> int:
        if self.quantisation is None:
            return sum(info.elements for info in self.tensors.values())
        return sum(self.quantisation.values(module) for module in self.modules.values())

    @cached_property
    def digests(self) -> Mapping[str, Digests]:
        """The digests of the weights, by file."""
        with ThreadPoolExecutor(READERS) as pool:
            names = sorted(self.files)
            return dict(zip(names, pool.map(lambda name: self.files[name].digests(READ_SIZE), names), strict=True))

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the config and of every byte of the weights."""
        digests = [self.digests[name].file for name in sorted(self.files)]
        text = json.dumps([self.config, sorted(self.files), digests], sort_keys=True)
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()

    def identity(self, name: str, after: Config | None = None) -> Model:
        """Return the description of this model for records, with its config or its config `after` a change."""
        config = self.config if after is None else after
        entry, first = cut_in(config), described_mixers(config)[0]
        try:
            cut = None if entry is None else from_json(Cut, entry)
        except ValidationError as error:
            raise ModelError(f"{self.folder}/config.json describes the cut wrongly: {error}") from error
        return Model(
            name=name, model=self.source, fingerprint=self.fingerprint, model_type=self.family.model_type,
            key_dim=first.axis.width, value_dim=first.value_dim, cut=cut,
        )  # fmt: skip

    def check_unchanged(self) -> None:
        """Refuse a model whose weights or config have changed since it was opened."""
        for file in self.files.values():
            file.check_unchanged()
        if json.dumps(read_json(self.folder / "config.json")) != json.dumps(self.config):
            raise ModelError(f"{quoted(self.folder / 'config.json')} changed while the model was read")

    def stored(self, name: str) -> StoredTensor:
        """Return a tensor in its file, to be read later."""
        return StoredTensor(next(file for file in self.files.values() if name in file.tensors), name)

    def read(self, name: str) -> Tensor:
        return self.stored(name)[...]

    def read_ahead(self, names: Iterable[str]) -> None:
        """Make the system read these tensors ahead, because they are needed soon."""
        if not hasattr(os, "posix_fadvise"):
            return
        expected = set(names)
        for file in self.files.values():
            if inside := [info for name, info in file.tensors.items() if name in expected]:
                with file.path.open("rb") as opened:
                    for info in inside:
                        os.posix_fadvise(opened.fileno(), info.start, info.size, os.POSIX_FADV_WILLNEED)

    def read_rows(self, mixer: Mixer, slot: Slot) -> Tensor:
        """Return the rows of a projection by channel, [H, D, input size], dequantised where they are quantised."""
        name = mixer.name_of(slot)
        if (quantised := self.quantised.get(name)) is None:
            weight = mixer.by_channel(slot, self.read(name))
        else:
            rows = mixer.by_channel(slot, torch.arange(quantised.shape[0]))
            weight = quantised.dequantised(self.read, rows.flatten()).view(*rows.shape[:2], -1)
        finite = weight.isfinite().flatten(1).all(1)
        if not bool(finite.all()):
            head = int((~finite).nonzero()[0])
            raise ModelError(f"layer {mixer.layer}, head {head}: {name} holds NaN or infinite weights")
        return weight


def cut_in(config: Config) -> JsonObject | None:
    """Return the entry of the last cut in a config, or None."""
    entry = config.get("slimstate")
    return entry if entry is not None and "key_dim" in entry else None


def locate(source: str | PathLike[str]) -> Path:
    """Return the folder of a model, downloaded from the hub if needed, without weights in other formats."""
    path = expand_home(source)
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ModelError(f"{quoted(path)} is not a model folder: it has no config.json")
        return path
    if path.exists():
        raise ModelError(f"{quoted(path)} is a file; use the folder of a model")
    if not _looks_like_hub_id(str(source)):
        raise ModelError(f"no model at {quoted(source)}")
    from huggingface_hub import snapshot_download

    skipped = [f"*{suffix}" for suffix in sorted(WEIGHT_SUFFIXES - {".safetensors"})]
    online = hub.is_reachable()
    with _hub_errors(str(source), online):
        return Path(snapshot_download(str(source), ignore_patterns=skipped, local_files_only=not online))


def _looks_like_hub_id(source: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(source)
    except HFValidationError:
        return False
    return source.count("/") == 1 and not source.startswith(("/", "./", "../", "~"))


def open_headers(model: str | PathLike[str]) -> Checkpoint:
    """Open a model by its config and headers; of a hub repository nothing else is downloaded."""
    source = str(model)
    if expand_home(model).exists() or not _looks_like_hub_id(source) or not hub.is_reachable():
        return Checkpoint.open(model)
    from huggingface_hub import HfApi, hf_hub_download

    with _hub_errors(source, online=True):
        path = Path(hf_hub_download(source, "config.json"))
        config = read_config(path)
        if HfApi().file_exists(source, MODELOPT_CONFIG):  # which belongs beside the config
            hf_hub_download(source, MODELOPT_CONFIG)
        remote = HfApi().get_safetensors_metadata(source)
    files = {}
    for name, file in remote.files_metadata.items():
        tensors = {
            tensor: TensorInfo(dtype=info.dtype, shape=tuple(info.shape), start=start, size=end - start)
            for tensor, info in file.tensors.items()
            for start, end in [info.data_offsets]
        }
        files[name] = TensorFile(path=Path(source) / name, tensors=tensors, metadata=file.metadata)
    return Checkpoint(source=source, folder=path.parent, config=config, files=files, index=None)


@contextmanager
def _hub_errors(repository: str, online: bool) -> Iterator[None]:
    """Turn whatever the hub's client raises into a `ModelError`."""
    try:
        yield
    except SlimstateError:
        raise
    except Exception as error:
        if not online:
            raise ModelError(f"no folder {repository}, and the hub cannot be reached from here") from error
        raise ModelError(f"no folder {repository}, and the hub does not provide it: {reason_of(error)}") from error


def described_mixers(config: Config) -> tuple[Mixer, ...]:
    """Return the mixers that a config describes, without a look at the weights."""
    try:
        family = family_of(config)
        mixers = family.mixers(config)
        family.epsilon(config), family.softmax_layers(config), family.logit_factor(config)  # needed later
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ModelError(f"config.json cannot be understood: {reason_of(error)}") from error
    if not mixers:
        raise ModelError("every layer in config.json is softmax attention: there is no state to cut")
    return mixers


def check_shapes(shapes: Mapping[str, tuple[int, ...]], mixers: tuple[Mixer, ...], where: str) -> None:
    """Check that the weights have every slot, with as many rows as its channels need."""
    for mixer in mixers:
        for slot in mixer.axis.slots:
            name = mixer.name_of(slot)
            if name not in shapes:
                raise ModelError(f"{where} has no tensor {name}, which its config needs")
            shape, least = shapes[name], mixer.axis.end(slot)
            if len(shape) <= slot.dim + slot.by_head:
                raise ModelError(f"{where}: {name} has {len(shape)} dimensions, too few for its rows")
            rows = slot.rows_in(shape)
            if slot in (mixer.query, mixer.key) and math.prod(shape) != shape[slot.dim] * mixer.input_size:
                raise ModelError(f"{where}: {name} is {list(shape)} where the config says {mixer.input_size} inputs")
            if rows < least:
                raise ModelError(f"{where}: {name} has {rows} rows where the config needs {least}")
            if rows > least and any(slot.parameter in parts for _, parts in mixer.joined):
                raise ModelError(
                    f"{where}: {name} has {rows} rows where the config needs {least}: save_pretrained of transformers"
                    " splits joined tensors into equal parts; use the checkpoint as it was published"
                )


def read_config(path: Path) -> Config:
    """Read the config of a model; refuse an unsupported family and values that no config should have."""
    config = read_json(path)
    check_values(config)
    family_of(config)
    if (entry := config.get("slimstate")) is not None:
        try:
            if from_json(ConfigEntry, entry).key_dim is not None:
                from_json(Cut, entry)
        except ValidationError as error:
            raise ModelError(f"{quoted(path)}: its entry `slimstate` is invalid: {error}") from error
    return config


def _read_index(folder: Path) -> JsonObject | None:
    """Return the index of the shards, which maps tensors to files, or None if there is none."""
    path = folder / INDEX
    if not path.exists():
        return None
    index = read_json(path)
    shards, metadata = index.get("weight_map"), index.get("metadata")
    if not isinstance(shards, dict) or not shards:
        raise ModelError(f"{quoted(path)} has no weight_map from tensors to files")
    if (folder / SINGLE).exists() and any(file != SINGLE for file in shards.values()):
        raise ModelError(f"{quoted(folder)} has {SINGLE} and {INDEX}: libraries differ in which they load; remove one")
    metadata = {} if metadata is None else metadata
    total = metadata.get("total_parameters", 0) if isinstance(metadata, dict) else None
    if type(total) is not int:
        raise ModelError(f"{quoted(path)} has invalid metadata: total_parameters must be an integer")
    return index


def _shard_names(folder: Path, index: JsonObject | None) -> list[str]:
    if index is not None:
        distinct: set[str] = set()
        for name in index["weight_map"].values():  # many tensors, few files
            if not isinstance(name, str) or name not in distinct:
                distinct.add(check_name(folder, name, ModelError))
        names = sorted(distinct)
        for name in names:
            if not name.endswith(".safetensors"):
                raise ModelError(f"{quoted(folder)}: shard {quoted(name)} is not a safetensors file")
            if not (folder / name).is_file():
                raise ModelError(f"{quoted(folder)}: shard {quoted(name)} is missing")
        return names
    if (folder / SINGLE).is_file():
        return [SINGLE]
    others = sorted(path.name for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)
    if any(name.endswith(".safetensors") for name in others):
        raise ModelError(f"{quoted(folder)} has neither {SINGLE} nor {INDEX}, which names the files of the weights")
    reason = f"only {quoted(', '.join(others[:3]))}" if others else "no weights in this format"
    raise ModelError(f"{quoted(folder)} has no {SINGLE}: {reason}; save the model as safetensors first")


def _check_index(folder: Path, index: JsonObject | None, files: Mapping[str, TensorFile]) -> None:
    """Check that every tensor is in one file, the one that the index names."""
    owners: dict[str, str] = {}
    for file, opened in files.items():
        for name in opened.tensors:
            if name in owners:
                raise ModelError(f"{quoted(folder)}: {quoted(name)} is in {quoted(owners[name])} and in {quoted(file)}")
            owners[name] = file
    if index is not None and (wrong := index["weight_map"].items() - owners.items()):
        name, file = min(wrong)
        raise ModelError(f"{quoted(folder)}: {quoted(file)} does not hold {quoted(name)}, as the index says")
