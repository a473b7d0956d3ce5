"""Mamba-2, alone and in the hybrids of transformers: B is the key and C the query, one pair for each group of heads.

H heads of P channels in G groups, state size N: the axis has G heads of N channels. Rows are [z HP | x HP | B GN |
C GN | dt H] in the projection and [x HP | B GN | C GN] in the convolution. Nothing is normalised or scaled before the
state, and a zeroed channel adds exactly zero: a cut equals zeroing bit for bit.
"""

from dataclasses import field, replace
from itertools import product

from slimstate.core.layout import Axis, HookPoint, Mixer, Slot, ValueAxis
from slimstate.families.contract import NOT_NEEDED, Caches, Config, Correction, Family, Sizes, fused_filters
from slimstate.system.errors import ModelError
from slimstate.system.value import Value

TAPS = 4  # of the convolution, by default
LINEAR = ("linear_attention", "mamba", "hybrid")  # names of layers with a state, in new and old configs
PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


class Fields(Value):
    """The names of the sizes in a config."""

    heads: str  # H: "num_heads"
    head_dim: str  # P: "head_dim"
    groups: str  # G: "n_groups"
    state: str  # N, the key dim: "state_size"
    expand: str  # HP as a ratio to the hidden size: "expand"
    biased: str  # whether the projection has a bias: "use_bias"
    conv_bias: str | None = None  # whether the convolution has one: "use_conv_bias"; None if it always has
    taps: str = "mamba_d_conv"  # taps of the convolution: "conv_kernel"
    inner: str | None = None  # HP itself, if it has a name: "mamba_d_ssm"
    epsilon: str | None = "rms_norm_eps"  # that of the norm over values; None if it is fixed in the stock class
    normed: str | None = None  # whether there is such a norm: "mamba_rms_norm"; None if there always is


