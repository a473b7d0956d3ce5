"""What the hybrids of transformers with Gated DeltaNet layers share: config fields, layer types, the operators.

Their configs say `linear_key_head_dim` and the like, at the top or, in a vision-language model, under `text_config`.
H key heads of D channels, G value heads of V. A family adds where the rows lie, as a `Layout`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slimstate.core.layout import Axis, HookPoint, Mixer, Slot
from slimstate.families.contract import RMS_NORM_EPS, Config, Correction, Library, corrected_epsilon
from slimstate.system.errors import ModelError

DEFAULTS: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rms_norm_eps": 1e-6,
}
EVERY = 4  # without `layer_types`, each fourth layer is softmax attention


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a Gated DeltaNet layer."""

    heads: int
    width: int
    value_heads: int
    value_dim: int
    hidden: int

    @property
    def keys(self) -> int:
        return self.heads * self.width

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the rows of a layer lie: the two projections, all other slots, the filters, the names of linear maps."""

    query: Slot
    key: Slot
    others: tuple[Slot, ...]
    filters: tuple[tuple[str, Axis], ...]
    projections: tuple[str, ...]
    joined: tuple[tuple[str, tuple[str, ...]], ...] = ()


def fused_filters(sizes: Sizes) -> tuple[tuple[str, Axis], ...]:
    """One convolution over [q | k | v], head by head."""
    spans = (
        ("query", sizes.heads, sizes.width, 0),
        ("key", sizes.heads, sizes.width, sizes.keys),
        ("value", sizes.value_heads, sizes.value_dim, 2 * sizes.keys),
    )
    return tuple(
        (role, Axis(heads=heads, width=width, slots=(Slot(parameter="conv1d.weight", start=start),)))
        for role, heads, width, start in spans
    )


@dataclass(frozen=True, kw_only=True)
class GatedDeltaHybrid:
    """A family of hybrids; `module` is the part of transformers that has the classes of its layers.

    The config of a `nested` one has that of the language model under `text_config`; `language` is the model type of its
    class, where there is none for the family's own type.
    """

    model_type: str
    module: str
    layout: Callable[[Sizes], Layout]
    DEFAULTS: Mapping[str, Any]
    nested: bool = False
    language: str | None = None
    scale: Correction = RMS_NORM_EPS
    library: Library = "transformers"

    def mixers(self, config: Config) -> tuple[Mixer, ...]:
        text, sizes = self.text(config), self.sizes(config)
        layout = self.layout(sizes)
        stored = "model.language_model.layers.{}.linear_attn" if self.nested else "model.layers.{}.linear_attn"
        axis = Axis(heads=sizes.heads, width=sizes.width, slots=(layout.query, layout.key, *layout.others))
        return tuple(
            Mixer(
                layer=layer,
                path=f"model.layers.{layer}.linear_attn",
                stored=stored.format(layer),
                axis=axis,
                query=layout.query,
                key=layout.key,
                hook=self.hook,
                input_size=sizes.hidden,
                value_heads=sizes.value_heads,
                value_dim=sizes.value_dim,
                filters=layout.filters,
                projections=layout.projections,
                joined=layout.joined,
            )
            for layer, kind in enumerate(layer_types(text))
            if kind == "linear_attention"
        )

    @property
    def hook(self) -> HookPoint:
        return HookPoint(
            module=f"transformers.models.{self.module}.modeling_{self.module}",
            operators=("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
            query="query",
            key="key",
            timed=("value", "g", "beta"),
            kernels=("causal_conv1d_fn", "causal_conv1d_update"),
        )

    def text(self, config: Config) -> dict[str, Any]:
        """The part of the config that is about the language model, with its defaults."""
        inner = config.get("text_config") if self.nested else config
        if not isinstance(inner, Mapping):
            raise ModelError(f"config.json of {self.model_type} has no text_config, which describes its language model")
        return {**self.DEFAULTS, **{key: value for key, value in inner.items() if value is not None}}

    def sizes(self, config: Config) -> Sizes:
        text = self.text(config)
        sizes = Sizes(
            heads=int(text["linear_num_key_heads"]),
            width=int(text["linear_key_head_dim"]),
            value_heads=int(text["linear_num_value_heads"]),
            value_dim=int(text["linear_value_head_dim"]),
            hidden=int(text["hidden_size"]),
        )
        if min(sizes.heads, sizes.width, sizes.value_dim) < 1 or sizes.value_heads % sizes.heads:
            raise ModelError(
                f"config.json describes {sizes.value_heads} value heads for {sizes.heads} key heads"
                f" of {sizes.width} and {sizes.value_dim} channels"
            )
        return sizes

    def softmax_layers(self, config: Config) -> frozenset[int]:
        kinds = enumerate(layer_types(self.text(config)))
        return frozenset(layer for layer, kind in kinds if kind != "linear_attention")

    def correction(self, config: Config) -> Correction:
        return self.scale

    def resize(self, config: Config, key_dim: int, *, corrected: bool = True) -> dict[str, Any]:
        """The key width is one number for the whole model; the value width is named too, since it may be derived."""
        sizes = self.sizes(config)
        changes: dict[str, Any] = {"linear_key_head_dim": key_dim, "linear_value_head_dim": sizes.value_dim}
        if corrected:
            changes |= corrected_epsilon(self.scale, self.text(config), sizes.width, key_dim)
        if self.nested:
            return {**config, "text_config": {**config["text_config"], **changes}}
        return {**config, **changes}


def layer_types(text: Config) -> list[str]:
    """What each layer is; where the config does not say, softmax attention stands at a fixed interval."""
    if text.get("layer_types") is not None:
        return list(text["layer_types"])
    interval = int(text.get("full_attention_interval", EVERY))
    layers = range(1, int(text["num_hidden_layers"]) + 1)
    return ["linear_attention" if layer % interval else "full_attention" for layer in layers]
