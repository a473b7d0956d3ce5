"""What a model is and what cutting it would save, from its config and tensor headers alone."""

from __future__ import annotations

from os import PathLike

from slimstate.checkpoints.reader import Checkpoint, open_headers
from slimstate.pruning.budget import Budget, key_dims_worth_choosing, state_bytes
from slimstate.records.cut import FittingKeyDim, InspectionRecord, KeyDimOption, Serving
from slimstate.records.parts import Cut
from slimstate.records.schema import read
from slimstate.serving import engines
from slimstate.serving.widths import speeds_below


def parameters_after(checkpoint: Checkpoint, key_dim: int) -> int:
    lost = 0
    for mixer in checkpoint.mixers:
        for slot in mixer.axis.slots:
            info = checkpoint.tensors[mixer.name_of(slot)]
            row = info.elements // slot.rows_in(info.shape)
            lost += row * slot.copies * mixer.axis.heads * (mixer.axis.width - key_dim)
    return checkpoint.parameters - lost


def inspect(model: str | PathLike[str], *, budget: Budget | None = None, engine: str | None = None) -> InspectionRecord:
    """The shape of a model and its state, the key dims worth choosing, and the one that fits a budget.

    With an `engine`, what is known of that one, and which key dims are safe and fast there.
    """
    checkpoint = open_headers(model)
    mixers = checkpoint.mixers
    first, model_type = mixers[0], checkpoint.family.model_type
    return InspectionRecord(
        model=checkpoint.source,
        model_type=model_type,
        mixers=len(mixers),
        softmax_layers=len(checkpoint.family.softmax_layers(checkpoint.config)),
        heads=first.axis.heads,
        value_heads=first.value_heads,
        key_dim=first.axis.width,
        value_dim=first.value_dim,
        parameters=checkpoint.parameters,
        state_bytes=state_bytes(mixers, first.axis.width),
        already_cut=None if checkpoint.cut is None else read(Cut, checkpoint.cut),
        serving=_serving(checkpoint, engine),
        speed=speeds_below(model_type, first.axis.width),
        budget=None if budget is None else _fitting(budget, checkpoint),
        options=tuple(
            KeyDimOption(
                key_dim=key_dim,
                compression=1 - key_dim / first.axis.width,
                state_bytes=state_bytes(mixers, key_dim),
                parameters=parameters_after(checkpoint, key_dim),
            )
            for key_dim in key_dims_worth_choosing(first.axis.width)
        ),
    )


def _serving(checkpoint: Checkpoint, engine: str | None) -> Serving:
    model_type, width = checkpoint.family.model_type, checkpoint.mixers[0].axis.width
    rules = tuple(vars(rule) for rule in engines.rules_of(model_type, engine))
    if engine is None:
        return Serving(date=engines.date(), rules=rules)
    found = engines.key_dims_for(engine, checkpoint.config, key_dims_worth_choosing(width))
    return Serving(
        date=engines.date(), rules=rules, engine=engine, safe=found.safe, fast=found.fast,
        advice=found.describe(engine),
    )  # fmt: skip


def _fitting(budget: Budget, checkpoint: Checkpoint) -> FittingKeyDim:
    key_dim, line = budget.choose(checkpoint.mixers)
    return FittingKeyDim(bytes=budget.bytes, dtype=budget.state_dtype, key_dim=key_dim, why=line)
