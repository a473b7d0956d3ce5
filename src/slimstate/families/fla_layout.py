"""What the families of flash-linear-attention share: rows by head, optional convolutions, softmax layers by index."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from slimstate.axes import Axis, Mixer, Slot, Tap
from slimstate.errors import ModelError

Config = Mapping[str, Any]
SHARINGS = ("head", "all")
SHARED_FILTERS = "shared_filters"


def softmax_layers(config: Config) -> frozenset[int]:
    """Layers that the config gives to softmax attention; they have no state to cut."""
    attention = config.get("attn")
    if attention is None:
        return frozenset()
    specs = [attention] if isinstance(attention, Mapping) else attention
    return frozenset(int(layer) for spec in specs for layer in spec["layers"])


def mixers(
    config: Config,
    *,
    layers: int,
    heads: int,
    width: int,
    value_heads: int,
    value_dim: int,
    input_size: int,
    projections: str,
    tap: Tap,
    bends: tuple[str, ...] | None = None,
) -> tuple[Mixer, ...]:
    """One mixer for each layer that is not softmax attention; `projections` are the letters of its linear maps.

    `bends` are the activations and norms of the layer that a rotation of queries and keys does not pass; without them
    it is not rotated at all.
    """
    if min(layers, heads, width, value_heads, value_dim) < 1:
        raise ModelError(
            f"config.json describes {layers} layers of {heads} heads with key dim {width}, value dim {value_dim}"
        )
    query, key = Slot(parameter="q_proj.weight"), Slot(parameter="k_proj.weight")
    axis = Axis(heads=heads, width=width, slots=(query, key, *_convolution_slots(config)))
    softmax = softmax_layers(config)
    return tuple(
        Mixer(
            layer=layer,
            path=f"model.layers.{layer}.attn",
            axis=axis,
            query=query,
            key=key,
            tap=tap,
            input_size=input_size,
            value_heads=value_heads,
            value_dim=value_dim,
            filters=_filters(config, heads, width, value_heads, value_dim),
            projections=tuple(f"{letter}_proj" for letter in projections),
            bends=None if bends is None else (*_filters_that_bend(config), *bends),
            sharing=sharing(config),
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


def _filters_that_bend(config: Config) -> tuple[str, ...]:
    own = bool(config.get("use_short_conv", True)) and sharing(config) is None
    return ("filters of one channel each",) * own


def _convolution_slots(config: Config) -> tuple[Slot, ...]:
    if not config.get("use_short_conv", True):
        return ()
    parameters = ["weight"] + ["bias"] * bool(config.get("conv_bias", False))
    return tuple(
        Slot(parameter=f"{name}_conv1d.{parameter}", filter=parameter == "weight")
        for name in "qk"
        for parameter in parameters
    )


def _filters(config: Config, heads: int, width: int, value_heads: int, value_dim: int) -> tuple[tuple[str, Axis], ...]:
    if not config.get("use_short_conv", True):
        return ()
    sizes = {"query": (heads, width), "key": (heads, width), "value": (value_heads, value_dim)}
    return tuple(
        (role, Axis(heads=count, width=size, slots=(Slot(parameter=f"{role[0]}_conv1d.weight"),)))
        for role, (count, size) in sizes.items()
    )


def corrected_norm(config: Config, width: int, key_dim: int) -> dict[str, float]:
    """The norm epsilon under which a cut layer gives out what it gave with the dropped channels zeroed.

    The layers scale queries by d_k^-0.5, so a cut multiplies what reaches the output norm by s = sqrt(width / key_dim).
    As s o / sqrt(s^2 mean(o^2) + s^2 eps) = o / sqrt(mean(o^2) + eps), an epsilon s^2 times as large takes that out.
    Trained models have mean(o^2) well below eps, so without it the whole layer would come out louder. The other norms
    share the epsilon but see values of a thousand times its size or more.
    """
    return {"norm_eps": float(config.get("norm_eps", 1e-6)) * width / key_dim}


def ratio_for(numerator: int, denominator: int) -> float:
    """The float r whose product with `denominator` gives `numerator`, truncated or rounded."""
    ratio = numerator / denominator
    if int(denominator * ratio) < numerator:
        ratio = math.nextafter(ratio, math.inf)  # 49 * (64 / 49) truncates to 63
    if int(denominator * ratio) != numerator or round(denominator * ratio) != numerator:
        raise ModelError(f"no float ratio stores {numerator} / {denominator}")
    return ratio
