"""Safetensors files read and written a tensor at a time, so that memory holds a few tensors and never a shard.

A file is: the length of the header (8 bytes, little endian), the header (JSON: name to dtype, shape and data
offsets), the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from slimstate.system.errors import ModelError
from slimstate.system.json_files import JsonObject

BLOCK = 16 * 2**20
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor as the header describes it; `start` counts from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def resized(self, shape: list[int]) -> int:
        """Bytes of a tensor of the same dtype and another shape."""
        return self.size * math.prod(shape) // self.elements if self.elements else 0


@dataclass(frozen=True, kw_only=True)
class TensorFile:
    """The header of one safetensors file: tensors in the order of their data, and the file's own metadata."""

    path: Path
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str] | None

    @classmethod
    def open(cls, path: Path) -> TensorFile:
        try:
            total = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if total < 8 or length > total - 8:
                    raise ModelError(f"{path} is truncated: {total} bytes, shorter than its own header")
                header = json.loads(file.read(length))
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise ModelError(f"{path} is not a safetensors file: {error}") from error
        metadata = header.pop("__metadata__", None)
        tensors = {name: _info(entry, 8 + length) for name, entry in header.items()}
        for name, info in tensors.items():
            if info.dtype in DTYPES and info.size != info.elements * DTYPES[info.dtype].itemsize:
                shape = list(info.shape)
                raise ModelError(f"{path}: {name} takes {info.size} bytes, not those of {shape} in {info.dtype}")
        end = max((info.start + info.size for info in tensors.values()), default=8 + length)
        if end != total:
            what = "truncated" if end > total else "longer than its header says"
            raise ModelError(f"{path} is {what}: {total} bytes where the header describes {end}")
        ordered = dict(sorted(tensors.items(), key=lambda item: item[1].start))
        return cls(path=path, tensors=ordered, metadata=metadata)

    def read(self, name: str) -> Tensor:
        info = self.tensors[name]
        if info.dtype not in DTYPES:
            raise ModelError(f"{self.path}: {name} is of dtype {info.dtype}, which cannot be cut")
        whole = torch.empty(info.shape, dtype=DTYPES[info.dtype], device="cpu")
        with self.path.open("rb") as file:
            file.seek(info.start)
            self._fill(whole, file)
        return whole

    def blocks(self, name: str) -> Iterator[Tensor]:
        """The raw bytes of a tensor, a piece at a time, all in the same memory."""
        info = self.tensors[name]
        memory = torch.empty(min(BLOCK, info.size), dtype=torch.uint8, device="cpu")
        with self.path.open("rb") as file:
            file.seek(info.start)
            for start in range(0, info.size, BLOCK):
                block = memory[: info.size - start]
                self._fill(block, file)
                yield block

    def _fill(self, tensor: Tensor, file: BufferedReader) -> None:
        data = _bytes(tensor)
        if file.readinto(data) < len(data):
            raise ModelError(f"{self.path} became shorter while it was read")


def _info(entry: JsonObject, base: int) -> TensorInfo:
    begin, end = entry["data_offsets"]
    return TensorInfo(dtype=entry["dtype"], shape=tuple(entry["shape"]), start=base + begin, size=end - begin)


class Change(Protocol):
    """Other values or shapes for some tensors of a model, in the dtype they have."""

    def touches(self, name: str) -> bool: ...

    def shape(self, name: str, shape: Iterable[int]) -> list[int]: ...

    def apply(self, name: str, tensor: Tensor) -> Tensor: ...


class Replacement:
    """New values for some tensors."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def touches(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str, shape: Iterable[int]) -> list[int]:
        return list(shape)

    def apply(self, name: str, tensor: Tensor) -> Tensor:
        return self.tensors[name].to(tensor.dtype).view(tensor.shape)


@dataclass(frozen=True, kw_only=True)
class Rewriting:
    """A file on its way to another with other shapes: each tensor goes to its place, in any order, by any thread."""

    source: TensorFile
    target: Path
    places: Mapping[str, tuple[int, int]]  # where each tensor begins and ends

    @classmethod
    def begin(cls, source: TensorFile, target: Path, change: Change) -> Rewriting:
        """Write the header, and leave room for the tensors."""
        shapes = {name: change.shape(name, info.shape) for name, info in source.tensors.items()}
        header: JsonObject = {} if source.metadata is None else {"__metadata__": dict(source.metadata)}
        ends = [0]
        for name, info in source.tensors.items():
            ends.append(ends[-1] + info.resized(shapes[name]))
            header[name] = {"dtype": info.dtype, "shape": shapes[name], "data_offsets": ends[-2:]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + ends[-1])
        bounds = [8 + len(text) + end for end in ends]
        return cls(source=source, target=target, places=dict(zip(source.tensors, pairwise(bounds), strict=True)))

    def copy(self, name: str, wanted: Callable[[], bool]) -> None:
        """Put a tensor that does not change to its place, a piece at a time, as long as it is wanted."""
        with self.target.open("r+b") as file:
            file.seek(self.places[name][0])
            for block in self.source.blocks(name):
                if not wanted():
                    return
                _check_finite(block, self.source.tensors[name].dtype, name)
                file.write(_bytes(block))

    def put(self, name: str, change: Change) -> None:
        """Put a tensor to its place as the change makes it."""
        tensor, dtype = self.source.read(name), self.source.tensors[name].dtype
        _check_finite(tensor, dtype, name)
        changed = change.apply(name, tensor)
        _check_finite(changed, dtype, name)
        data, (start, end) = _bytes(changed), self.places[name]
        if len(data) != end - start:
            raise AssertionError(f"{name} is {len(data)} bytes after the change, and has room for {end - start}")
        with self.target.open("r+b") as file:
            file.seek(start)
            file.write(data)


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a tensor, or of a copy of one that does not lie in one piece."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def _check_finite(data: Tensor, dtype: str, name: str) -> None:
    """Of a tensor or of raw bytes."""
    if dtype not in FLOATS:
        return
    values = data.view(DTYPES[dtype])
    if values.numel() and not all(math.isfinite(extreme) for extreme in values.aminmax()):  # a NaN is both of them
        raise ModelError(f"{name} holds NaN or infinite weights")
