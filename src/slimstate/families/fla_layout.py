"""What the families of flash-linear-attention share: rows by head, optional convolutions, softmax layers by index."""

from __future__ import annotations

import math
from collections.abc import Mapping

from slimstate.axes import Axis, Mixer, Slot, Tap
from slimstate.errors import ModelError
from slimstate.families.contract import NORM_EPS, Config, Correction


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
) -> tuple[Mixer, ...]:
    """One mixer for each layer that is not softmax attention; `projections` are the letters of its linear maps."""
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
        )
        for layer in range(layers)
        if layer not in softmax
    )


def _convolution_slots(config: Config) -> tuple[Slot, ...]:
    if not config.get("use_short_conv", True):
        return ()
    parameters = ["weight"] + ["bias"] * bool(config.get("conv_bias", False))
    return tuple(Slot(parameter=f"{name}_conv1d.{parameter}") for name in "qk" for parameter in parameters)


def _filters(config: Config, heads: int, width: int, value_heads: int, value_dim: int) -> tuple[tuple[str, Axis], ...]:
    if not config.get("use_short_conv", True):
        return ()
    sizes = {"query": (heads, width), "key": (heads, width), "value": (value_heads, value_dim)}
    return tuple(
        (role, Axis(heads=count, width=size, slots=(Slot(parameter=f"{role[0]}_conv1d.weight"),)))
        for role, (count, size) in sizes.items()
    )


def correction(config: Config) -> Correction:
    """All norms of these models have one epsilon, that behind the state among them."""
    return NORM_EPS


def per_head(hidden: int, ratio: float, heads: int, name: str) -> int:
    """The channels per head where the config has their total as a ratio to the hidden size."""
    total = round(hidden * ratio)
    if heads < 1 or total % heads:
        raise ModelError(f"config.json: {name} {ratio} of hidden size {hidden} is not a multiple of {heads} heads")
    return total // heads


def ratio_for(numerator: int, denominator: int) -> float:
    """The float r whose product with `denominator` gives `numerator`, truncated or rounded."""
    ratio = numerator / denominator
    if int(denominator * ratio) < numerator:
        ratio = math.nextafter(ratio, math.inf)  # 49 * (64 / 49) truncates to 63
    if int(denominator * ratio) != numerator or round(denominator * ratio) != numerator:
        raise ModelError(f"no float ratio stores {numerator} / {denominator}")
    return ratio
