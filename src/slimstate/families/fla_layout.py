"""What the families of flash-linear-attention share: rows by head, optional convolutions, softmax layers by index.

Some configs store the key width as a ratio to the hidden size (`expand_k`), others as `head_dim` with the value width
as a ratio to it (`expand_v`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypedDict

from slimstate.core.layout import Axis, HookPoint, Mixer, Slot
from slimstate.families.contract import NORM_EPS, Config, Correction, corrected_epsilon
from slimstate.system.errors import ModelError

SHARINGS = ("head", "all")
SHARED_FILTERS = "shared_filters"
QUERY, KEY = Slot(parameter="q_proj.weight"), Slot(parameter="k_proj.weight")


def softmax_layers(config: Config) -> frozenset[int]:
    """Layers that the config gives to softmax attention; they have no state to cut."""
    attention = config.get("attn")
    if attention is None:
        return frozenset()
    specs = [attention] if isinstance(attention, Mapping) else attention
    return frozenset(int(layer) for spec in specs for layer in spec["layers"])


def correction(config: Config) -> Correction:
    """All norms of these models have one epsilon, that behind the state among them."""
    return NORM_EPS


class Sizes(TypedDict):
    """Of a layer, as `mixers` takes them."""

    layers: int
    heads: int
    width: int
    value_heads: int
    value_dim: int
    input_size: int


def sizes_by_head_dim(known: Config) -> Sizes:
    """Where the key width is `head_dim`, and value heads may share a key head."""
    heads = int(known["num_heads"])
    return Sizes(
        layers=int(known["num_hidden_layers"]),
        heads=heads,
        width=int(known["head_dim"]),
        value_heads=heads if known["num_v_heads"] is None else int(known["num_v_heads"]),
        value_dim=value_dim_of(known),
        input_size=int(known["hidden_size"]),
    )


def sizes_by_expansion(known: Config) -> Sizes:
    """Where the widths are ratios to the hidden size, and query heads may share a key head."""
    heads, hidden = int(known["num_heads"]), int(known["hidden_size"])
    return Sizes(
        layers=int(known["num_hidden_layers"]),
        heads=heads if known["num_kv_heads"] is None else int(known["num_kv_heads"]),
        width=per_head(hidden, known["expand_k"], heads, "expand_k"),
        value_heads=heads,
        value_dim=per_head(hidden, known["expand_v"], heads, "expand_v"),
        input_size=hidden,
    )


def mixers(
    config: Config,
    *,
    layers: int,
    heads: int,
    width: int,
    value_heads: int,
    value_dim: int,
    input_size: int,
    projections: Iterable[str],
    hook: HookPoint,
    query: Slot = QUERY,
    key: Slot = KEY,
    gates: tuple[Slot, ...] = (),
    value_rows: int | None = None,
    convolved: bool | None = None,
    noncommuting: tuple[str, ...] | None = None,
) -> tuple[Mixer, ...]:
    """One mixer for each layer that is not softmax attention.

    `projections` are the names of its linear maps, where they end in `_proj` without that. `gates` are slots besides
    projections and convolutions; `value_rows` counts the heads of values where that is not `value_heads`.
    `noncommuting` are the activations and norms of the layer that do not commute with a rotation of queries and keys;
    without them it is not rotated at all.
    """
    if min(layers, heads, width, value_heads, value_dim) < 1:
        raise ModelError(
            f"config.json describes {layers} layers of {heads} heads with key dim {width}, value dim {value_dim}"
        )
    convolved = bool(config.get("use_short_conv", True)) if convolved is None else convolved
    convolutions = _convolution_slots(config, query, key) if convolved else ()
    axis = Axis(heads=heads, width=width, slots=(query, key, *convolutions, *gates))
    sizes = {"query": (heads * query.copies, width), "key": (heads * key.copies, width)}
    sizes["value"] = (value_heads if value_rows is None else value_rows, value_dim)
    softmax = softmax_layers(config)
    return tuple(
        Mixer(
            layer=layer,
            path=f"model.layers.{layer}.attn",
            axis=axis,
            query=query,
            key=key,
            hook=hook,
            input_size=input_size,
            value_heads=value_heads,
            value_dim=value_dim,
            filters=_filters(sizes) if convolved else (),
            projections=tuple(name if "_" in name else f"{name}_proj" for name in projections),
            noncommuting=None if noncommuting is None else (*_noncommuting_filters(config), *noncommuting),
            sharing=sharing(config) if convolved else None,
        )
        for layer in range(layers)
        if layer not in softmax
    )


def sharing(config: Config) -> str | None:
    """Which channels have one convolution filter by training: those of a `head`, `all`, or None where each has its own.

    The stock class has no such option: the filters are stored for every channel, and slimstate's own entry in the
    config remembers that they are equal.
    """
    found = (config.get("slimstate") or {}).get(SHARED_FILTERS)
    if found is not None and found not in SHARINGS:
        raise ModelError(f"config.json: {SHARED_FILTERS} {found!r}; there are {', '.join(SHARINGS)}")
    return found if config.get("use_short_conv", True) else None


def _noncommuting_filters(config: Config) -> tuple[str, ...]:
    own = bool(config.get("use_short_conv", True)) and sharing(config) is None
    return ("filters of one channel each",) * own


def _convolution_slots(config: Config, query: Slot, key: Slot) -> tuple[Slot, ...]:
    """A convolution has its rows where the projection before it has them."""
    parameters = ["weight"] + ["bias"] * bool(config.get("conv_bias", False))
    return tuple(
        replace(slot, parameter=f"{name}_conv1d.{parameter}", scaled=False, filter=parameter == "weight")
        for name, slot in (("q", query), ("k", key))
        for parameter in parameters
    )


def _filters(sizes: Mapping[str, tuple[int, int]]) -> tuple[tuple[str, Axis], ...]:
    return tuple(
        (role, Axis(heads=count, width=size, slots=(Slot(parameter=f"{role[0]}_conv1d.weight"),)))
        for role, (count, size) in sizes.items()
    )


def per_group(parameter: str, width: int, copies: int, **options: Any) -> Slot:
    """Rows of several heads that share the channels of one: they lie next to each other."""
    return Slot(parameter=parameter, head_stride=copies * width, copies=copies, copy_stride=width, **options)


def per_head(hidden: int, ratio: float, heads: int, name: str) -> int:
    """The channels per head where the config has their total as a ratio to the hidden size."""
    total = round(hidden * ratio)
    if heads < 1 or total % heads:
        raise ModelError(f"config.json: {name} {ratio} of hidden size {hidden} is not a multiple of {heads} heads")
    return total // heads


def value_dim_of(known: Config) -> int:
    """The value width where it is a ratio to the key width."""
    return int(int(known["head_dim"]) * float(known["expand_v"]))


def resized_by_head_dim(known: Config, config: Config, key_dim: int, epsilon: Correction | None) -> dict[str, Any]:
    """Another `head_dim` for the keys, and the value width it had."""
    norm = {} if epsilon is None else corrected_epsilon(epsilon, known, int(known["head_dim"]), key_dim)
    return {**config, "head_dim": key_dim, "expand_v": ratio_for(value_dim_of(known), key_dim), **norm}


def resized_by_expansion(known: Config, config: Config, key_dim: int, epsilon: Correction | None) -> dict[str, Any]:
    """Another `expand_k`, exact to the last bit."""
    heads, hidden = int(known["num_heads"]), int(known["hidden_size"])
    width = per_head(hidden, known["expand_k"], heads, "expand_k")
    norm = {} if epsilon is None else corrected_epsilon(epsilon, known, width, key_dim)
    return {**config, "expand_k": ratio_for(key_dim * heads, hidden), **norm}


def ratio_for(numerator: int, denominator: int) -> float:
    """The float r whose product with `denominator` gives `numerator`, truncated or rounded."""
    ratio = numerator / denominator
    if int(denominator * ratio) < numerator:
        ratio = math.nextafter(ratio, math.inf)  # 49 * (64 / 49) truncates to 63
    if int(denominator * ratio) != numerator or round(denominator * ratio) != numerator:
        raise ModelError(f"no float ratio stores {numerator} / {denominator}")
    return ratio
