"""What the hybrids of transformers with Gated DeltaNet layers share: config fields, layer types, operators.

Their configs have `linear_key_head_dim` etc. at the top or, in a vision-language model, under `text_config`. H key
heads of D channels, G value heads of V. A family adds a `Layout`: where the rows are.
"""

from collections.abc import Callable

from slimstate.core.layout import Axis, HookPoint, Mixer, Slot, ValueAxis
from slimstate.families.contract import RMS_NORM_EPS, Caches, Config, Correction, Family, Sizes
from slimstate.system.value import Value

DEFAULTS: Config = {
    "hidden_size": 2048, "num_hidden_layers": 48, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "rms_norm_eps": 1e-6,
}  # fmt: skip
TAPS = 4  # of the convolution, by default
SOFTMAX_INTERVAL = 4  # without `layer_types`, every fourth layer is softmax attention


class Layout(Value):
    """Where the rows of a layer are."""

    query: Slot  # the rows that compute the queries
    key: Slot  # the rows that compute the keys
    others: tuple[Slot, ...]  # all other rows with key channels: those of convolutions
    filters: tuple[tuple[str, Axis], ...]  # the convolutions by what they filter, as in a `Mixer`
    values: ValueAxis | None  # the values; None if they cannot be cut
    scalars: Axis | None = None  # update strengths and decays, as in a `Mixer`
    projections: tuple[str, ...]  # the names of the linear maps: ("in_proj_qkv", "out_proj")
    joined: tuple[tuple[str, tuple[str, ...]], ...] = ()  # what the running model joins from parts, as in a `Mixer`
    correction: Correction = RMS_NORM_EPS  # what corrects the query scale


class GatedDeltaHybrid(Family):
    """A family of hybrids."""

    module: str  # the module of transformers with the classes of its layers: "qwen3_5"
    layout: Callable[[Sizes], Layout]  # where the rows of a layer of these sizes are

    def mixers(self, config: Config) -> tuple[Mixer, ...]:
        sizes = self.sizes(config)
        layout = self.layout(sizes)
        stored = "model.language_model.layers.{}.linear_attn" if self.nested else "model.layers.{}.linear_attn"
        axis = Axis(heads=sizes.heads, width=sizes.width, slots=(layout.query, layout.key, *layout.others))
        return tuple(
            Mixer(
                layer=layer, path=f"model.layers.{layer}.linear_attn", stored_path=stored.format(layer), axis=axis,
                query=layout.query, key=layout.key, hook=self.hook, input_size=sizes.input_size,
                value_heads=sizes.value_heads, value_dim=sizes.value_dim, value_axis=layout.values,
                scalars=layout.scalars, filters=layout.filters, projections=layout.projections, joined=layout.joined,
            )
            for layer, kind in enumerate(layer_types(self.with_defaults(config)))
            if kind == "linear_attention"
        )  # fmt: skip

    @property
    def hook(self) -> HookPoint:
        return HookPoint(
            module=f"transformers.models.{self.module}.modeling_{self.module}",
            operators=("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
            query="query",
            key="key",
            per_token=("value", "g", "beta"),
            gpu_kernels=("causal_conv1d_fn", "causal_conv1d_update"),
        )

    def language_config(self, config: Config) -> Config:
        return {key: value for key, value in super().language_config(config).items() if value is not None}

    def sizes(self, config: Config) -> Sizes:
        text = self.with_defaults(config)
        return Sizes(
            heads=int(text["linear_num_key_heads"]),
            width=int(text["linear_key_head_dim"]),
            value_heads=int(text["linear_num_value_heads"]),
            value_dim=int(text["linear_value_head_dim"]),
            input_size=int(text["hidden_size"]),
        )

    def softmax_layers(self, config: Config) -> frozenset[int]:
        kinds = enumerate(layer_types(self.with_defaults(config)))
        return frozenset(layer for layer, kind in kinds if kind != "linear_attention")

    def caches(self, config: Config) -> Caches:
        text, softmax = self.with_defaults(config), self.softmax_layers(config)
        kv_heads, kv_dim = self.softmax_sizes(text)
        return Caches(
            sizes=self.sizes(config), linear_layers=len(layer_types(text)) - len(softmax), softmax_layers=len(softmax),
            taps=int(text.get("linear_conv_kernel_dim", TAPS)), state_dtype=text.get("mamba_ssm_dtype"),
            kv_heads=kv_heads, kv_dim=kv_dim,
        )  # fmt: skip

    def correction(self, config: Config) -> Correction:
        return self.layout(self.sizes(config)).correction

    def published(self, config: Config) -> Config:
        """Return also the interval of softmax layers, if it is regular."""
        text = config.get("text_config", {}) if self.nested else config
        fields = {**super().published(text), **_interval(layer_types(self.with_defaults(config)))}
        return {"text_config": {**fields, **text}} if self.nested else fields

    def fields_for(self, config: Config, sizes: Sizes) -> Config:
        """Return both widths, since that of values may be derived from that of keys."""
        return {"linear_key_head_dim": sizes.width, "linear_value_head_dim": sizes.value_dim}


def value_axis(sizes: Sizes, *rows: Slot) -> ValueAxis:
    """Return the values, whose rows are in these slots, first those that compute them."""
    output = Slot(parameter="out_proj.weight", dim=1, scale_power=-0.5)
    return ValueAxis(
        heads=sizes.value_heads, width=sizes.value_dim, slots=(*rows, output), value=rows[0], output=output,
        norm="norm.weight",
    )  # fmt: skip


def _interval(kinds: list[str]) -> dict[str, int]:
    if "full_attention" not in kinds:
        return {}
    every = kinds.index("full_attention") + 1
    regular = layer_types({"num_hidden_layers": len(kinds), "full_attention_interval": every})
    return {"full_attention_interval": every} if kinds == regular else {}


def layer_types(text: Config) -> list[str]:
    """Return the kind of each layer; by default softmax attention is at a fixed interval."""
    if text.get("layer_types") is not None:
        return list(text["layer_types"])
    interval = int(text.get("full_attention_interval", SOFTMAX_INTERVAL))
    layers = range(1, int(text["num_hidden_layers"]) + 1)
    return ["linear_attention" if layer % interval else "full_attention" for layer in layers]
