"""What the families of fla share: rows by head, optional convolutions, softmax layers by index.

Some configs store the key width as a ratio to the hidden size (`expand_k`), others as `head_dim` with the value width
as a ratio to it (`expand_v`): two classes. A family is an instance of one of them, whose `layer` is a function of the
config and the sizes.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from slimstate.core.layout import Axis, HookPoint, Mixer, Slot, ValueAxis
from slimstate.families.contract import NORM_EPS, Config, Correction, Family, Library, Sizes, filter_axis, scalar_axis
from slimstate.system.errors import ModelError
from slimstate.system.value import Value

SHARINGS = ("head", "all")
SHARED_FILTERS = "shared_filters"
DEFAULTS: Config = {  # of Gated DeltaNet and its relatives
    "hidden_size": 2048, "num_heads": 6, "head_dim": 256, "expand_v": 2.0, "num_hidden_layers": 21, "norm_eps": 1e-6,
}  # fmt: skip
QUERY, KEY, VALUE = (Slot(parameter=f"{letter}_proj.weight") for letter in "qkv")
OUTPUT = "o_proj.weight"


class Layer(Value):
    """The layers of a family: what they call, their linear maps, and rows that are not in the usual places."""

    hook: HookPoint  # the functions that the layer calls with its queries and keys
    projections: str | tuple[str, ...]  # its linear maps, without an ending `_proj`: "qkvo", or ("q", "f_proj.0")
    query: Slot = QUERY  # the rows that compute the queries
    key: Slot = KEY  # the rows that compute the keys
    gates: tuple[Slot, ...] = ()  # rows with key channels besides projections and convolutions: those of gates
    convolved: bool = True  # whether there can be convolutions; `use_short_conv` in a config turns them off
    convolved_value_heads: int | None = None  # heads in that of the values, if not the value heads; 0 without one
    noncommuting: tuple[str, ...] | None = None  # what does not commute with a rotation; None if it cannot be rotated
    value: Slot = VALUE  # the rows that compute the values
    distinct_value_heads: int | None = None  # heads with values of their own, if several value heads share them
    value_norm: str | None = "o_norm"  # the norm over the values of a head; None if values cannot be cut
    linear_values: bool = False  # whether all maps before the state are linear: value rows absorb what a cut changes
    tied: bool = False  # whether there are always as many values as keys
    features: int = 1  # numbers that a feature map makes of each key channel
    scalars: tuple[str, ...] = ()  # parameters with one number for each value head, if heads can be made from others
    correction: Correction = NORM_EPS  # of the query scale; most models have one epsilon for all norms


class FlaFamily(Family):
    """A family of fla; `layer` gets a config with its defaults and the sizes in it."""

    layer: Callable[[Config, Sizes], Layer]
    library: Library = "fla"

    def mixers(self, config: Config) -> tuple[Mixer, ...]:
        values, sizes, softmax = self.with_defaults(config), self.sizes(config), self.softmax_layers(config)
        if (layers := int(values["num_hidden_layers"])) < 1:
            raise ModelError(f"config.json: num_hidden_layers must be positive, got {layers}")
        first = _mixer(values, sizes, self.layer(values, sizes))
        linear = [layer for layer in range(layers) if layer not in softmax]
        return tuple(replace(first, layer=layer, path=f"model.layers.{layer}.attn") for layer in linear)

    @staticmethod
    def _softmax(config: Config) -> Sequence[Config]:
        """Return the entries for softmax attention, each with its layers and heads."""
        entries = () if config.get("attn") is None else config["attn"]
        return [entries] if isinstance(entries, Mapping) else entries

    def softmax_layers(self, config: Config) -> frozenset[int]:
        return frozenset(int(layer) for spec in self._softmax(config) for layer in spec["layers"])

    def cached_per_token(self, config: Config) -> int | None:
        return self.cached_numbers(config, 1)

    def cached_numbers(self, config: Config, context: int) -> int | None:
        """Return the numbers that softmax layers cache; those with a window keep its tokens only."""
        hidden, total = int(self.with_defaults(config)["hidden_size"]), 0
        for spec in self._softmax(config):
            heads, tokens = int(spec["num_heads"]), min(context, int(spec.get("window_size") or context))
            total += 2 * tokens * len(spec["layers"]) * int(spec.get("num_kv_heads") or heads) * (hidden // heads)
        return total

    def correction(self, config: Config) -> Correction:
        return self.layer(self.with_defaults(config), self.sizes(config)).correction

    def value_epsilon(self, config: Config) -> str | None:
        return None if self.layer(self.with_defaults(config), self.sizes(config)).linear_values else NORM_EPS.epsilon

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

    def fields_for(self, config: Config, sizes: Sizes) -> Config:
        """Return another `head_dim`, and the value width as a ratio to it."""
        return {"head_dim": sizes.width, "expand_v": ratio_for(sizes.value_dim, sizes.width)}


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

    def fields_for(self, config: Config, sizes: Sizes) -> Config:
        """Return another `expand_k`, and another `expand_v` for other values, which give the widths exactly."""
        heads, before = sizes.value_heads, self.sizes(config)
        fields = {"expand_k": ratio_for(sizes.width * heads, sizes.input_size)}
        if sizes.value_dim != before.value_dim:
            fields["expand_v"] = ratio_for(sizes.value_dim * heads, sizes.input_size)
        return fields


def _mixer(config: Config, sizes: Sizes, layer: Layer) -> Mixer:
    """Return the mixer of layer 0; the others differ only in their path."""
    convolved = layer.convolved and bool(config.get("use_short_conv", True))
    shared = sharing(config) if convolved else None
    filters_apart = ("filters of one channel each",) * (convolved and shared is None)
    filters = (*_filter_slots(config, "q", layer.query), *_filter_slots(config, "k", layer.key)) if convolved else ()
    return Mixer(
        layer=0, path="model.layers.0.attn",
        axis=Axis(heads=sizes.heads, width=sizes.width, slots=(layer.query, layer.key, *filters, *layer.gates)),
        query=layer.query, key=layer.key, hook=layer.hook, input_size=sizes.input_size, value_heads=sizes.value_heads,
        value_dim=sizes.value_dim, features=layer.features, value_axis=_value_axis(config, sizes, layer, convolved),
        scalars=scalar_axis(sizes, *layer.scalars), filters=_filters(sizes, layer) if convolved else (),
        projections=tuple(name if "_" in name else f"{name}_proj" for name in layer.projections),
        noncommuting=None if layer.noncommuting is None else (*filters_apart, *layer.noncommuting), sharing=shared,
    )  # fmt: skip


def _value_axis(config: Config, sizes: Sizes, layer: Layer, convolved: bool) -> ValueAxis | None:
    if layer.value_norm is None:
        return None
    heads, width = layer.distinct_value_heads or sizes.value_heads, sizes.value_dim
    copies = sizes.value_heads // heads
    value = replace(layer.value, scale_power=0.5 * layer.linear_values)
    output = replace(per_group(OUTPUT, width, copies), dim=1, scale_power=-0.5)
    gate = (per_group("g_proj.weight", width, copies),) * ("g" in layer.projections)
    filters = _filter_slots(config, "v", value) if convolved and layer.convolved_value_heads != 0 else ()
    norm = f"{layer.value_norm}.weight" if config.get("elementwise_affine", True) else None
    return ValueAxis(
        heads=heads, width=width, slots=(value, *filters, *gate, output), value=value, output=output, norm=norm,
        tied=layer.tied,
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


def _filter_slots(config: Config, letter: str, slot: Slot) -> Iterator[Slot]:
    """Yield the slots of a convolution, whose rows are where those of its projection are."""
    for parameter in ["weight"] + ["bias"] * bool(config.get("conv_bias", False)):
        name = f"{letter}_conv1d.{parameter}"
        yield replace(slot, parameter=name, scale_power=0.0, depthwise=parameter == "weight")


def _filters(sizes: Sizes, layer: Layer) -> tuple[tuple[str, Axis], ...]:
    value_heads = sizes.value_heads if layer.convolved_value_heads is None else layer.convolved_value_heads
    values = (("value", filter_axis("v_conv1d.weight", value_heads, sizes.value_dim)),) if value_heads else ()
    return (
        ("query", filter_axis("q_conv1d.weight", sizes.heads * layer.query.copies, sizes.width)),
        ("key", filter_axis("k_conv1d.weight", sizes.heads * layer.key.copies, sizes.width)),
        *values,
    )


def per_group(parameter: str, width: int, copies: int) -> Slot:
    """Return the slot of adjacent heads that share the channels of one."""
    return Slot(parameter=parameter, head_stride=copies * width, copies=copies, copy_stride=width)


def grouped_queries(sizes: Sizes, correction: Correction) -> Slot:
    """Return the query rows if several query heads share a key head; they absorb a folded query scale."""
    slot = per_group("q_proj.weight", sizes.width, sizes.value_heads // sizes.heads)
    return replace(slot, scale_power=0.5 * correction.folded)


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
