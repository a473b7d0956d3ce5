"""What a model is and what cutting it would save, from its config and tensor headers alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimstate.checkpoints.reader import Checkpoint, open_headers
from slimstate.pruning.budget import Budget, key_dims_worth_choosing, state_bytes
from slimstate.records.schema import written
from slimstate.serving import engines
from slimstate.serving.widths import speeds_below


@dataclass(frozen=True, kw_only=True)
class Option:
    """A key dim worth choosing, and what the model is then."""

    key_dim: int
    compression: float
    state_bytes: dict[str, int]
    parameters: int


def parameters_after(checkpoint: Checkpoint, key_dim: int) -> int:
    lost = 0
    for mixer in checkpoint.mixers:
        for slot in mixer.axis.slots:
            info = checkpoint.tensors[mixer.name_of(slot)]
            row = info.elements // slot.rows_in(info.shape)
            lost += row * slot.copies * mixer.axis.heads * (mixer.axis.width - key_dim)
    return checkpoint.parameters - lost


def inspect(
    model: str | Path,
    *,
    state_mb: float | None = None,
    sequences: int | None = None,
    memory_gb: float | None = None,
    state_dtype: str = "fp32",
) -> dict[str, Any]:
    """The shape of a model and its state, the key dims worth choosing, and the one that fits a budget."""
    budget = Budget.of(state_mb, sequences, memory_gb, state_dtype)
    checkpoint = open_headers(str(model))
    mixers = checkpoint.mixers
    first, model_type = mixers[0], checkpoint.family.model_type
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
        "model_type": model_type,
        "mixers": len(mixers),
        "softmax_layers": len(checkpoint.family.softmax_layers(checkpoint.config)),
        "heads": first.axis.heads,
        "value_heads": first.value_heads,
        "key_dim": first.axis.width,
        "value_dim": first.value_dim,
        "parameters": checkpoint.parameters,
        "state_bytes": state_bytes(mixers, first.axis.width),
        "already_cut": checkpoint.cut,
        "serving": {"date": engines.date(), "rules": [vars(rule) for rule in engines.rules_of(model_type)]},
        "speed": written(speeds_below(model_type, first.axis.width)),
        "budget": None if budget is None else _fitting(budget, checkpoint),
        "options": [vars(option) for option in options],
    }


def _fitting(budget: Budget, checkpoint: Checkpoint) -> dict[str, Any]:
    key_dim, line = budget.choose(checkpoint.mixers)
    return {"bytes": budget.bytes, "dtype": budget.dtype, "key_dim": key_dim, "why": line}
