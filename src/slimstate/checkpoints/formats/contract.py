"""How a format stores a quantised weight: which tensors belong to it, and where its output rows are in each of them.

A weight has N output rows and K inputs. A cut of key channels removes output rows, so it is exact wherever a scale
belongs to a row, to a row and a group of inputs, or to the whole tensor: the same rows go from every tensor, and rows
that share a word are packed anew. A scale for a block of rows belongs to rows that go and rows that stay; such a weight
becomes bfloat16. A cut of input columns, such as those of an output projection, would break groups of inputs: no format
has a place for it.
"""

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from typing import Any

import torch
from torch import Tensor

from slimstate.checkpoints.safetensors_io import DTYPES, FLOATS, TensorInfo
from slimstate.system.errors import ModelError, quoted
from slimstate.system.value import Value

Settings = Mapping[str, Any]
Dtypes = tuple[str, ...]
WORD = 32  # bits
SCALES: Dtypes = (*FLOATS, "F8_E4M3", "F8_E8M0", "U8")
FLOAT4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # by their codes
# what a tensor is to the values of a weight, by its name in any format without "weight_"; and powers of others in them
ROLES = {"zero_point": "zeros", "qzeros": "zeros", "biases": "offsets", "g_idx": "groups"}
FACTORS = {"weight_scale_2": 1, "pre_quant_scale": 1, "weight_global_scale": -1}


class PlainRows(Value):
    """Rows one after the other along a dimension."""

    dim: int = 0

    def shape(self, shape: tuple[int, ...], rows: int) -> list[int]:
        """Return the shape of a tensor with so many rows."""
        return [rows if dim == self.dim else size for dim, size in enumerate(shape)]

    def select(self, tensor: Tensor, rows: Tensor) -> Tensor:
        return tensor.index_select(self.dim, rows)


