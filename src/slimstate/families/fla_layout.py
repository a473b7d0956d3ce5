"""What the families of fla share: rows by head, optional convolutions, softmax layers by index.

Some configs store the key width as a ratio to the hidden size (`expand_k`), others as `head_dim` with the value width
as a ratio to it (`expand_v`): two classes. A family is an instance of one of them, whose `layer` is a function of the
config and the sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from slimstate.core.layout import Axis, HookPoint, Mixer, Slot
from slimstate.families.contract import (
    NORM_EPS,
    Config,
    Correction,
    Family,
    Library,
    Sizes,
    filter_axis,
)
from slimstate.system.errors import ModelError
from slimstate.system.value import Value

SHARINGS = ("head", "all")
SHARED_FILTERS = "shared_filters"
DEFAULTS: Config = {  # of Gated DeltaNet and its relatives
    "hidden_size": 2048, "num_heads": 6, "head_dim": 256, "expand_v": 2.0, "num_hidden_layers": 21, "norm_eps": 1e-6,
}  # fmt: skip
QUERY, KEY = Slot(parameter="q_proj.weight"), Slot(parameter="k_proj.weight")


class Layer(Value):
    """The layers of a family: what they call, their linear maps, and rows that are not in the usual places."""

    # the functions that the layer calls with its queries and keys
    hook: HookPoint
    # the names of its linear maps, without an ending `_proj`: "qkvo", or ("q", "k", "f_proj.0", ...)
    projections: str | tuple[str, ...]
    # the rows that compute the queries
    query: Slot = QUERY
    # the rows that compute the keys
    key: Slot = KEY
    # rows with key channels besides projections and convolutions: those of gates
    gates: tuple[Slot, ...] = ()
    # heads that the convolution of the values filters, if these are not the value heads
    convolved_value_heads: int | None = None
    # whether there can be a convolution of queries, keys and values; `use_short_conv` in a config turns it off
    convolved: bool = True
    # its activations and norms that do not commute with a rotation of queries and keys; None: it cannot be rotated
    noncommuting: tuple[str, ...] | None = None
    # what corrects the query scale; most models have one epsilon for all norms, also for that after the state
    correction: Correction = NORM_EPS


class FlaFamily(Family):
    """A family of fla; `layer` gets a config with its defaults and the sizes in it."""

    layer: Callable[[Config, Sizes], Layer]
    library: Library = "fla"

    def mixers(self, config: Config) -> tuple[Mixer, ...]:
        values, sizes, softmax = self.with_defaults(config), self.sizes(config), self.softmax_layers(config)
        if (layers := int(values["num_hidden_layers"])) < 1:
            raise ModelError(f"config.json: num_hidden_layers must be positive, got {layers}")
        first = _mixer(values, sizes, self.layer(values, sizes))
        return tuple(
            replace(first, layer=layer, path=f"model.layers.{layer}.attn")
            for layer in range(layers)
            if layer not in softmax
        )

    @staticmethod
    def _softmax(config: Config) -> Sequence[Config]:
        """Return the entries for softmax attention, each with its layers and heads."""
        entries = () if config.get("attn") is None else config["attn"]
        return [entries] if isinstance(entries, Mapping) else entries

    def softmax_layers(self, config: Config) -> frozenset[int]:
        return frozenset(int(layer) for spec in self._softmax(config) for layer in spec["layers"])

    def cached_per_token(self, config: Config) -> int | None:
        hidden, total = int(self.with_defaults(config)["hidden_size"]), 0
        for spec in self._softmax(config):
            heads = int(spec["num_heads"])
            total += 2 * len(spec["layers"]) * int(spec.get("num_kv_heads") or heads) * (hidden // heads)
        return total

    def correction(self, config: Config) -> Correction:
        return self.layer(self.with_defaults(config), self.sizes(config)).correction

    def optional(self, values: Config, name: str) -> int | None:
        """Return a size that only some families and some configs have."""
        value = values[name] if name in self.defaults else None
        return None if value is None else int(value)


class ByHeadDim(FlaFamily):
    """Families whose key width is `head_dim` and value width a ratio to it; value heads may share a key head."""

    def sizes(self, config: Config) -> Sizes:
        values = self.with_defaults(config)
        heads, value_heads = int(values["num_heads"]), self.optional(values, "num_v_heads")
        return Sizes(
            heads=heads,
            width=int(values["head_dim"]),
            value_heads=heads if value_heads is None else value_heads,
            value_dim=int(int(values["head_dim"]) * float(values["expand_v"])),
            input_size=int(values["hidden_size"]),
        )

    def fields_for(self, config: Config, key_dim: int) -> Config:
        """Return another `head_dim`, and the same value width as a ratio to it."""
        return {"head_dim": key_dim, "expand_v": ratio_for(self.sizes(config).value_dim, key_dim)}


class ByExpansion(FlaFamily):
    """Families whose widths are ratios to the hidden size; query heads may share a key head."""

    def sizes(self, config: Config) -> Sizes:
        values = self.with_defaults(config)
        heads, hidden = int(values["num_heads"]), int(values["hidden_size"])
        key_heads = self.optional(values, "num_kv_heads")
        return Sizes(
            heads=heads if key_heads is None else key_heads,
            width=per_head(hidden, values["expand_k"], heads, "expand_k"),
            value_heads=heads,
            value_dim=per_head(hidden, values["expand_v"], heads, "expand_v"),
            input_size=hidden,
        )

    def fields_for(self, config: Config, key_dim: int) -> Config:
        """Return another `expand_k`, which gives the key dim exactly."""
        values = self.with_defaults(config)
        return {"expand_k": ratio_for(key_dim * int(values["num_heads"]), int(values["hidden_size"]))}


def _mixer(config: Config, sizes: Sizes, layer: Layer) -> Mixer:
    """Return the mixer of layer 0; the others differ only in their path."""
    convolved = layer.convolved and bool(config.get("use_short_conv", True))
    shared = sharing(config) if convolved else None
    filters_apart = ("filters of one channel each",) * (convolved and shared is None)
    convolutions = _convolution_slots(config, layer) if convolved else ()
    return Mixer(
        layer=0, path="model.layers.0.attn",
        axis=Axis(heads=sizes.heads, width=sizes.width, slots=(layer.query, layer.key, *convolutions, *layer.gates)),
        query=layer.query, key=layer.key, hook=layer.hook, input_size=sizes.input_size,
        value_heads=sizes.value_heads, value_dim=sizes.value_dim, filters=_filters(sizes, layer) if convolved else (),
        projections=tuple(name if "_" in name else f"{name}_proj" for name in layer.projections),
        noncommuting=None if layer.noncommuting is None else (*filters_apart, *layer.noncommuting), sharing=shared,
    )  # fmt: skip


def sharing(config: Config) -> str | None:
    """Return which channels share a convolution filter by training: those of a `head`, `all`, or None.

    The stock class has no such option: the filters are stored for every channel, and slimstate's entry in the config
    says that they are equal.
    """
    shared = (config.get("slimstate") or {}).get(SHARED_FILTERS)
    if shared is not None and shared not in SHARINGS:
        raise ModelError(f"config.json: unknown {SHARED_FILTERS} {shared!r}; there are {', '.join(SHARINGS)}")
    return shared


def _convolution_slots(config: Config, layer: Layer) -> tuple[Slot, ...]:
    """Return the slots of convolutions, whose rows are where those of the projections are."""
    parameters = ["weight"] + ["bias"] * bool(config.get("conv_bias", False))
    return tuple(
        replace(
            slot, parameter=f"{letter}_conv1d.{parameter}", absorbs_query_scale=False, depthwise=parameter == "weight"
        )
        for letter, slot in (("q", layer.query), ("k", layer.key))
        for parameter in parameters
    )


def _filters(sizes: Sizes, layer: Layer) -> tuple[tuple[str, Axis], ...]:
    value_heads = sizes.value_heads if layer.convolved_value_heads is None else layer.convolved_value_heads
    return (
        ("query", filter_axis("q_conv1d.weight", sizes.heads * layer.query.copies, sizes.width)),
        ("key", filter_axis("k_conv1d.weight", sizes.heads * layer.key.copies, sizes.width)),
        ("value", filter_axis("v_conv1d.weight", value_heads, sizes.value_dim)),
    )


def per_group(parameter: str, width: int, copies: int) -> Slot:
    """Return the slot of adjacent heads that share the channels of one."""
    return Slot(parameter=parameter, head_stride=copies * width, copies=copies, copy_stride=width)


def grouped_queries(sizes: Sizes, correction: Correction) -> Slot:
    """Return the query rows if several query heads share a key head; they absorb a folded query scale."""
    slot = per_group("q_proj.weight", sizes.width, sizes.value_heads // sizes.heads)
    return replace(slot, absorbs_query_scale=correction.folded)


def per_head(hidden: int, ratio: float, heads: int, name: str) -> int:
    """Return the channels per head from their total as a ratio to the hidden size."""
    total = round(hidden * ratio)
    if heads < 1 or total % heads:
        raise ModelError(f"config.json: {name} {ratio} of hidden size {hidden} is not a multiple of {heads} heads")
    return total // heads


def ratio_for(numerator: int, denominator: int) -> float:
    """Return the float r whose product with `denominator` is `numerator`, truncated or rounded."""
    ratio = numerator / denominator
    if int(denominator * ratio) < numerator:
        ratio = math.nextafter(ratio, math.inf)  # 49 * (64 / 49) truncates to 63
    if int(denominator * ratio) != numerator or round(denominator * ratio) != numerator:
        raise ModelError(f"no float ratio stores {numerator} / {denominator}")
    return ratio
