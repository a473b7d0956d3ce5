"""Weights that rest in the dtype of their files, and are float32 to all who compute with them.

Every value of bfloat16 or float16 is one of float32, too: results are those of a copy in float32, in half of
its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

AT_ONCE = 4  # experts that are in float32 at the same time
VIEWS = {
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.select.int,
    torch.ops.aten.t.default,
    torch.ops.aten.transpose.int,
}
GROUPED = getattr(torch.ops.aten, "_grouped_mm", None)  # of newer versions of PyTorch


class Resting(Tensor):
    """A frozen weight such as that of all experts [experts, rows, columns].

    Views of it rest, too. The grouped product of experts is made a few of them at a time, in its backward pass as well:
    autograd keeps the weight as it rests. Whatever else is done with it has a copy in float32 for as long as it takes.
    """

    _kept: Tensor

    @staticmethod
    def __new__(cls, kept: Tensor) -> Resting:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, kept.shape, strides=kept.stride(), dtype=torch.float32, device=kept.device
        )
        made._kept = kept
        found: Resting = made
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in VIEWS:
            return cls(func(args[0]._kept, *args[1:], **options))
        if GROUPED is not None and func is GROUPED.default and len(args) == 3 and not options:
            rows, weight, ends = args
            if isinstance(weight, cls) and not isinstance(rows, cls) and rows.dim() == 2:
                return _grouped(rows, weight._kept, ends)
        args, options = tree_map_only(cls, lambda weight: weight._kept.float(), (args, options))
        return func(*args, **options)


def _grouped(rows: Tensor, kept: Tensor, ends: Tensor) -> Tensor:
    """The rows up to the first end times the first weight, those up to the second times the second, and so on."""
    assert GROUPED is not None
    made, start = rows.new_zeros(len(rows), kept.shape[-1]), 0
    for few, until in zip(kept.split(AT_ONCE), ends.split(AT_ONCE), strict=True):
        end = int(until[-1])
        made[start:end] = GROUPED(rows[start:end], few.float(), until - start)
        start = end
    return made
