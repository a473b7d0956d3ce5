"""Mamba-2, alone and in the hybrids of transformers: B is the key and C the query, one pair for each group of heads.

H heads of P channels in G groups, state size N: the axis has G heads of N channels. Rows lie [z HP | x HP | B GN |
C GN | dt H] in the projection and [x HP | B GN | C GN] in the convolution. Nothing is normalised or scaled before
the state, and what a dropped channel would add is an exact zero: a cut is zeroing, to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slimstate.core.layout import Axis, HookPoint, Mixer, Slot
from slimstate.families.contract import NOT_NEEDED, Config, Correction, Library
from slimstate.system.errors import ModelError

LINEAR = ("linear_attention", "mamba", "hybrid")  # names of layers with a state, of today and of older configs
PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The names that a config has for the sizes; `inner` is H times P where it is given, `biased` the projection.

    Without `conv_bias` the convolution always has one.
    """

    heads: str
    head_dim: str
    groups: str
    state: str
    expand: str
    biased: str
    conv_bias: str | None = None
    inner: str | None = None


@dataclass(frozen=True, kw_only=True)
class Mamba2:
    """A family with Mamba-2 layers; `path` is the place of a layer, which files may name `stored`.

    `louder` and `softer` are the config fields by which logits are multiplied and divided; `cache` is what the model
    calls its cache.
    """

    model_type: str
    fields: Fields
    DEFAULTS: Mapping[str, Any]
    path: str = "model.layers.{}.mamba"
    stored: str | None = None
    softmax_everywhere: bool = False
    louder: str | None = None
    softer: str | None = None
    cache: str = "past_key_values"
    library: Library = "transformers"

    def mixers(self, config: Config) -> tuple[Mixer, ...]:
        known, names = {**self.DEFAULTS, **config}, self.fields
        heads, groups, width = (int(known[name]) for name in (names.heads, names.groups, names.state))
        head_dim = self.head_dim(known)
        if min(heads, groups, width, head_dim) < 1 or heads % groups:
            raise ModelError(f"config.json describes {heads} heads of {head_dim} in {groups} groups, state {width}")
        inner, keys = heads * head_dim, groups * width
        key, query = (Slot(parameter="in_proj.weight", start=2 * inner + offset) for offset in (0, keys))
        parts = [("in_proj.bias", 2 * inner)] * bool(known[names.biased]) + [("conv1d.weight", inner)]
        parts += [("conv1d.bias", inner)] * bool(names.conv_bias is None or known[names.conv_bias])
        others = (Slot(parameter=name, start=start + offset) for name, start in parts for offset in (0, keys))
        kinds = self.layers(config)
        return tuple(
            Mixer(
                layer=layer,
                path=self._place(self.path, layer, kind),
                stored=None if self.stored is None else self._place(self.stored, layer, kind),
                axis=axis,
                query=query,
                key=key,
                hook=self.hook,
                input_size=int(known["hidden_size"]),
                value_heads=heads,
                value_dim=head_dim,
                filters=_filters(heads, head_dim, groups, width),
                projections=("in_proj",),  # fused kernels read the weight of out_proj past an adapter; PEFT refuses it
            )
            for axis in [Axis(heads=groups, width=width, slots=(query, key, *others))]
            for layer, kind in enumerate(kinds)
            if kind in LINEAR
        )

    @staticmethod
    def _place(pattern: str, layer: int, kind: str) -> str:
        """A hybrid layer wraps its Mamba-2 layer in a decoder of its own."""
        path = pattern.format(layer)
        return path.replace(".mamba", ".mamba_decoder.mamba") if kind == "hybrid" else path

    @property
    def hook(self) -> HookPoint:
        return HookPoint(
            module=f"transformers.models.{self.model_type}.modeling_{self.model_type}",
            operators=("mamba2_chunk_scan",),
            step="mamba2_selective_state_update",
            query="C",
            key="B",
            timed=("hidden_states", "dt"),
            state="initial_states",
            final="return_final_states",
            value_first=True,
            scaled=False,
            bare=True,
            kernels=("causal_conv1d_fn", "causal_conv1d_update"),
            shortcuts=("mamba2_split_conv1d_scan_combined",),
            cache=self.cache,
        )

    def head_dim(self, known: Config) -> int:
        given = known.get(self.fields.head_dim)
        if given not in (None, "auto"):
            return int(given)
        inner = None if self.fields.inner is None else known.get(self.fields.inner)
        whole = int(known[self.fields.expand] * known["hidden_size"]) if inner is None else int(inner)
        return whole // int(known[self.fields.heads])

    def layers(self, config: Config) -> list[str]:
        """What each layer is."""
        known = {**self.DEFAULTS, **config}
        if known.get("hybrid_override_pattern"):
            return [PATTERN[letter] for letter in known["hybrid_override_pattern"]]
        for name in ("layers_block_type", "layer_types"):
            if known.get(name) is not None:
                return list(known[name])
        softmax = frozenset(known.get("attn_layer_indices") or ())
        layers = range(int(known["num_hidden_layers"]))
        return ["full_attention" if layer in softmax else "linear_attention" for layer in layers]

    def softmax_layers(self, config: Config) -> frozenset[int]:
        """Layers of a kind of their own, and those that have softmax attention beside the state."""
        kinds = ("full_attention", "attention", "hybrid") + LINEAR * self.softmax_everywhere
        return frozenset(layer for layer, kind in enumerate(self.layers(config)) if kind in kinds)

    def correction(self, config: Config) -> Correction:
        return NOT_NEEDED

    def logit_factor(self, config: Config) -> float:
        by, below = (1.0 if name is None else float(config.get(name, 1.0)) for name in (self.louder, self.softer))
        return by / below

    def resize(self, config: Config, key_dim: int, *, corrected: bool = True) -> dict[str, Any]:
        """The state size is one number for the whole model; nothing else changes."""
        return {**config, self.fields.state: key_dim}


