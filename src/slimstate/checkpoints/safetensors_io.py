"""Read and write safetensors files a tensor at a time, so that memory never holds a whole file.

A file is: the length of the header (8 bytes, little endian), the header (JSON: name to dtype, shape and data
offsets), the data.
"""

import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from itertools import pairwise
from pathlib import Path
from threading import Event
from types import EllipsisType
from typing import Protocol

import safetensors
import torch
from torch import Tensor

from slimstate.system.errors import MAX_QUOTE, ModelError, quoted
from slimstate.system.input_files import Identity, open_regular
from slimstate.system.json_files import JsonObject, parse_json
from slimstate.system.value import Value

BLOCK, POINTER_SIZE = 16 * 2**20, 1024  # bytes
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")
MAX_WEIGHT = 1e18  # whose square fits into single precision
# of floats of 8 bits: which bits to compare, and the least of them that is NaN or infinite
NOT_FINITE = {"F8_E4M3": (0x7F, 0x7F), "F8_E5M2": (0x7F, 0x7C), "F8_E8M0": (0xFF, 0xFF)}


class TensorInfo(Value):
    """A tensor as the header describes it; `start` is an offset in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class TensorFile(Value):
    """The header of a safetensors file: its tensors in the order of their data, and its metadata."""

    path: Path
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str] | None
    identity: Identity | None = None  # when the header was read

    @classmethod
    def open(cls, path: Path) -> "TensorFile":
        """Open a file; refuse what the safetensors library refuses, and a header with a name that occurs twice."""
        with open_regular(path, ModelError) as file:
            identity = Identity.of(file.fileno())
            length = int.from_bytes(file.read(8), "little")
            if identity.size < 8 + length:
                pointer = ": it may be a pointer of Git LFS (`git lfs pull`)" if identity.size < POINTER_SIZE else ""
                size = f"{identity.size} bytes, shorter than its own header"
                raise ModelError(f"{quoted(path)} is truncated: {size}{pointer}")
            check_loadable(path)
            header = parse_json(file.read(length), quoted(path), unique_names=True)
        metadata, tensors = header.pop("__metadata__", None), {}
        for name, entry in header.items():
            (start, end), shape = entry["data_offsets"], tuple(entry["shape"])
            if math.prod(filter(None, shape)) >= 2**63:  # with a zero, the library accepts it and torch does not
                raise ModelError(f"{quoted(path)}: {quoted(name)} cannot have the shape {quoted(shape)}")
            tensors[name] = TensorInfo(dtype=entry["dtype"], shape=shape, start=8 + length + start, size=end - start)
        ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].size)))
        return cls(path=path, tensors=ordered, metadata=metadata, identity=identity)

    @contextmanager
    def _opened(self) -> Iterator[BufferedReader]:
        """Open the file again; refuse it if it has changed before or after it is read."""
        assert self.identity is not None, "only the headers of a hub repository are known"
        with open_regular(self.path, ModelError) as file:
            self.identity.check(self.path, file.fileno(), ModelError)
            yield file
            self.identity.check(self.path, file.fileno(), ModelError)

    def check_unchanged(self) -> None:
        with self._opened():
            pass

    def dtype(self, name: str) -> torch.dtype:
        info = self.tensors[name]
        if info.dtype not in DTYPES:
            raise ModelError(f"{quoted(self.path)}: {quoted(name)} is of dtype {info.dtype}, which cannot be cut")
        return DTYPES[info.dtype]

    def read(self, name: str) -> Tensor:
        info = self.tensors[name]
        tensor = torch.empty(info.shape, dtype=self.dtype(name), device="cpu")
        with self._opened() as file:
            file.seek(info.start)
            self._fill(tensor, file)
        return tensor

    def read_rows(self, name: str, rows: Tensor) -> Tensor:
        info = self.tensors[name]
        tensor = torch.empty((len(rows), *info.shape[1:]), dtype=self.dtype(name), device="cpu")
        size = info.size // info.shape[0]
        with self._opened() as file:
            for place, row in enumerate(rows.tolist()):
                file.seek(info.start + row * size)
                self._fill(tensor[place], file)
        return tensor

    def blocks(self, name: str) -> Iterator[Tensor]:
        """Yield the raw bytes of a tensor in blocks, each in the same memory."""
        info = self.tensors[name]
        memory = torch.empty(min(BLOCK, info.size), dtype=torch.uint8, device="cpu")
        with self._opened() as file:
            file.seek(info.start)
            for start in range(0, info.size, BLOCK):
                block = memory[: info.size - start]
                self._fill(block, file)
                yield block

    def _fill(self, tensor: Tensor, file: BufferedReader) -> None:
        data = _bytes(tensor)
        if file.readinto(data) < len(data):
            raise ModelError(f"{quoted(self.path)} became shorter while it was read")

    def digests(self, piece: int) -> "Digests":
        """Return the digests of the file and of each of its tensors, computed in one pass over its bytes."""
        file_digest, memory = hashlib.sha256(), memoryview(bytearray(piece))
        sums, position = dict.fromkeys(self.tensors, 0), 0
        remaining = list(self.tensors.items())[::-1]
        with self._opened() as file:
            while size := file.readinto(memory):
                file_digest.update(memory[:size])
                while remaining and remaining[-1][1].start < position + size:
                    name, info = remaining[-1]
                    inside = memory[max(0, info.start - position) : min(size, info.start + info.size - position)]
                    sums[name] = zlib.crc32(inside, sums[name])
                    if info.start + info.size > position + size:
                        break
                    remaining.pop()
                position += size
        return Digests(file=file_digest.hexdigest(), tensors=sums)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in its file, read when it is indexed, `stored[...]`; stock classes load it in place of a tensor."""

    file: TensorFile
    name: str

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.file.tensors[self.name].shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.file.dtype(self.name)

    def __getitem__(self, whole: EllipsisType) -> Tensor:
        return self.file.read(self.name)

    def rows(self, numbers: Tensor) -> Tensor:
        return self.file.read_rows(self.name, numbers)


