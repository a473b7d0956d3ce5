"""The change that a cut makes to the tensors in the files: plain weights by the cutter, quantised ones part by part."""

from collections.abc import Iterable

import torch
from torch import Tensor

from slimstate.checkpoints.formats.contract import PlainRows, QuantisedWeight, StatedRows
from slimstate.checkpoints.reader import Checkpoint
from slimstate.checkpoints.safetensors_io import SameShapes
from slimstate.core.surgery import Cutter
from slimstate.system.errors import ModelError, PlanError, quoted

PLAIN_DTYPE = "BF16"  # of a weight whose scales cannot be cut


class TensorCut:
    """A cut of the tensors in the files; rows of quantised weights are those that the cutter keeps of the plain one."""

    def __init__(self, checkpoint: Checkpoint, cutter: Cutter) -> None:
        self._cutter, self._checkpoint = cutter, checkpoint
        self._weights: dict[str, QuantisedWeight] = {}  # by the names of the tensors in the files
        self._removed: set[str] = set()
        self._check_values()
        for weight in checkpoint.quantised.values():
            if cutter.changes_values(weight.name):
                raise PlanError(
                    f"{quoted(weight.name)} is quantised ({weight.storage}), and a cut that rotates channels, scales"
                    " queries or makes heads from others needs other values: cut the unquantised model and"
                    " quantise the result"
                )
            weight.check_packing(len(self._remaining(weight)))
            self._weights |= dict.fromkeys([*weight.rows, *([weight.name] if weight.block_scale else ())], weight)
            if weight.block_scale is not None:
                module = checkpoint.modules[weight.module]
                self._removed.update(set(map(module.name, module.tensors)) - {weight.name, *weight.rows})

    def _check_values(self) -> None:
        """Refuse a cut of values of a quantised output projection, or of other weights that only such a cut changes."""
        for mixer in self._checkpoint.mixers:
            for slot in () if mixer.value_axis is None else mixer.value_axis.slots:
                name = mixer.name_of(slot)
                module = self._checkpoint.modules.get(name.removesuffix(".weight"))
                is_quantised = name.endswith(".weight") and module is not None and not module.is_plain
                if self._cutter.touches(name) and is_quantised and (slot.dim or name not in self._checkpoint.quantised):
                    raise PlanError(
                        f"{quoted(name)} is quantised, and a cut of values takes columns of the output projection,"
                        " which share scales: cut the unquantised model and quantise the result"
                    )

    def _becomes_plain(self, name: str) -> bool:
        weight = self._weights.get(name)
        return weight is not None and weight.block_scale is not None and name == weight.name

    def _remaining(self, weight: QuantisedWeight) -> Tensor:
        name, rows = weight.name, weight.shape[0]
        return self._cutter.remaining_rows(name, rows) if self._cutter.touches(name) else torch.arange(rows)

    def touches(self, name: str) -> bool:
        return name in self._weights or name in self._removed or self._cutter.touches(name)

    def shape(self, name: str, shape: Iterable[int]) -> list[int]:
        if name not in self._weights:
            return self._cutter.shape(name, shape)
        rows = len(self._remaining(weight := self._weights[name]))
        return [rows, weight.shape[1]] if self._becomes_plain(name) else weight.rows[name].shape(tuple(shape), rows)

    def dtype(self, name: str, dtype: str) -> str | None:
        after = PLAIN_DTYPE if self._becomes_plain(name) else dtype
        return None if name in self._removed else after

    def apply(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self._weights:
            return self._cutter.apply(name, tensor)
        weight = self._weights[name]
        rows = self._remaining(weight)
        if self._becomes_plain(name):
            read = self._checkpoint.read
            return weight.dequantised(lambda part: tensor if part == name else read(part), rows).to(torch.bfloat16)
        if isinstance(weight.rows[name], StatedRows) and tensor.tolist() != list(weight.shape):
            stated = quoted(tensor.tolist())
            raise ModelError(f"{quoted(name)} says {stated}; {weight.storage} has a weight {list(weight.shape)}")
        return weight.rows[name].select(tensor, rows)


class TensorMask(SameShapes):
    """The uncut model without the channels that a cut drops: their rows are zero, in plain and in quantised weights.

    Rows of zero bytes are zero in every format: as values, or because their scales and offsets are.
    """

    def __init__(self, checkpoint: Checkpoint, cutter: Cutter) -> None:
        self._cutter, self._rows = cutter, dict[str, tuple[str, int, int]]()  # the plain name, the dimension, the rows
        for mixer in checkpoint.mixers:
            for slot in mixer.axis.slots:
                name = mixer.name_of(slot)
                weight, rows = checkpoint.quantised.get(name), slot.rows_in(checkpoint.shapes[name])
                if weight is None or weight.block_scale is not None:
                    self._rows[name] = (name, slot.dim, rows)
                else:
                    plain = {part: each for part, each in weight.rows.items() if isinstance(each, PlainRows)}
                    self._rows |= {part: (name, each.dim, rows) for part, each in plain.items()}

    def touches(self, name: str) -> bool:
        return name in self._rows or self._cutter.rearranges(name)

    def apply(self, name: str, tensor: Tensor) -> Tensor:
        tensor = self._cutter.rearrange(name, tensor)
        if name not in self._rows:
            return tensor
        plain, dim, rows = self._rows[name]
        dropped = torch.ones(rows, dtype=torch.bool)
        dropped[self._cutter.remaining_rows(plain, rows)] = False
        by_head = tensor.shape[dim] != rows
        first = tensor.flatten(0, 1) if by_head else tensor.movedim(dim, 0)
        masked = first.clone(memory_format=torch.contiguous_format)
        masked.view(rows, -1).view(torch.uint8)[dropped] = 0  # also of dtypes that cannot be indexed
        return masked.view(tensor.shape) if by_head else masked.movedim(0, dim).contiguous()
