"""What one mixer keeps: channels (`Selection`) or directions (`Basis`) of every head.

H heads, D channels, K of them to keep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TypeAlias

import torch
from torch import Tensor

from slimstate.core.layout import Axis
from slimstate.system.errors import PlanError
from slimstate.system.value import Value

MAX_ORTHOGONALITY_ERROR = 1e-4  # of T T' from the identity
Certificate: TypeAlias = Mapping[str, Sequence[float | None]]  # a number for each head, by the name of the claim


class Selection(Value):
    """The channels to keep: `keep` [H, K], ascending."""

    keep: Tensor
    certificate: Certificate = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.keep.ndim != 2 or self.keep.dtype != torch.long:
            shape, dtype = list(self.keep.shape), self.keep.dtype
            raise ValueError(f"keep must be [heads, key dim] of int64, not {shape} of {dtype}")
        if self.keep.numel() == 0 or bool((self.keep < 0).any()) or bool((self.keep.diff(dim=1) <= 0).any()):
            raise ValueError("keep must be non-empty, non-negative and ascending in every head")

    @property
    def heads(self) -> int:
        return self.keep.shape[0]

    @property
    def key_dim(self) -> int:
        return self.keep.shape[1]

    def check(self, axis: Axis) -> None:
        """Raise an error unless the selection fits the axis."""
        largest = int(self.keep.max())
        if self.heads != axis.heads or self.key_dim > axis.width or largest >= axis.width:
            raise PlanError(
                f"a selection of {self.heads} x {self.key_dim} channels up to {largest} "
                f"does not fit {axis.heads} heads of {axis.width}"
            )


class Basis(Value):
    """The directions to keep: `rows` [H, K, D] in float32, orthonormal in every head.

    Channels become `rows @ channels`, queries and keys alike. A selection is the special case whose rows are axes.
    """

    rows: Tensor
    certificate: Certificate = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rows.ndim != 3 or self.rows.dtype != torch.float32 or self.rows.numel() == 0:
            shape, dtype = list(self.rows.shape), self.rows.dtype
            raise ValueError(f"a basis must be [heads, key dim, width] of float32, not {shape} of {dtype}")
        wide = self.rows.double()
        identity = torch.eye(wide.shape[1], dtype=wide.dtype, device=wide.device)
        error = float((wide @ wide.mT - identity).abs().max())
        if not error <= MAX_ORTHOGONALITY_ERROR:
            raise ValueError(f"a basis must be semi-orthogonal; its rows are {error:.2g} away from being orthonormal")

    @property
    def heads(self) -> int:
        return self.rows.shape[0]

    @property
    def key_dim(self) -> int:
        return self.rows.shape[1]

    def check(self, axis: Axis) -> None:
        """Raise an error unless the basis fits the axis."""
        width = self.rows.shape[2]
        if self.heads != axis.heads or width != axis.width or self.key_dim > width:
            raise PlanError(
                f"a basis of {self.heads} x {self.key_dim} directions of {width} channels "
                f"does not fit {axis.heads} heads of {axis.width}"
            )


Choice: TypeAlias = Selection | Basis