def _filters(heads: int, head_dim: int, groups: int, width: int) -> tuple[tuple[str, Axis], ...]:
    inner, keys = heads * head_dim, groups * width
    spans = (("query", groups, width, inner + keys), ("key", groups, width, inner), ("value", heads, head_dim, 0))
    return tuple(
        (role, Axis(heads=count, width=size, slots=(Slot(parameter="conv1d.weight", start=start),)))
        for role, count, size, start in spans
    )


def _zamba2_layers() -> list[str]:
    """The 54 layers of the stock config: softmax attention joins in after 6, 12, ..., 42, 47 and 51 of them."""
    hybrid = {*range(6, 43, 6), 47, 51}
    return ["hybrid" if layer in hybrid else "linear_attention" for layer in range(54)]


HYBRID = Fields(
    heads="mamba_n_heads",
    head_dim="mamba_d_head",
    groups="mamba_n_groups",
    state="mamba_d_state",
    expand="mamba_expand",
    conv_bias="mamba_conv_bias",
    biased="mamba_proj_bias",
)
HYBRID_DEFAULTS = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}

FAMILIES = (
    Mamba2(
        model_type="mamba2",
        path="backbone.layers.{}.mixer",
        cache="cache_params",
        fields=Fields(
            heads="num_heads",
            head_dim="head_dim",
            groups="n_groups",
            state="state_size",
            expand="expand",
            conv_bias="use_conv_bias",
            biased="use_bias",
        ),
        DEFAULTS={
            "hidden_size": 4096,
            "num_hidden_layers": 64,
            "num_heads": 128,
            "head_dim": 64,
            "n_groups": 8,
            "state_size": 128,
            "expand": 2,
            "use_conv_bias": True,
            "use_bias": False,
        },
    ),
    Mamba2(model_type="bamba", fields=HYBRID, DEFAULTS=HYBRID_DEFAULTS),
    Mamba2(
        model_type="falcon_h1",
        fields=Fields(**{**vars(HYBRID), "inner": "mamba_d_ssm"}),
        DEFAULTS={**HYBRID_DEFAULTS, "mamba_d_ssm": 1024},
        softmax_everywhere=True,
        louder="lm_head_multiplier",
    ),
    Mamba2(model_type="granitemoehybrid", fields=HYBRID, DEFAULTS=HYBRID_DEFAULTS, softer="logits_scaling"),
    Mamba2(
        model_type="zamba2",
        fields=Fields(
            heads="n_mamba_heads",
            head_dim="mamba_headdim",
            groups="mamba_ngroups",
            state="mamba_d_state",
            expand="mamba_expand",
            biased="add_bias_linear",
        ),
        DEFAULTS={
            "hidden_size": 2560,
            "num_hidden_layers": 54,
            "n_mamba_heads": 8,
            "mamba_ngroups": 1,
            "mamba_d_state": 64,
            "mamba_expand": 2,
            "add_bias_linear": False,
            "layers_block_type": _zamba2_layers(),
        },
    ),
    Mamba2(
        model_type="nemotron_h",
        path="model.layers.{}.mixer",
        stored="backbone.layers.{}.mixer",
        fields=Fields(
            heads="mamba_num_heads",
            head_dim="mamba_head_dim",
            groups="n_groups",
            state="ssm_state_size",
            expand="expand",
            conv_bias="use_conv_bias",
            biased="use_bias",
        ),
        DEFAULTS={
            "hidden_size": 4096,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "expand": 2,
            "use_conv_bias": True,
            "use_bias": False,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        },
    ),
)
