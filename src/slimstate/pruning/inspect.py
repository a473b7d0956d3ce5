"""What a model is and what cutting it would save, from its config and tensor headers alone, or from its config."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike

from slimstate.checkpoints.reader import Checkpoint, cut_in, described_mixers, open_headers, read_config
from slimstate.core.layout import Mixer
from slimstate.families import Family, family_of
from slimstate.families.contract import Config
from slimstate.models.prepare import has_library
from slimstate.models.stock import stock_model
from slimstate.pruning.budget import Budget, key_dims_worth_choosing, state_bytes
from slimstate.records.cut import FittingKeyDim, InspectionRecord, KeyDimOption, Serving
from slimstate.records.parts import Cut
from slimstate.records.schema import read
from slimstate.serving import engines
from slimstate.serving.widths import speeds_below
from slimstate.system.errors import PlanError
from slimstate.system.paths import expand_home

USUAL_CONTEXT = 32_768  # tokens of a sequence, where softmax layers keep them
KV_BYTES = 2  # of a number in bf16


def parameters_after(checkpoint: Checkpoint, key_dim: int) -> int:
    lost = 0
    for mixer in checkpoint.mixers:
        for slot in mixer.axis.slots:
            info = checkpoint.tensors[mixer.name_of(slot)]
            row = info.elements // slot.rows_in(info.shape)
            lost += row * slot.copies * mixer.axis.heads * (mixer.axis.width - key_dim)
    return checkpoint.parameters - lost


def inspect(
    model: str | PathLike[str], *, budget: Budget | None = None, context: int | None = None, engine: str | None = None
) -> InspectionRecord:
    """The shape of a model and its state, the key dims worth choosing, and the one that fits a budget.

    `model` may be the file of a config alone. KV caches of softmax layers are counted at `context` tokens.
    With an `engine`, what is known of that one, and which key dims are safe and fast there.
    """
    if context is not None and context < 0:
        raise PlanError(f"`context` {context}: it is a number of tokens, 0 or more")
    path = expand_home(model)
    if path.is_file() and path.suffix == ".json":
        config = read_config(path)
        return _inspection(
            str(model),
            config,
            described_mixers(config),
            budget,
            context,
            engine,
            lambda key_dim: _counted(config, key_dim),
        )
    checkpoint = open_headers(model)
    return _inspection(
        checkpoint.source, checkpoint.config, checkpoint.mixers, budget, context, engine,
        lambda key_dim: parameters_after(checkpoint, key_dim),
    )  # fmt: skip


def _counted(config: Config, key_dim: int) -> int | None:
    """The parameters that the stock class would have; None where its library is not installed."""
    family = family_of(config)
    if not has_library(family.library):
        return None
    model = stock_model(family.resize(config, key_dim))
    return sum(parameter.numel() for parameter in model.parameters())


def _inspection(
    source: str,
    config: Config,
    mixers: tuple[Mixer, ...],
    budget: Budget | None,
    context: int | None,
    engine: str | None,
    parameters: Callable[[int], int | None],
) -> InspectionRecord:
    first, family, cut = mixers[0], family_of(config), cut_in(config)
    width, softmax = first.axis.width, family.softmax_layers(config)
    tokens = context if context is not None else USUAL_CONTEXT if softmax else 0
    kept = _kv_bytes(family, config, tokens)

    def memory(key_dim: int) -> int:
        return state_bytes(mixers, key_dim)["fp32"] + (kept or 0)

    return InspectionRecord(
        model=source,
        model_type=family.model_type,
        mixers=len(mixers),
        softmax_layers=len(softmax),
        heads=first.axis.heads,
        value_heads=first.value_heads,
        key_dim=width,
        value_dim=first.value_dim,
        parameters=parameters(width),
        state_bytes=state_bytes(mixers, width),
        context=tokens,
        kv_bytes=kept,
        already_cut=None if cut is None else read(Cut, cut),
        serving=_serving(config, width, engine),
        speed=speeds_below(family.model_type, first),
        budget=None if budget is None else _fitting(budget, mixers),
        options=tuple(
            KeyDimOption(
                key_dim=key_dim,
                compression=1 - key_dim / width,
                state_bytes=state_bytes(mixers, key_dim),
                parameters=parameters(key_dim),
                sequences=memory(width) / memory(key_dim),
            )
            for key_dim in key_dims_worth_choosing(width)
        ),
    )


def _serving(config: Config, width: int, engine: str | None) -> Serving:
    rules = tuple(vars(rule) for rule in engines.rules_of(family_of(config).model_type, engine))
    if engine is None:
        return Serving(date=engines.date(), rules=rules)
    found = engines.key_dims_for(engine, config, key_dims_worth_choosing(width))
    return Serving(
        date=engines.date(), rules=rules, engine=engine, safe=found.safe, fast=found.fast,
        advice=found.describe(engine),
    )  # fmt: skip


def _kv_bytes(family: Family, config: Config, tokens: int) -> int | None:
    numbers = family.cached_per_token(config)
    return None if numbers is None else numbers * tokens * KV_BYTES


def _fitting(budget: Budget, mixers: tuple[Mixer, ...]) -> FittingKeyDim:
    key_dim, line = budget.choose(mixers)
    return FittingKeyDim(bytes=budget.bytes, dtype=budget.state_dtype, key_dim=key_dim, why=line)
