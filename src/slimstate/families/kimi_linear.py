"""Kimi-Linear and GLM-5-Next: delta attention with a decay for every key channel, one width for keys and values.

Keys and values can only be cut to the same width. The gates pass through bottlenecks of that width too, which a cut
replaces by the best of their rank: a loss that a reconstruction can win back. GLM-5-Next is a vision-language model;
transformers has no class for its language model alone.
"""

from collections.abc import Mapping
from dataclasses import replace

from slimstate.core.layout import Axis, HookPoint, Mixer, Slot, ValueAxis
from slimstate.families.contract import RMS_NORM_EPS, Config, Correction, Family, Sizes, filter_axis

INNER = "linear_attn_config"  # the sizes in published configs, which precede those beside it
RENAMED = ("f_a_proj.weight", "f_b_proj.weight", "dt_bias", "A_log")  # in the running model part of the forget gate
INTERVAL = 4


class KimiLinear(Family):
    """A family with one width for keys and values."""

    one_width: bool = True
    place: str = "model.layers"  # where its layers are
    first_softmax: int = INTERVAL  # its first softmax layer, by default

    def mixers(self, config: Config) -> tuple[Mixer, ...]:
        first = self._mixer(self.sizes(config))
        layers = [layer for layer, kind in enumerate(self.layers(config)) if kind == "linear_attention"]
        return tuple(replace(first, layer=layer, path=f"{self.place}.{layer}.self_attn") for layer in layers)

    def _mixer(self, sizes: Sizes) -> Mixer:
        query, key, value = (Slot(parameter=f"{letter}_proj.weight") for letter in "qkv")
        filters = [Slot(parameter=f"{letter}_conv1d.weight", depthwise=True) for letter in "qkv"]
        gates = (Slot(parameter="f_b_proj.weight"), Slot(parameter="dt_bias"))
        output = Slot(parameter="o_proj.weight", dim=1, scale_power=-0.5)
        return Mixer(
            layer=0, path="model.layers.0.self_attn", query=query, key=key, hook=self.hook,
            input_size=sizes.input_size, value_heads=sizes.value_heads, value_dim=sizes.value_dim,
            axis=Axis(heads=sizes.heads, width=sizes.width, slots=(query, key, *filters[:2], *gates)),
            value_axis=ValueAxis(
                heads=sizes.heads, width=sizes.width, value=value, output=output, norm="o_norm.weight",
                slots=(value, filters[2], Slot(parameter="g_b_proj.weight"), output),
                bottlenecks=(("f_a_proj.weight", "f_b_proj.weight"), ("g_a_proj.weight", "g_b_proj.weight")), tied=True,
            ),
            filters=tuple(
                (role, filter_axis(f"{role[0]}_conv1d.weight", sizes.heads, sizes.width))
                for role in ("query", "key", "value")
            ),
            projections=(
                "q_proj", "k_proj", "v_proj", "b_proj", "g_a_proj", "g_b_proj", "o_proj", "forget_gate.f_a_proj",
                "forget_gate.f_b_proj",
            ),
            joined=(
                ("conv1d.weight", tuple(slot.parameter for slot in filters)),
                *((f"forget_gate.{name}", (name,)) for name in RENAMED),
            ),
        )  # fmt: skip

    @property
    def hook(self) -> HookPoint:
        return HookPoint(
            module=f"transformers.models.{self.model_type}.modeling_{self.model_type}",
            operators=("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"), query="query", key="key",
            per_token=("value", "g", "beta"), gpu_kernels=("causal_conv1d_fn", "causal_conv1d_update"),
            cache="cache_params",
        )  # fmt: skip

    def with_defaults(self, config: Config) -> Config:
        text = self.language_config(config)
        inner = text.get(INNER)
        inner = inner if isinstance(inner, Mapping) else {}
        names = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
        return {**self.defaults, **text, **{names[key]: inner[key] for key in names if key in inner}}

    def sizes(self, config: Config) -> Sizes:
        values = self.with_defaults(config)
        heads, width = int(values["linear_num_heads"]), int(values["linear_head_dim"])
        size = int(values["hidden_size"])
        return Sizes(heads=heads, width=width, value_heads=heads, value_dim=width, input_size=size)

    def layers(self, config: Config) -> list[str]:
        """Return the kind of each layer; published configs number them from one."""
        values = self.with_defaults(config)
        count, inner = int(values["num_hidden_layers"]), values.get(INNER) or {}
        if values.get("layer_types") is not None:
            return list(values["layer_types"])
        if "kda_layers" in inner:
            linear = {int(layer) - 1 for layer in inner["kda_layers"]}
        else:
            full = range(self.first_softmax, count, INTERVAL)
            linear = {layer for layer in range(count) if layer not in full}
        return ["linear_attention" if layer in linear else "full_attention" for layer in range(count)]

    def softmax_layers(self, config: Config) -> frozenset[int]:
        return frozenset(layer for layer, kind in enumerate(self.layers(config)) if kind != "linear_attention")

    def cached_per_token(self, config: Config) -> int:
        """Return the size of the compressed keys and values of its softmax layers."""
        values = self.with_defaults(config)
        return len(self.softmax_layers(config)) * (int(values["kv_lora_rank"]) + int(values["qk_rope_head_dim"]))

    def correction(self, config: Config) -> Correction:
        return RMS_NORM_EPS

    def fields_for(self, config: Config, sizes: Sizes) -> Config:
        width = self.one_dim(sizes)
        values = self.with_defaults(config)
        inner = {INNER: {**values[INNER], "head_dim": width}} if values.get(INNER) else {}
        return {"linear_head_dim": width, **inner}


class Glm5Next(KimiLinear):
    """A vision-language model, with the config of its language model under `text_config`."""

    place: str = "model.language_model.layers"
    first_softmax: int = 3
    tower: str | None = "model.visual"
    nested: bool = True

    @property
    def hook(self) -> HookPoint:
        return replace(super().hook, cache="past_key_values")

    def language_config(self, config: Config) -> Config:
        return {key: value for key, value in super().language_config(config).items() if value is not None}


FAMILIES = (
    KimiLinear(
        model_type="kimi_linear",
        defaults={
            "hidden_size": 2304, "num_hidden_layers": 27, "linear_head_dim": 128, "linear_num_heads": 32,
            "rms_norm_eps": 1e-5, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        },
    ),
    Glm5Next(
        model_type="glm5_next",
        defaults={
            "hidden_size": 4096, "num_hidden_layers": 45, "linear_head_dim": 128, "linear_num_heads": 64,
            "rms_norm_eps": 1e-5, "kv_lora_rank": 512, "qk_rope_head_dim": 0,
        },
    ),
)  # fmt: skip
