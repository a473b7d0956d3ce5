"""What a model is and what cutting it would save, from its config and tensor headers alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimstate.axes import Mixer
from slimstate.checkpoint import Checkpoint, open_headers

BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, kw_only=True)
class Option:
    """A key dim worth choosing, and what the model is then."""

    key_dim: int
    compression: float
    state_bytes: dict[str, int]
    parameters: int


def state_bytes(mixers: tuple[Mixer, ...], key_dim: int) -> dict[str, int]:
    """Bytes of recurrent state per sequence."""
    elements = sum(mixer.state_elements // mixer.axis.width * key_dim for mixer in mixers)
    return {name: elements * size for name, size in BYTES.items()}


def parameters_after(checkpoint: Checkpoint, key_dim: int) -> int:
    lost = 0
    for mixer in checkpoint.mixers:
        for slot in mixer.axis.slots:
            info = checkpoint.tensors[mixer.name_of(slot)]
            row = info.elements // info.shape[slot.dim]
            lost += row * slot.copies * mixer.axis.heads * (mixer.axis.width - key_dim)
    return checkpoint.parameters - lost


def key_dims_worth_choosing(width: int) -> list[int]:
    """Multiples of 16 below the width; of a narrow head, its halves."""
    if width > 16:
        return list(range((width - 1) // 16 * 16, 0, -16))
    return [width >> shift for shift in range(1, width.bit_length()) if width >> shift]


def inspect(model: str | Path) -> dict[str, Any]:
    """The shape of a model and its state, and the key dims worth choosing."""
    checkpoint = open_headers(str(model))
    mixers = checkpoint.mixers
    first = mixers[0]
    options = [
        Option(
            key_dim=key_dim,
            compression=1 - key_dim / first.axis.width,
            state_bytes=state_bytes(mixers, key_dim),
            parameters=parameters_after(checkpoint, key_dim),
        )
        for key_dim in key_dims_worth_choosing(first.axis.width)
    ]
    return {
        "model": checkpoint.source,
        "model_type": checkpoint.family.model_type,
        "mixers": len(mixers),
        "softmax_layers": len(checkpoint.family.softmax_layers(checkpoint.config)),
        "heads": first.axis.heads,
        "value_heads": first.value_heads,
        "key_dim": first.axis.width,
        "value_dim": first.value_dim,
        "parameters": checkpoint.parameters,
        "state_bytes": state_bytes(mixers, first.axis.width),
        "already_cut": checkpoint.cut,
        "options": [vars(option) for option in options],
    }
