"""Describe a model and what cutting it would save, from its config and tensor headers, or from its config alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike

from slimstate.checkpoints.reader import cut_in, described_mixers, open_headers, read_config
from slimstate.core.layout import Mixer
from slimstate.families import family_of
from slimstate.families.contract import Config
from slimstate.models.prepare import has_library
from slimstate.models.stock import stock_model
from slimstate.pruning.budget import fit_budget, key_dims_worth_choosing, state_bytes
from slimstate.pruning.cut import parameters_after
from slimstate.pruning.options import Budget
from slimstate.records.cut import BudgetChoice, InspectionRecord, KeyDimOption, Serving
from slimstate.records.parts import Cut
from slimstate.records.schema import from_json
from slimstate.records.serving import LayerSpeed
from slimstate.system.input_files import expand_home

DEFAULT_CONTEXT = 32_768  # tokens per sequence, where softmax layers store them
KV_BYTES = 2  # of a number in bf16


@dataclass(frozen=True, kw_only=True)
class Headers:
    """What can be known of a model without its weights; `parameters` counts them at a key dim."""

    source: str
    config: Config
    mixers: tuple[Mixer, ...]
    parameters: Callable[[int], int | None]

    @property
    def width(self) -> int:
        return self.mixers[0].axis.width


def read_headers(model: str | PathLike[str]) -> Headers:
    """Read the config and tensor headers of a model, or a config.json alone."""
    path = expand_home(model)
    if path.is_file() and path.suffix == ".json":
        config = read_config(path)
        mixers = described_mixers(config)
        return Headers(source=str(model), config=config, mixers=mixers, parameters=lambda dim: _count(config, dim))
    checkpoint = open_headers(model)
    return Headers(
        source=checkpoint.source, config=checkpoint.config, mixers=checkpoint.mixers,
        parameters=lambda key_dim: parameters_after(checkpoint, key_dim),
    )  # fmt: skip


def _count(config: Config, key_dim: int) -> int | None:
    """Return the number of parameters of the stock class, or None where its library is not installed."""
    family = family_of(config)
    if not has_library(family.library):
        return None
    model = stock_model(family.resize(config, key_dim))
    return sum(parameter.numel() for parameter in model.parameters())


def describe_model(
    headers: Headers, *, budget: Budget, context: int | None, serving: Serving, speed: LayerSpeed | None
) -> InspectionRecord:
    """Return the shape of a model and of its state, the key dims worth choosing, and the one that fits a budget.

    KV caches of softmax layers are counted at `context` tokens.
    """
    config, mixers, width = headers.config, headers.mixers, headers.width
    first, family, cut = mixers[0], family_of(config), cut_in(config)
    softmax, numbers = family.softmax_layers(config), family.cached_per_token(config)
    tokens = context if context is not None else DEFAULT_CONTEXT if softmax else 0
    kv_bytes = None if numbers is None else numbers * tokens * KV_BYTES

    def memory(key_dim: int) -> int:
        return state_bytes(mixers, key_dim)["fp32"] + (kv_bytes or 0)

    return InspectionRecord(
        model=headers.source,
        model_type=family.model_type,
        mixers=len(mixers),
        softmax_layers=len(softmax),
        heads=first.axis.heads,
        value_heads=first.value_heads,
        key_dim=width,
        value_dim=first.value_dim,
        parameters=headers.parameters(width),
        state_bytes=state_bytes(mixers, width),
        context=tokens,
        kv_bytes=kv_bytes,
        already_cut=None if cut is None else from_json(Cut, cut),
        serving=serving,
        speed=speed,
        budget=_fit(budget, mixers) if budget.is_set else None,
        options=tuple(
            KeyDimOption(
                key_dim=key_dim,
                compression=1 - key_dim / width,
                state_bytes=state_bytes(mixers, key_dim),
                parameters=headers.parameters(key_dim),
                sequences=memory(width) / memory(key_dim),
            )
            for key_dim in key_dims_worth_choosing(width)
        ),
    )


def _fit(budget: Budget, mixers: tuple[Mixer, ...]) -> BudgetChoice:
    key_dim, line = fit_budget(budget, mixers)
    return BudgetChoice(bytes=budget.bytes, dtype=budget.dtype, key_dim=key_dim, why=line)