class Digests(Value):
    """The SHA-256 of a file, and the CRC-32 of each of its tensors, to compare copies with."""

    file: str
    tensors: Mapping[str, int]


def check_loadable(path: Path) -> None:
    """Check that the safetensors library opens the file: header, types, shapes and sizes fit each other."""
    try:
        with safetensors.safe_open(path, framework="pt"):
            pass
    except (OSError, safetensors.SafetensorError) as error:
        is_cut_off = "not fully covered" in str(error)
        problem = "is truncated, or longer than its header says" if is_cut_off else "is not a safetensors file"
        reason = quoted(str(error).removeprefix("Error while deserializing header: "), 2 * MAX_QUOTE)
        raise ModelError(f"{quoted(path)} {problem}: {reason}") from error


class Change(Protocol):
    """New values, shapes or dtypes for some tensors of a model; a tensor with the dtype None is removed."""

    def touches(self, name: str) -> bool: ...
    def shape(self, name: str, shape: Iterable[int]) -> list[int]: ...
    def dtype(self, name: str, dtype: str) -> str | None: ...
    def apply(self, name: str, tensor: Tensor) -> Tensor: ...


class SameShapes:
    """The part of a change that leaves shapes and dtypes as they are."""

    def shape(self, name: str, shape: Iterable[int]) -> list[int]:
        return list(shape)

    def dtype(self, name: str, dtype: str) -> str:
        return dtype


class Replacement(SameShapes):
    """New values for some tensors."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def touches(self, name: str) -> bool:
        return name in self.tensors

    def apply(self, name: str, tensor: Tensor) -> Tensor:
        return self.tensors[name].to(tensor.dtype).view(tensor.shape)


def headers_after(tensors: Mapping[str, TensorInfo], change: Change) -> dict[str, tuple[str, list[int], int]]:
    """Return the dtype, shape and bytes of each tensor that remains after a change."""
    headers = {}
    for name, info in tensors.items():
        if (dtype := change.dtype(name, info.dtype)) is not None:
            shape = change.shape(name, info.shape)
            count, same = math.prod(shape), dtype == info.dtype
            size = info.size * count // max(1, info.elements) if same else count * DTYPES[dtype].itemsize
            headers[name] = dtype, shape, size
    return headers


class TensorFileWriter(Value):
    """Write a changed copy of a file, tensor by tensor in any order and from any thread."""

    source: TensorFile
    target: Path
    places: Mapping[str, tuple[int, int]]  # where each tensor starts and ends
    read: dict[str, int] = field(default_factory=dict)  # CRC-32 of each tensor that was read

    @classmethod
    def create(cls, source: TensorFile, target: Path, change: Change) -> "TensorFileWriter":
        """Create the file with its header and room for the tensors."""
        remaining = headers_after(source.tensors, change)
        header: JsonObject = {} if source.metadata is None else {"__metadata__": dict(source.metadata)}
        ends = [0]
        for name, (dtype, shape, size) in remaining.items():
            ends.append(ends[-1] + size)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": ends[-2:]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        with target.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + ends[-1])
        bounds = [8 + len(text) + end for end in ends]
        return cls(source=source, target=target, places=dict(zip(remaining, pairwise(bounds), strict=True)))

    def copy(self, name: str, stopped: Event) -> None:
        """Copy a tensor that does not change, block by block, unless it is `stopped`."""
        with self.target.open("r+b") as file:
            file.seek(self.places[name][0])
            checksum = 0
            for block in self.source.blocks(name):
                if stopped.is_set():
                    return
                _check_finite(block, self.source.tensors[name].dtype, name)
                checksum = zlib.crc32(_bytes(block), checksum)
                file.write(_bytes(block))
        self.read[name] = checksum

    def put(self, name: str, change: Change) -> None:
        """Write a tensor as the change makes it."""
        tensor, dtype = self.source.read(name), self.source.tensors[name].dtype
        self.read[name] = zlib.crc32(_bytes(tensor))
        _check_finite(tensor, dtype, name)
        changed = change.apply(name, tensor)
        _check_finite(changed, change.dtype(name, dtype) or dtype, name)
        data, (start, end) = _bytes(changed), self.places[name]
        if len(data) != end - start:
            raise AssertionError(f"{name} has {len(data)} bytes after the change, and room for {end - start}")
        with self.target.open("r+b") as file:
            file.seek(start)
            file.write(data)

    def check(self, expected: Mapping[str, int]) -> None:
        """Check that all tensors were read, with these checksums, and that the safetensors library opens the file."""
        for name in self.places:
            if self.read[name] != expected[name]:
                raise ModelError(f"{quoted(self.source.path)} changed while it was read: {quoted(name)} is different")
        check_loadable(self.target)


def _bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor, or of a contiguous copy of it."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def _check_finite(data: Tensor, dtype: str, name: str) -> None:
    """Refuse a tensor, or the raw bytes of one, with NaN, infinite or absurdly large values."""
    if dtype in FLOATS:
        values = data.view(DTYPES[dtype])
        lowest, highest = values.aminmax() if values.numel() else (0, 0)  # a NaN is both
        finite = math.isfinite(lowest) and highest < MAX_WEIGHT  # masks may be as low as can be
    else:
        mask, least = NOT_FINITE.get(dtype, (0, 1))
        finite = not mask or not data.numel() or int((data.view(torch.uint8) & mask).max()) < least
    if not finite:
        raise ModelError(f"{quoted(name)} holds NaN or infinite weights, or some above {MAX_WEIGHT:g}")
