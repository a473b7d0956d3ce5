"""How much a model and its recurrent state take, how many channels to keep, and what that would save.

All of it follows from the config and tensor headers of a model, or from its config alone. Only the state itself is
counted, per sequence; the last inputs that convolutions store are about a fiftieth of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from os import PathLike

from slimstate.checkpoints.reader import Checkpoint, cut_in, described_mixers, open_headers, read_config
from slimstate.core.layout import Mixer
from slimstate.core.surgery import outline
from slimstate.families import family_of
from slimstate.families.contract import Config
from slimstate.models.prepare import has_library
from slimstate.models.stock import stock_model
from slimstate.pruning.options import MIB, STATE_BYTES, Budget
from slimstate.records.cut import BudgetChoice, InspectionRecord, KeyDimOption, Serving
from slimstate.records.parts import Cut
from slimstate.records.schema import from_json
from slimstate.records.serving import LayerSpeed
from slimstate.system.errors import PlanError
from slimstate.system.input_files import expand_home

ALIGNMENT = 16
DEFAULT_CONTEXT = 32_768  # tokens per sequence, where softmax layers store them
KV_BYTES = 2  # of a number in bf16


def state_bytes(mixers: tuple[Mixer, ...], key_dim: int, value_dim: int | None = None) -> dict[str, int]:
    """Return the bytes of recurrent state per sequence, by data type."""
    elements = sum(mixer.state_elements(key_dim, value_dim) for mixer in mixers)
    return {name: elements * size for name, size in STATE_BYTES.items()}


def key_dims_worth_choosing(width: int) -> list[int]:
    """Return the multiples of 16 below the width; for a narrow head, its halves."""
    if width > ALIGNMENT:
        return list(range((width - 1) // ALIGNMENT * ALIGNMENT, 0, -ALIGNMENT))
    return [width >> shift for shift in range(1, width.bit_length()) if width >> shift]


def fit_budget(budget: Budget, mixers: tuple[Mixer, ...]) -> tuple[int, str]:
    """Return the largest key dim worth choosing whose state fits, or the width if that does, and a line on why."""
    width = mixers[0].axis.width

    def size(key_dim: int) -> int:
        return state_bytes(mixers, key_dim)[budget.dtype]

    if size(width) <= budget.bytes:
        return width, f"the uncut state takes {size(width) / MIB:.4g} MiB and fits: {budget.describe()}"
    dims = key_dims_worth_choosing(width)
    fitting = [key_dim for key_dim in dims if size(key_dim) <= budget.bytes]
    if not fitting:
        least = f"even key dim {dims[-1]} takes {size(dims[-1]) / MIB:.4g} MiB" if dims else "it cannot be cut"
        raise PlanError(f"nothing fits {budget.describe()}: {least}")
    largest = max(fitting)
    larger = min(key_dim for key_dim in (width, *dims) if key_dim > largest)
    return largest, (
        f"key dim {largest} of {width}: {size(largest) / MIB:.4g} MiB fit {budget.describe()};"
        f" {larger} would take {size(larger) / MIB:.4g}"
    )


def resolve_key_dim(
    width: int, compression: float | None, key_dim: int | None, *, allow_width: bool = False
) -> tuple[int, str]:
    """Return the key dim for a compression or a key dim, and a line that explains it.

    A compression gives the nearest multiple of ALIGNMENT, where the width has room for one.
    """
    if (compression is None) == (key_dim is None):
        raise PlanError("give either `key_dim` or `compression`, or a budget (`state_mb`, or `sequences`)")
    if key_dim is not None:
        if key_dim == width and not allow_width:
            raise PlanError(f"key dim {key_dim} is the width of the model: nothing to cut")
        if not 0 < key_dim <= width:
            raise PlanError(f"`key_dim` must be at least 1 and less than the width {width}, got {key_dim}")
        return key_dim, f"key dim {key_dim} of {width}"
    assert compression is not None
    if not 0 < compression < 1:
        raise PlanError(
            f"`compression` must lie between 0 and 1, got {compression:g}; 0.5 removes half of the channels"
        )
    exact = width * (1 - Fraction(str(compression)))
    line = f"compression {compression:g} of {width} channels keeps {float(exact):g}"
    if width <= ALIGNMENT:
        key_dim = min(max(1, math.floor(exact + Fraction(1, 2))), width - 1)
        if not 0 < key_dim < width:
            raise PlanError(f"a width of {width} cannot be cut")
        return key_dim, f"{line}; key dim {key_dim}, too narrow for a multiple of {ALIGNMENT}"
    nearest = math.floor(exact / ALIGNMENT + Fraction(1, 2)) * ALIGNMENT
    key_dim = min(max(nearest, ALIGNMENT), (width - 1) // ALIGNMENT * ALIGNMENT)
    if key_dim == exact:
        return key_dim, line
    return key_dim, f"{line}, rounded to key dim {key_dim}, a multiple of {ALIGNMENT} (`key_dim` sets it exactly)"


def parameters_after(checkpoint: Checkpoint, key_dim: int, value_dim: int | None = None) -> int:
    """Return the number of parameters after a cut to these dims."""
    cut = outline(checkpoint.mixers, key_dim, value_dim)
    touched = {name: shape for name, shape in checkpoint.shapes.items() if cut.touches(name)}
    removed = sum(math.prod(shape) - math.prod(cut.shape(name, shape)) for name, shape in touched.items())
    return checkpoint.parameters - removed


def check_value_dim(checkpoint: Checkpoint, key_dim: int, value_dim: int) -> None:
    """Refuse a value dim that the model cannot have, with the reason."""
    width, family = checkpoint.mixers[0].value_dim, checkpoint.family
    if (reason := family.value_refusal(checkpoint.config)) is not None:
        raise PlanError(f"the values of {family.model_type} cannot be cut: {reason}")
    if not 0 < value_dim < width:
        raise PlanError(
            f"`value_dim` must be at least 1 and less than the value dim {width} of the model, got {value_dim}"
        )
    family.resize(checkpoint.config, key_dim, value_dim)  # raises where no config has it


@dataclass(frozen=True, kw_only=True)
class Headers:
    """What can be known of a model without its weights; `parameters` counts them at a key dim."""

    source: str
    config: Config
    mixers: tuple[Mixer, ...]
    parameters: Callable[[int], int | None]


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
    config, mixers, first = headers.config, headers.mixers, headers.mixers[0]
    width, family, cut = first.axis.width, family_of(config), cut_in(config)
    softmax, numbers = family.softmax_layers(config), family.cached_per_token(config)
    tokens = context if context is not None else DEFAULT_CONTEXT if softmax else 0
    kv_bytes = None if numbers is None else numbers * tokens * KV_BYTES

    choice = None
    if budget.is_set:
        key_dim, line = fit_budget(budget, mixers)
        choice = BudgetChoice(bytes=budget.bytes, dtype=budget.dtype, key_dim=key_dim, why=line)

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
        budget=choice,
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
