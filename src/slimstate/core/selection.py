"""What one mixer keeps: channels (`Selection`) or directions (`Basis`) of every head, and channels of its values.

H heads, D channels, K of them to keep.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field

import torch
from torch import Tensor

from slimstate.core.layout import Axis, Mixer
from slimstate.system.errors import PlanError
from slimstate.system.value import Value

MAX_ORTHOGONALITY_ERROR = 1e-4  # of T T' from the identity
Certificate = Mapping[str, Sequence[float | None]]  # a number for each head, by the name of the claim


class LayerChoice(Value):
    """What a choice of keys and queries has in common: its certificate, and the value channels that stay with it.

    `values` [value heads, V'], ascending; None keeps all of them. `origins` [H] is the uncut head that each head is
    made from; None if each is made from its own.
    """

    certificate: Certificate = field(default_factory=dict)
    values: Tensor | None = None
    origins: Tensor | None = None

    def __post_init__(self) -> None:
        if self.values is not None:
            _check_channels("values", self.values)
        origins = self.origins
        if origins is not None and (origins.ndim != 1 or origins.dtype != torch.long):
            raise ValueError(f"origins must be [heads] of int64, not {list(origins.shape)} of {origins.dtype}")

    @property
    def value_dim(self) -> int | None:
        return None if self.values is None else self.values.shape[1]

    def check_values(self, mixer: Mixer) -> None:
        """Raise an error unless the value channels fit the mixer."""
        if self.values is None:
            return
        if mixer.value_axis is None:
            raise PlanError(f"layer {mixer.layer}: the values of this architecture cannot be cut")
        _check_fit("value channels", self.values, mixer.value_axis)

    def check_origins(self, mixer: Mixer) -> None:
        """Raise an error unless heads can be made from others, and from these."""
        if self.origins is None:
            return
        if mixer.scalars is None:
            raise PlanError(f"layer {mixer.layer}: heads of this architecture cannot be made from others")
        count, origins = mixer.axis.heads, self.origins.tolist()
        if len(origins) != count or not set(origins) <= set(range(count)):
            raise PlanError(f"layer {mixer.layer}: {origins} must be {count} heads of 0 to {count - 1}")


def _check_channels(name: str, channels: Tensor) -> None:
    if channels.ndim != 2 or channels.dtype != torch.long:
        raise ValueError(f"{name} must be [heads, channels] of int64, not {list(channels.shape)} of {channels.dtype}")
    if channels.numel() == 0 or bool((channels < 0).any()) or bool((channels.diff(dim=1) <= 0).any()):
        raise ValueError(f"{name} must be non-empty, non-negative and ascending in every head")


def _check_fit(kind: str, channels: Tensor, axis: Axis) -> None:
    (heads, count), largest = channels.shape, int(channels.max())
    if heads != axis.heads or count > axis.width or largest >= axis.width:
        selection = f"a selection of {heads} x {count} {kind} up to {largest}"
        raise PlanError(f"{selection} does not fit {axis.heads} heads of {axis.width}")


class Selection(LayerChoice):
    """The channels to keep: `keep` [H, K], ascending."""

    keep: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_channels("keep", self.keep)

    @property
    def heads(self) -> int:
        return self.keep.shape[0]

    @property
    def key_dim(self) -> int:
        return self.keep.shape[1]

    def check(self, axis: Axis) -> None:
        """Raise an error unless the selection fits the axis."""
        _check_fit("channels", self.keep, axis)


class Basis(LayerChoice):
    """The directions to keep: `rows` [H, K, D] in float32, orthonormal in every head.

    Channels become `rows @ channels`, queries and keys alike. A selection is the special case whose rows are axes.
    """

    rows: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
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


Choice = Selection | Basis