class Mamba2(Family):
    """A family with Mamba-2 layers."""

    fields: Fields
    path: str = "model.layers.{}.mamba"  # the path of a layer
    stored_path: str | None = None  # its path in the files, if that is another: "backbone.layers.{}.mixer"
    softmax_everywhere: bool = False  # whether every layer has softmax attention beside the state
    multiplied: bool = False  # whether layers multiply by vectors in float32, which autocast leaves so
    logits_multiplier: str | None = None  # the config field by which logits are multiplied: "lm_head_multiplier"
    logits_divisor: str | None = None  # the config field by which logits are divided: "logits_scaling"
    state_dtype: str | None = None  # the dtype of states in engines, if its config has none: "float32"
    published_kinds: Config = field(default_factory=dict)  # of layer types: {"linear_attention": "mamba"}
    published_inner: str | None = None  # the name of HP, if transformers 5 has none: "intermediate_size"
    free_head_dim: bool = False  # whether the class takes HP from H and P alone, and not from the whole number `expand`
    published_unset: Config = field(default_factory=dict)  # fields that transformers 5 leaves out
    cache: str = "past_key_values"  # the name of the cache

    def mixers(self, config: Config) -> tuple[Mixer, ...]:
        values, sizes = self.with_defaults(config), self.sizes(config)
        inner, keys = sizes.values, sizes.keys
        key, query = (Slot(parameter="in_proj.weight", start=2 * inner + offset) for offset in (0, keys))
        biased = bool(values[self.fields.biased])
        filter_biased = self.fields.conv_bias is None or bool(values[self.fields.conv_bias])
        parts = [("in_proj.bias", 2 * inner)] * biased + [("conv1d.weight", inner)]
        parts += [("conv1d.bias", inner)] * filter_biased
        others = (Slot(parameter=name, start=start + offset) for name, start in parts for offset in (0, keys))
        axis = Axis(heads=sizes.heads, width=sizes.width, slots=(query, key, *others))
        return tuple(
            Mixer(
                layer=layer, path=self._path(self.path, layer, kind), axis=axis, query=query, key=key, hook=self.hook,
                stored_path=None if self.stored_path is None else self._path(self.stored_path, layer, kind),
                input_size=sizes.input_size, value_heads=sizes.value_heads, value_dim=sizes.value_dim,
                value_axis=self._value_axis(values, sizes),
                filters=fused_filters(sizes, query=inner + keys, key=inner, value=0),
                projections=("in_proj",),  # fused kernels would ignore an adapter of out_proj; PEFT refuses it
            )
            for layer, kind in enumerate(self.layers(config))
            if kind in LINEAR
        )  # fmt: skip

    def _value_axis(self, values: Config, sizes: Sizes) -> ValueAxis | None:
        """Return z and x, each channel with its own norm weight."""
        if self.fields.epsilon is None:
            return None
        value = Slot(parameter="in_proj.weight", start=sizes.values)
        others = [Slot(parameter="in_proj.weight"), Slot(parameter="conv1d.weight")]
        if values[self.fields.biased]:
            others += [Slot(parameter="in_proj.bias"), replace(value, parameter="in_proj.bias")]
        if self.fields.conv_bias is None or values[self.fields.conv_bias]:
            others.append(Slot(parameter="conv1d.bias"))
        if self._is_normed(values):
            others.append(Slot(parameter="norm.weight", scale_power=-0.5))
        output = Slot(parameter="out_proj.weight", dim=1)
        return ValueAxis(
            heads=sizes.value_heads, width=sizes.value_dim, slots=(value, *others, output), value=value, output=output
        )

    def _is_normed(self, values: Config) -> bool:
        return self.fields.normed is None or bool(values[self.fields.normed])

    def value_epsilon(self, config: Config) -> str | None:
        return self.fields.epsilon if self._is_normed(self.with_defaults(config)) else None

    def sizes(self, config: Config) -> Sizes:
        """Return the sizes, with the groups as key heads of N channels."""
        values, names = self.with_defaults(config), self.fields
        return Sizes(
            heads=int(values[names.groups]),
            width=int(values[names.state]),
            value_heads=int(values[names.heads]),
            value_dim=self.head_dim(values),
            input_size=int(values["hidden_size"]),
        )

    @staticmethod
    def _path(pattern: str, layer: int, kind: str) -> str:
        """Return the path of a layer; a hybrid layer wraps its Mamba-2 layer in a decoder."""
        path = pattern.format(layer)
        return path.replace(".mamba", ".mamba_decoder.mamba") if kind == "hybrid" else path

    @property
    def hook(self) -> HookPoint:
        return HookPoint(
            module=f"transformers.models.{self.model_type}.modeling_{self.model_type}", query="C", key="B",
            operators=("mamba2_chunk_scan",), step_operator="mamba2_selective_state_update",
            per_token=("hidden_states", "dt"), initial_state="initial_states", final_state="return_final_states",
            value_first=True, scales_queries=False, returns_pair=False,
            gpu_kernels=("causal_conv1d_fn", "causal_conv1d_update"),
            fused_layers=("mamba2_split_conv1d_scan_combined",), recomputed=self.multiplied, cache=self.cache,
        )  # fmt: skip

    def head_dim(self, values: Config) -> int:
        head_dim = values.get(self.fields.head_dim)
        if head_dim not in (None, "auto"):
            return int(head_dim)
        inner = None if self.fields.inner is None else values.get(self.fields.inner)
        total = int(values[self.fields.expand] * values["hidden_size"]) if inner is None else int(inner)
        return total // int(values[self.fields.heads])

    def layers(self, config: Config) -> list[str]:
        values = self.with_defaults(config)
        if values.get("hybrid_override_pattern"):
            return [PATTERN[letter] for letter in values["hybrid_override_pattern"]]
        for source, name in product((config, values), ("layer_types", "layers_block_type")):  # two names of one field
            if source.get(name) is not None:
                return list(source[name])
        softmax = frozenset(values.get("attn_layer_indices") or ())
        layers = range(int(values["num_hidden_layers"]))
        return ["full_attention" if layer in softmax else "linear_attention" for layer in layers]

    def softmax_layers(self, config: Config) -> frozenset[int]:
        """Return the layers with softmax attention only, and those with softmax attention beside the state."""
        kinds = ("full_attention", "attention", "hybrid") + LINEAR * self.softmax_everywhere
        return frozenset(layer for layer, kind in enumerate(self.layers(config)) if kind in kinds)

    def caches(self, config: Config) -> Caches:
        values, kinds = self.with_defaults(config), self.layers(config)
        kv_heads, kv_dim = self.softmax_sizes(values)
        dtype = values.get("mamba_ssm_dtype") or values.get("mamba_ssm_cache_dtype")
        return Caches(
            sizes=self.sizes(config), linear_layers=sum(kind in LINEAR for kind in kinds),
            softmax_layers=len(self.softmax_layers(config)), taps=int(values.get(self.fields.taps, TAPS)),
            state_dtype=dtype or self.state_dtype, repeated_keys=True, stores_block_states=True, kv_heads=kv_heads,
            kv_dim=kv_dim,
        )  # fmt: skip

    def correction(self, config: Config) -> Correction:
        return NOT_NEEDED

    def logit_factor(self, config: Config) -> float:
        names = (self.logits_multiplier, self.logits_divisor)
        multiplier, divisor = (1.0 if name is None else float(config.get(name, 1.0)) for name in names)
        return multiplier / divisor

    def published(self, config: Config) -> Config:
        fields = dict(super().published(config))
        if self.published_kinds and config.get("layer_types"):
            fields["layer_types"] = [self.published_kinds.get(kind, kind) for kind in config["layer_types"]]
        if self.published_inner is not None:
            fields.setdefault(self.published_inner, config.get(self.published_inner) or self.sizes(config).values)
        return fields | {name: value for name, value in self.published_unset.items() if config.get(name) is None}

    def fields_for(self, config: Config, sizes: Sizes) -> Config:
        """Return another state size, and for other values another head dim and what HP follows from."""
        fields, names, hidden = {self.fields.state: sizes.width}, self.fields, sizes.input_size
        if sizes.value_dim == self.sizes(config).value_dim:
            return fields
        fields[names.head_dim] = sizes.value_dim
        if names.inner is not None:
            fields[names.inner] = sizes.values
        elif not self.free_head_dim:
            if sizes.values % hidden:
                each = hidden // sizes.value_heads
                dims = ", ".join(str(each * n) for n in range(1, self.sizes(config).values // hidden)) or "none"
                raise ModelError(
                    f"value dim {sizes.value_dim}: `{names.expand}` of {self.model_type} is a whole number, and"
                    f" {sizes.value_heads} heads of it are {sizes.values / hidden:g} times the hidden size {hidden};"
                    f" smaller value dims that its config can express: {dims}"
                )
            fields[names.expand] = sizes.values // hidden
        if self.published_inner is not None and self.published_inner in config:
            fields[self.published_inner] = sizes.values
        return fields


# the layers of the stock config of Zamba2
ZAMBA2 = ["hybrid" if layer in {*range(6, 43, 6), 47, 51} else "linear_attention" for layer in range(54)]
HYBRID = Fields(
    heads="mamba_n_heads", head_dim="mamba_d_head", groups="mamba_n_groups", state="mamba_d_state",
    expand="mamba_expand", conv_bias="mamba_conv_bias", biased="mamba_proj_bias",
)  # fmt: skip
HYBRID_DEFAULTS = {
    "hidden_size": 4096, "num_hidden_layers": 32, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256,
    "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False, "rms_norm_eps": 1e-5,
}  # fmt: skip

FAMILIES = (
    Mamba2(
        model_type="mamba2", path="backbone.layers.{}.mixer", cache="cache_params", published_inner="intermediate_size",
        fields=Fields(
            heads="num_heads", head_dim="head_dim", groups="n_groups", state="state_size", expand="expand",
            conv_bias="use_conv_bias", biased="use_bias", taps="conv_kernel", epsilon="layer_norm_epsilon",
        ),
        defaults={
            "hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128, "head_dim": 64, "n_groups": 8,
            "state_size": 128, "expand": 2, "use_conv_bias": True, "use_bias": False, "layer_norm_epsilon": 1e-5,
        },
    ),
    Mamba2(model_type="bamba", fields=HYBRID, defaults=HYBRID_DEFAULTS),
    Mamba2(
        model_type="falcon_h1", softmax_everywhere=True, multiplied=True, logits_multiplier="lm_head_multiplier",
        fields=replace(HYBRID, inner="mamba_d_ssm", normed="mamba_rms_norm"),
        defaults={**HYBRID_DEFAULTS, "mamba_d_ssm": 1024, "mamba_rms_norm": False},
    ),
    Mamba2(
        model_type="granitemoehybrid", fields=HYBRID, logits_divisor="logits_scaling",
        defaults={**HYBRID_DEFAULTS, "rms_norm_eps": 1e-6},
        published_kinds={"linear_attention": "mamba", "full_attention": "attention"},
        published_unset={"position_embedding_type": "nope"},
    ),
    Mamba2(
        model_type="zamba2",
        fixed_values="the epsilon of the norm over its values is fixed in the stock class (1e-5)",
        fields=Fields(
            heads="n_mamba_heads", head_dim="mamba_headdim", groups="mamba_ngroups", state="mamba_d_state",
            expand="mamba_expand", biased="add_bias_linear", epsilon=None,
        ),
        defaults={
            "hidden_size": 2560, "num_hidden_layers": 54, "n_mamba_heads": 8, "mamba_ngroups": 1, "mamba_d_state": 64,
            "mamba_expand": 2, "add_bias_linear": False, "layers_block_type": ZAMBA2,
        },
    ),
    Mamba2(
        model_type="nemotron_h", state_dtype="float32", free_head_dim=True, path="model.layers.{}.mixer",
        stored_path="backbone.layers.{}.mixer",
        fields=Fields(
            heads="mamba_num_heads", head_dim="mamba_head_dim", groups="n_groups", state="ssm_state_size",
            expand="expand", conv_bias="use_conv_bias", biased="use_bias", taps="conv_kernel",
            epsilon="layer_norm_epsilon",
        ),
        defaults={
            "hidden_size": 4096, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
            "expand": 2, "use_conv_bias": True, "use_bias": False, "layer_norm_epsilon": 1e-5,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        },
    ),
)  # fmt: skip
