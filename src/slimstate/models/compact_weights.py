"""Weights that are stored in half precision, as in their files, and are float32 for every computation.

Every value of bfloat16 or float16 is one of float32, too: results are those of a float32 copy, in half its memory.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

EXPERTS_AT_ONCE = 4  # in float32 at the same time
ATEN = torch.ops.aten
VIEWS = {ATEN.alias.default, ATEN.detach.default, ATEN.select.int, ATEN.t.default, ATEN.transpose.int}


class CompactWeight(Tensor):
    """A frozen weight such as that of all experts [experts, rows, columns].

    Its views are compact, too. The grouped product of experts is computed a few experts at a time, also in its backward
    pass, because autograd saves the compact weight. Any other operation gets a float32 copy while it runs.
    """

    stored: Tensor

    @staticmethod
    def __new__(cls, stored: Tensor) -> "CompactWeight":
        weight: CompactWeight = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, stored.shape, strides=stored.stride(), dtype=torch.float32, device=stored.device
        )
        weight.stored = stored
        return weight

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in VIEWS:
            return cls(func(args[0].stored, *args[1:], **options))
        if func is ATEN._grouped_mm.default and len(args) == 3 and not options:
            rows, weight, ends = args
            if isinstance(weight, cls) and not isinstance(rows, cls) and rows.dim() == 2:
                return _grouped_product(rows, weight.stored, ends)
        args, options = tree_map_only(cls, lambda weight: weight.stored.float(), (args, options))
        return func(*args, **options)


def _grouped_product(rows: Tensor, stored: Tensor, ends: Tensor) -> Tensor:
    """Return the rows up to the first end times the first weight, those up to the second times the second, ..."""
    product, start = rows.new_zeros(len(rows), stored.shape[-1]), 0
    for weights, stops in zip(stored.split(EXPERTS_AT_ONCE), ends.split(EXPERTS_AT_ONCE), strict=True):
        end = int(stops[-1])
        product[start:end] = ATEN._grouped_mm(rows[start:end], weights.float(), stops - start)
        start = end
    return product