class PackedRows(Value):
    """Rows in words of 32 bits along a dimension; the i-th lowest bits of a word are of its row `order[i]`."""

    dim: int
    bits: int
    order: tuple[int, ...]

    def shape(self, shape: tuple[int, ...], rows: int) -> list[int]:
        return [-(-rows * self.bits // WORD) if dim == self.dim else size for dim, size in enumerate(shape)]

    def select(self, tensor: Tensor, rows: Tensor) -> Tensor:
        values, order = self.unpack(tensor, rows).movedim(0, -1), torch.tensor(self.order)
        values = torch.nn.functional.pad(values, (0, -len(rows) % len(order)))
        values = values.unflatten(-1, (-1, len(order)))[..., order]
        packed = torch.zeros(values.shape[:-1], dtype=tensor.dtype)
        for place in range(len(order)):
            packed |= values[..., place].to(tensor.dtype) << self.bits * place
        return packed.movedim(-1, self.dim).contiguous()

    def unpack(self, tensor: Tensor, rows: Tensor) -> Tensor:
        """Return these rows along the first dimension, each value in a byte."""
        words, order = tensor.movedim(self.dim, -1), torch.tensor(self.order)
        places = [((words >> self.bits * place) & 2**self.bits - 1).to(torch.uint8) for place in range(len(order))]
        return torch.stack(places, -1)[..., order.argsort()].flatten(-2).index_select(-1, rows).movedim(-1, 0)


class StatedRows(Value):
    """The number of rows, as the first of the two numbers of a tensor that states the shape [N, K]."""

    def shape(self, shape: tuple[int, ...], rows: int) -> list[int]:
        return list(shape)

    def select(self, tensor: Tensor, rows: Tensor) -> Tensor:
        return torch.cat([torch.tensor([len(rows)], dtype=tensor.dtype), tensor[1:]])


Rows = PlainRows | PackedRows | StatedRows  # where output rows are in a stored tensor


class QuantisedWeight(Value):
    """A weight [N, K] in the files, by its name as a plain weight; `rows` has the tensors that a cut changes."""

    name: str
    storage: str
    shape: tuple[int, int]
    rows: Mapping[str, Rows]
    block_scale: str | None = None  # the tensor with scales of blocks, where the weight cannot be cut as it is
    block: tuple[int, int] = (1, 1)  # the rows and inputs of a block
    parts: Mapping[str, str]  # its tensors, by role: "numbers", "scales", those of ROLES, or else by their names
    zero: int = 0  # what is to be added to zero points

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    def check_packing(self, rows: int) -> None:
        """Refuse a number of rows that does not fill the words of tensors without padding."""
        for name, each in self.rows.items():
            if isinstance(each, PackedRows) and each.dim == 1 and rows * each.bits % WORD:
                words = f"has {WORD // each.bits} rows in a word, and {rows} rows would remain"
                raise ModelError(f"{quoted(name)}: {self.storage} {words}; choose another key dim")

    def dequantised(self, read: Callable[[str], Tensor], rows: Tensor) -> Tensor:
        """Return rows of the weight in float32: (number - zero) * scale + offset. `read` reads a tensor by its name."""
        values = self._numbers(self._part("numbers", read, rows))
        values -= self._by_input("zeros", read, rows) + self.zero if "zeros" in self.parts else 0
        values *= self._by_input("scales", read, rows)
        if "offsets" in self.parts:
            values += self._by_input("offsets", read, rows)
        for part, power in FACTORS.items():
            values *= read(self.parts[part]).float().flatten() ** power if part in self.parts else 1
        return values

    def _part(self, part: str, read: Callable[[str], Tensor], rows: Tensor) -> Tensor:
        """Return what the files have for these rows along the first dimension, or for all of them."""
        name = self.parts[part]
        stored, each = read(name), self.rows.get(name, PlainRows() if name == self.name else None)
        if isinstance(each, PlainRows):
            return each.select(stored, rows).movedim(each.dim, 0)
        if isinstance(each, PackedRows):
            return each.unpack(stored, rows)
        return stored.index_select(0, rows // self.block[0]) if name == self.block_scale else stored

    def _numbers(self, stored: Tensor) -> Tensor:
        """Return numbers [rows, K] as floats; those in words are one after the other, from the lowest bits."""
        inputs, unit = self.shape[1], 8 * stored.element_size()
        if stored.shape[1] == inputs:
            return stored.float()
        bits, words = unit * stored.shape[1] // inputs, stored.long() & 2**unit - 1
        words |= torch.nn.functional.pad(words[:, 1:], (0, 1)) << unit  # a number may end in the next word
        first = bits * torch.arange(inputs)
        codes = (words[:, first // unit] >> first % unit) & 2**bits - 1
        if stored.dtype == torch.int32 or "offsets" in self.parts:
            return codes.float() - (0 if self.parts.keys() & {"zeros", "offsets"} else 2 ** (bits - 1))
        return FLOAT4[codes] if bits == 4 else codes.byte().view(torch.float8_e4m3fn).float()

    def _by_input(self, part: str, read: Callable[[str], Tensor], rows: Tensor) -> Tensor:
        """Return what belongs to rows and groups of inputs as floats, for every input where it is not for all."""
        each, inputs = self._part(part, read, rows), self.shape[1]
        groups = each.shape[1] if each.ndim == 2 else 1
        if part == "scales" and each.dtype == torch.uint8:  # NVFP4 has groups of 16, the other formats exponents
            each = each.view(torch.float8_e4m3fn if inputs == 16 * groups else torch.float8_e8m0fnu)
        if groups == 1:
            return each.float().reshape(-1, 1)
        group = torch.arange(inputs) // (self.block[1] if self.block_scale else inputs // groups)
        group = read(self.parts["groups"]).long() if "groups" in self.parts else group
        if not 0 <= int(group.min()) <= int(group.max()) < groups:
            raise ModelError(f"{quoted(self.parts['groups'])} must have groups from 0 to {groups - 1} ({self.storage})")
        return each.float()[:, group]


class Module(Value):
    """The tensors of one module of the model, by their names below it: "weight", "weight_scale"."""

    path: str
    tensors: Mapping[str, TensorInfo]

    @property
    def is_plain(self) -> bool:
        return self.tensors.keys() <= {"weight", "bias"} and all(info.dtype in FLOATS for info in self.tensors.values())

    def name(self, part: str) -> str:
        return f"{self.path}.{part}"


class Storage(Value):
    """One way in which a format stores a weight; all tensors by their names below the module."""

    name: str  # its name in messages: "GPTQ"
    weight: str = "weight"  # the tensor with the values
    dtypes: Dtypes  # its dtypes: ("I32",) for words
    bits: tuple[int, ...] = (8,)  # possible bits of a value
    dim: int = 0  # the dimension of output rows in all tensors
    order: tuple[int, ...] | None = None  # of rows in a word of the values; None if a word has one row, several inputs
    scales: Mapping[str, Dtypes]  # and their dtypes: for each row, each row and group of inputs, or all of the tensor
    optional: Mapping[str, Dtypes] = field(default_factory=dict)  # what has the shape of scales, and may be missing
    group: int | None = None  # inputs of a group, where there is no choice
    zeros: str | None = None  # zero points, with rows in words, where there are any
    stated: str | None = None  # a tensor that states [N, K]
    shared: tuple[str, ...] = ()  # what belongs to all rows, and may be missing

    def matches(self, module: Module) -> bool:
        info = module.tensors.get(self.weight)
        return info is not None and info.dtype in self.dtypes

    def read(self, module: Module, inputs: int, block: tuple[int, int] | None = None) -> QuantisedWeight:
        """Return the weight of a module; its tensors must be complete, of this format alone, and fit each other."""
        known = {self.weight, *self.scales, *self.optional, self.zeros, self.stated, *self.shared, "bias"}
        if others := sorted(module.tensors.keys() - known):
            raise ModelError(f"{quoted(module.name(others[0]))} does not belong to a weight in {self.name}")
        for part in (*self.scales, *filter(None, [self.stated, self.zeros if self.dim else None])):
            if part not in module.tensors:
                raise ModelError(f"{quoted(module.name(part))} is missing, which {self.name} needs")
        rows, bits = self._sizes(module, inputs)
        packed = PackedRows(dim=self.dim, bits=bits, order=self.order or tuple(range(WORD // bits)))
        values: Rows = PlainRows(dim=self.dim) if self.order is None else packed
        bias: dict[str, Rows] = {}
        if "bias" in module.tensors:
            self._check(module, "bias", FLOATS, (rows,))
            bias[module.name("bias")] = PlainRows()
        name, roles = module.name("weight"), self._roles(module, inputs)
        weight = QuantisedWeight(name=name, storage=self.name, shape=(rows, inputs), rows=bias, parts=roles)
        parts = {self.weight: values}
        height, width = block or (1, 1)
        blocks = -(-rows // height), -(-inputs // width)
        for part, dtypes in {**self.scales, **self.optional}.items():
            if part in self.scales and module.tensors[part].shape == blocks and blocks[0] < rows:
                if module.tensors[part].dtype not in (*FLOATS, "F8_E8M0"):
                    raise self._misfit(module, part, "scales of blocks in floats")
                return replace(weight, block=(height, width), block_scale=module.name(part))
            if part in module.tensors and (each := self._scale_rows(module, part, dtypes, weight.shape)):
                parts[part] = each
        if self.zeros in module.tensors and self.zeros is not None:
            self._check_zeros(module, packed, rows)
            parts[self.zeros] = packed
        if self.stated is not None:
            self._check(module, self.stated, ("I64", "I32"), (2,))
            parts[self.stated] = StatedRows()
        return replace(weight, rows={**bias, **{module.name(part): each for part, each in parts.items()}})

    def _roles(self, module: Module, inputs: int) -> dict[str, str]:
        """Return the tensors of a module by role."""
        roles = {part: ROLES.get(part.removeprefix("weight_"), part) for part in module.tensors}
        for part, role in roles.items():
            if role == "groups":
                self._check(module, part, ("I32", "I64"), (inputs,))
            if role in FACTORS and module.tensors[part].elements not in (1, inputs):
                raise self._misfit(module, part, f"one number, or {inputs}")
        roles |= {self.weight: "numbers", next(iter(self.scales)): "scales"}
        return {role: module.name(part) for part, role in roles.items()}

    def _sizes(self, module: Module, inputs: int) -> tuple[int, int]:
        """Return the output rows, and the bits of a value, from the shape of the values."""
        info = module.tensors[self.weight]
        if len(info.shape) == 2:
            along, across = info.shape[self.dim], info.shape[1 - self.dim]
            unit = 8 * DTYPES[info.dtype].itemsize
            if self.order is None:
                rows, (bits, rest) = along, divmod(across * unit, max(inputs, 1))
            else:  # words of rows: the scales have as many as there are
                scales = module.tensors[next(iter(self.scales))].shape
                rows = scales[-1] if scales else 0
                bits, rest = divmod(along * unit, max(rows, 1)) if across == inputs else (0, 0)
            if not rest and bits in self.bits:
                return rows, bits
        raise self._misfit(module, self.weight, f"the values of a weight with {inputs} inputs")

    def _scale_rows(self, module: Module, part: str, dtypes: Dtypes, shape: tuple[int, int]) -> Rows | None:
        """Return where the rows of a scale are; None if it is that of the whole tensor."""
        info, (rows, inputs) = module.tensors[part], shape
        if info.dtype not in dtypes:
            raise self._misfit(module, part, f"of {' or '.join(dtypes)}")
        if info.elements == 1 and self.group is None:
            return None
        dim = self.dim if len(info.shape) == 2 else 0
        groups = info.shape[1 - dim] if len(info.shape) == 2 else 1
        fits = groups == inputs // self.group if self.group else groups > 0 and inputs % groups == 0
        if len(info.shape) not in (1, 2) or info.shape[dim] != rows or not fits:
            raise self._misfit(module, part, f"scales of {rows} rows and {inputs} inputs")
        return PlainRows(dim=dim)

    def _check_zeros(self, module: Module, packed: PackedRows, rows: int) -> None:
        assert self.zeros is not None
        groups = module.tensors[next(iter(self.scales))].shape
        if WORD % packed.bits or (self.dim == 1 and rows * packed.bits % WORD):
            raise self._misfit(module, self.zeros, f"zero points of {rows} rows of {packed.bits} bits in whole words")
        self._check(module, self.zeros, ("I32",), tuple(packed.shape(groups, rows)))

    def _check(self, module: Module, part: str, dtypes: Dtypes, shape: tuple[int, ...]) -> None:
        info = module.tensors[part]
        if info.dtype not in dtypes or info.shape != shape:
            raise self._misfit(module, part, f"{list(shape)} of {' or '.join(dtypes)}")

    def _misfit(self, module: Module, part: str, expected: str) -> ModelError:
        info = module.tensors[part]
        shape = quoted(list(info.shape))
        return ModelError(
            f"{quoted(module.name(part))} is {shape} of {info.dtype}; {self.name} needs {expected} there:"
            " cut the unquantised model and quantise the result"
        )


class Format(Value):
    """A format of quantised checkpoints: the ways in which it stores a weight."""

    method: str  # the `quant_method` in the config: "gptq"
    storages: tuple[Storage, ...]  # how it stores weights; the first that matches a module counts
    # settings of the config with values that other layouts do not have: {"version": ("gemm",)}
    required: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unquantised: str | None = None  # the config's list of modules that are not quantised: "ignore"; None if it has none
    in_transformers: bool = True  # whether the stock class of transformers loads it

    def block(self, settings: Settings) -> tuple[int, int] | None:
        """Return the rows and inputs of a block with one scale, or None."""
        return None

    def bits(self, settings: Settings) -> int | None:
        """Return the bits of most weights, where the config says so."""
        bits = settings.get("bits")
        return bits if isinstance(bits, int) and bits in range(1, 9) else None

    def read(self, module: Module, inputs: int, settings: Settings) -> QuantisedWeight:
        """Return the weight of a module that is not plain."""
        for name, values in self.required.items():
            if name in settings and str(settings[name]).lower() not in values:
                raise ModelError(
                    f"{quoted(module.path)}: {self.method} with {name} {quoted(settings[name])} is not known;"
                    f" {name} must be {' or '.join(values)}"
                )
        for storage in self.storages:
            if storage.matches(module):
                return storage.read(module, inputs, self.block(settings))
        part = next((name for name in ("weight", "weight_packed", "qweight") if name in module.tensors), None)
        part = min(module.tensors) if part is None else part
        raise ModelError(
            f"{quoted(module.name(part))} of {module.tensors[part].dtype} is not known to the format {self.method}:"
            " cut the unquantised model and quantise the result"
        )

    def values(self, module: Module, settings: Settings) -> int:
        """Return the number of weights that the tensors of a module store."""
        storage = next((each for each in self.storages if each.matches(module)), None)
        if storage is None:
            return sum(info.elements for info in module.tensors.values())
        info = module.tensors[storage.weight]
        bits = storage.bits[0] if len(storage.bits) == 1 else self.bits(settings) or storage.bits[0]
        bias = module.tensors["bias"].elements if "bias" in module.tensors else 0
        return info.elements * 8 * DTYPES[info.dtype].itemsize // bits + bias
