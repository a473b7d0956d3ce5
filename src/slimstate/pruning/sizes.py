"""How much a model and its recurrent state take, how many channels to keep, and what that would save.

All of it follows from the config and tensor headers of a model, or from its config alone. Only the state itself is
counted, per sequence; the last inputs that convolutions store are about a fiftieth of it.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from os import PathLike

from slimstate.checkpoints.reader import Checkpoint, cut_in, described_mixers, open_headers, read_config
from slimstate.core.layout import Mixer
from slimstate.core.surgery import outline
from slimstate.families import Config, Family, family_of
from slimstate.models.prepare import has_library
from slimstate.models.stock import stock_model
from slimstate.pruning.options import MIB, STATE_BYTES, Budget
from slimstate.records.cut import BudgetChoice, InspectionRecord, KeyDimOption, Serving
from slimstate.records.numbers import dims_text, format_mib
from slimstate.records.parts import Cut
from slimstate.records.schema import from_json
from slimstate.records.serving import LayerSpeed
from slimstate.system.errors import ModelError, PlanError
from slimstate.system.input_files import expand_home

ALIGNMENT = 16
DEFAULT_CONTEXT = 32_768  # tokens per sequence, where softmax layers store them
KV_BYTES = 2  # of a number in bf16
# nats per token that removing half of the keys or of the values costs, from docs/records/dims-30m.json
KEY_LOSS, VALUE_LOSS = 0.04, 0.08
MAX_SHOWN = 8  # value dims in a line
Dims = tuple[int, int | None]  # key dim, and value dim or None for all values


def state_bytes(mixers: tuple[Mixer, ...], key_dim: int, value_dim: int | None = None) -> dict[str, int]:
    """Return the bytes of recurrent state per sequence, by data type."""
    elements = sum(mixer.state_elements(key_dim, value_dim) for mixer in mixers)
    return {name: elements * size for name, size in STATE_BYTES.items()}


def key_dims_worth_choosing(width: int) -> list[int]:
    """Return the multiples of 16 below the width; for a narrow head, its halves."""
    if width > ALIGNMENT:
        return list(range((width - 1) // ALIGNMENT * ALIGNMENT, 0, -ALIGNMENT))
    return [width >> shift for shift in range(1, width.bit_length()) if width >> shift]


def value_dims_worth_choosing(family: Family, config: Config) -> list[int]:
    """Return the value dims worth choosing that a config can express; none if values cannot be cut by themselves."""
    sizes = family.sizes(config)

    def is_expressible(value_dim: int) -> bool:
        try:
            family.resize(config, sizes.width, value_dim)
        except ModelError:
            return False
        return True

    if family.one_width or family.value_refusal(config) is not None:
        return []
    return list(filter(is_expressible, key_dims_worth_choosing(sizes.value_dim)))


def dims_worth_choosing(config: Config, axes: str | None = None, *, equal: bool = False) -> list[Dims]:
    """Return the dims of cuts along these axes, by default keys, or values if keys cannot be cut; or `equal` ones."""
    family = family_of(config)
    sizes = family.sizes(config)
    keys = [] if family.key_refusal(config) is not None else key_dims_worth_choosing(sizes.width)
    if equal:
        most = min(sizes.width, sizes.value_dim)
        return [(dim, dim) for dim in ([most] * (most < sizes.width) + key_dims_worth_choosing(most)) if keys]
    axes = axes or ("keys" if keys else "values")
    key_dims = [sizes.width, *keys] if axes != "values" else [sizes.width]
    value_dims = [None, *value_dims_worth_choosing(family, config)] if axes != "keys" else [None]
    return [dims for dims in itertools.product(key_dims, value_dims) if dims != (sizes.width, None)]


def predicted_loss(mixer: Mixer, key_dim: int, value_dim: int | None) -> float:
    """Return about how many nats per token a reconstructed cut costs; the losses of both sides add up.

    Hybrids, whose softmax layers know what a smaller state forgets, lose less.
    """
    values = mixer.value_dim / mixer.values_beside(key_dim, value_dim)
    return KEY_LOSS * (mixer.axis.width / key_dim - 1) + VALUE_LOSS * (values - 1)


def dims_line(mixer: Mixer, key_dim: int, value_dim: int | None) -> str:
    """Return the dims of a cut, each with what it was."""
    line = f"key dim {key_dim} of {mixer.axis.width}"
    return line if value_dim is None else f"{line}, value dim {value_dim} of {mixer.value_dim}"


def fit_budget(budget: Budget, mixers: tuple[Mixer, ...], candidates: Sequence[Dims]) -> tuple[Dims, str]:
    """Return the dims with the least predicted loss whose state fits, or the uncut ones if they do; and a reason."""
    first = mixers[0]
    uncut: Dims = (first.axis.width, None)

    def size(dims: Dims) -> int:
        return state_bytes(mixers, *dims)[budget.dtype]

    if size(uncut) <= budget.bytes:
        return uncut, f"the uncut state takes {size(uncut) / MIB:.4g} MiB and fits: {budget.describe()}"
    fitting = [dims for dims in candidates if size(dims) <= budget.bytes]
    if not fitting:
        least = min(candidates, key=size, default=uncut)
        even = f"even {dims_line(first, *least)} takes {size(least) / MIB:.4g} MiB"
        raise PlanError(f"nothing fits {budget.describe()}: {even if candidates else 'it cannot be cut'}")
    best = min(fitting, key=lambda dims: predicted_loss(first, *dims))
    line = f"{dims_line(first, *best)}: {size(best) / MIB:.4g} MiB fit {budget.describe()}"
    if best[1] is not None and best[0] < uncut[0]:
        return best, f"{line}; of {len(fitting)} that fit, it has the least predicted loss"
    larger = min((dims for dims in (uncut, *candidates) if size(dims) > budget.bytes), key=size)
    shown = larger if best[1] is None else (larger[0], larger[1] or first.value_dim)
    return best, f"{line}; {dims_text(*shown)} would take {size(larger) / MIB:.4g}"


def resolve_key_dim(
    width: int, compression: float | None, key_dim: int | None, *, allow_width: bool = False
) -> tuple[int, str]:
    """Return the key dim, or the multiple of ALIGNMENT nearest to a compression, and a line that explains it."""
    if (compression is None) == (key_dim is None):
        raise PlanError("give either `key_dim` or `compression`, `value_dim`, or a budget (`state_mb`, or `sequences`)")
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
    """What can be known of a model without its weights; `parameters` counts them at a key dim and a value dim."""

    source: str
    config: Config
    mixers: tuple[Mixer, ...]
    parameters: Callable[[int, int | None], int | None]


def read_headers(model: str | PathLike[str]) -> Headers:
    """Read the config and tensor headers of a model, or a config.json alone."""
    path = expand_home(model)
    if path.is_file() and path.suffix == ".json":
        config = read_config(path)
        mixers = described_mixers(config)
        return Headers(source=str(model), config=config, mixers=mixers, parameters=lambda *dims: _count(config, *dims))
    checkpoint = open_headers(model)
    return Headers(
        source=checkpoint.source, config=checkpoint.config, mixers=checkpoint.mixers,
        parameters=lambda *dims: parameters_after(checkpoint, *dims),
    )  # fmt: skip


def _count(config: Config, key_dim: int, value_dim: int | None) -> int | None:
    """Return the number of parameters of the stock class, or None where its library is not installed."""
    family = family_of(config)
    if not has_library(family.library):
        return None
    model = stock_model(family.resize(config, key_dim, value_dim))
    return sum(parameter.numel() for parameter in model.parameters())


def describe_model(
    headers: Headers, *, budget: Budget, candidates: Sequence[Dims], context: int | None, serving: Serving,
    speed: LayerSpeed | None,
) -> InspectionRecord:  # fmt: skip
    """Return the shape of a model and its state, the key dims worth choosing, and the candidate for a budget."""
    config, mixers, first = headers.config, headers.mixers, headers.mixers[0]
    width, family, cut = first.axis.width, family_of(config), cut_in(config)
    softmax = family.softmax_layers(config)
    tokens = context if context is not None else DEFAULT_CONTEXT if softmax else 0
    numbers = family.cached_numbers(config, tokens)
    kv_bytes = None if numbers is None else numbers * KV_BYTES

    choice = None
    if budget.is_set:
        (key_dim, value_dim), why = fit_budget(budget, mixers, candidates)
        choice = BudgetChoice(bytes=budget.bytes, dtype=budget.dtype, key_dim=key_dim, value_dim=value_dim, why=why)

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
        parameters=headers.parameters(width, None),
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
                parameters=headers.parameters(key_dim, None),
                sequences=memory(width) / memory(key_dim),
            )
            for key_dim in ([] if family.key_refusal(config) is not None else key_dims_worth_choosing(width))
        ),
        value_dims=tuple(value_dims_worth_choosing(family, config)),
        sides=_sides_line(headers),
    )


def nearest_half(dims: Sequence[int], width: int) -> int:
    return min(dims, key=lambda dim: abs(2 * dim - width), default=width)


def _sides_line(headers: Headers) -> str:
    """Return whether keys and values can be cut, to which value dims, and what half of both would take."""
    config, first, family = headers.config, headers.mixers[0], family_of(headers.config)
    if family.one_width:
        return "keys and values have one width: a key dim is the value dim, too (`state_dim`)"
    if (reason := family.value_refusal(config)) is not None:
        return f"values cannot be cut: {reason}"
    value_dims, keys = value_dims_worth_choosing(family, config), family.key_refusal(config)
    if not value_dims:
        return "values cannot be cut: the config can express no smaller value dim"
    key_dims = [first.axis.width] if keys is not None else key_dims_worth_choosing(first.axis.width)
    pair = nearest_half(key_dims, first.axis.width), nearest_half(value_dims, first.value_dim)
    count = headers.parameters(*pair)
    size = f"{format_mib(state_bytes(headers.mixers, *pair)['fp32'])} in fp32"
    weights = "" if count is None else f" and {count:,} parameters"
    shown = ", ".join(map(str, value_dims)) if len(value_dims) <= MAX_SHOWN else f"{value_dims[0]} to {value_dims[-1]}"
    line = f"values can be cut to {shown} of {first.value_dim}: {dims_text(*pair)} takes {size}{weights}"
    return line if keys is None else f"keys cannot be cut: {keys}; {line}"
