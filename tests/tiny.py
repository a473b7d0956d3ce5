"""Tiny random models of every family and option, as folders that look like real checkpoints."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slimstate.families import FAMILIES
from slimstate.runtime import prepare, stock_class

HYBRID = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "window_size": 16}
COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "vocab_size": 258,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "pad_token_id": 257,
    "max_position_embeddings": 256,
}


@dataclass(frozen=True)
class Variant:
    """One architecture with some options of its config changed."""

    name: str
    model_type: str
    options: dict[str, Any] = field(default_factory=dict)


def _variants(model_type: str, base: dict[str, Any], changes: dict[str, dict[str, Any]]) -> list[Variant]:
    return [Variant(f"{model_type}-{name}", model_type, {**base, **options}) for name, options in changes.items()]


DELTA_NET = _variants(
    "delta_net",
    {"expand_k": 0.75, "expand_v": 1.0},
    {
        "plain": {},
        "gate": {"use_gate": True},
        "no-conv": {"use_short_conv": False},
        "sum-norm": {"qk_norm": "sum"},
        "relu": {"qk_activation": "relu"},
        "elu": {"qk_activation": "elu", "qk_norm": "sum"},
        "identity": {"qk_activation": "identity"},
        "negative": {"allow_neg_eigval": True},
        "no-beta": {"use_beta": False},
        "tied": {"tie_word_embeddings": True},
        "hybrid": {"attn": HYBRID, "num_hidden_layers": 3},
        "unfused": {"fuse_norm": False, "fuse_swiglu": False, "fuse_cross_entropy": False},
        "powlu": {"hidden_act": "powlu", "fuse_linear_cross_entropy": True, "fuse_cross_entropy": False},
        "residuals": {"attnres_block_size": 2},
        "wide-keys": {"expand_k": 1.5, "conv_size": 3},
    },
)
GATED_DELTANET = _variants(
    "gated_deltanet",
    {"head_dim": 24, "expand_v": 1.5},
    {
        "plain": {},
        "grouped-values": {"num_v_heads": 4},
        "no-gate": {"use_gate": False},
        "sigmoid-gate": {"output_gate_activation": "sigmoid"},
        "no-conv": {"use_short_conv": False},
        "negative": {"allow_neg_eigval": True},
        "tied": {"tie_word_embeddings": True},
        "hybrid": {"attn": [HYBRID], "num_hidden_layers": 3},
        "odd-value-dim": {"head_dim": 49, "expand_v": 33.0000001 / 49, "num_v_heads": 2},
    },
)
SOFTMAX = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "layer_types": None}
KINDS = ["linear_attention", "full_attention", "linear_attention"]
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
GATED_DELTA_HYBRID = {
    **SOFTMAX,
    "num_hidden_layers": 3,
    "layer_types": KINDS,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 12,
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
INDEXED = {
    "layer_types": [kind.replace("full", "indexed") for kind in KINDS],
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 64,
    "indexer_compress_ratio": 16,
    "hc_lowrank": 8,
}
MAMBA_HYBRID = {
    **SOFTMAX,
    "num_hidden_layers": 3,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_chunk_size": 16,
}
MIXTURE = {**GATED_DELTA_HYBRID, **EXPERTS}
QWEN4 = {**MIXTURE, **INDEXED}
GRANITE = {"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 4, "num_experts_per_tok": 2}


def _seeing(text: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A vision-language model around a language model."""
    return {"plain": {"text_config": {**COMMON, **text}, "vision_config": VISION}}


HYBRIDS = [
    *_variants("qwen3_next", MIXTURE, {"plain": {}, "equal-heads": {"linear_num_key_heads": 4}}),
    *_variants("qwen3_5_text", GATED_DELTA_HYBRID, {"plain": {}, "tied": {"tie_word_embeddings": True}}),
    *_variants("qwen3_5_moe_text", MIXTURE, {"plain": {}}),
    *_variants("qwen3_5", {}, _seeing(GATED_DELTA_HYBRID)),
    *_variants("qwen3_5_moe", {}, _seeing(MIXTURE)),
    *_variants("qwen4_exp_text", QWEN4, {"plain": {}}),
    *_variants("qwen4_exp", {}, _seeing(QWEN4)),
    *_variants("olmo_hybrid", GATED_DELTA_HYBRID, {"plain": {}}),
    *_variants(
        "mamba2",
        {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 24, "chunk_size": 16},
        {
            "plain": {},
            "biased": {"use_bias": True},
            "no-conv-bias": {"use_conv_bias": False},
            "one-group": {"n_groups": 1},
        },
    ),
    *_variants("bamba", MAMBA_HYBRID | {"attn_layer_indices": [1]}, {"plain": {}, "biased": {"mamba_proj_bias": True}}),
    *_variants("falcon_h1", {**MAMBA_HYBRID, "mamba_d_ssm": 128}, {"plain": {}}),
    *_variants("granitemoehybrid", {**MAMBA_HYBRID, **GRANITE, "shared_intermediate_size": 32}, {"plain": {}}),
    *_variants(
        "zamba2",
        {"n_mamba_heads": 8, "mamba_ngroups": 2, "mamba_d_state": 24, "chunk_size": 16, "num_hidden_layers": 3}
        | {"layers_block_type": ["mamba", "hybrid", "mamba"], "num_attention_heads": 4, "num_key_value_heads": 4}
        | {"adapter_rank": 4, "use_mem_rope": True},
        {"plain": {}},
    ),
    *_variants(
        "nemotron_h",
        {**SOFTMAX, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 24, "chunk_size": 16}
        | {"layers_block_type": ["mamba", "attention", "moe", "mlp", "mamba"], "n_routed_experts": 4}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32},
        {"plain": {}},
    ),
]
GROUPED = {"num_heads": 4, "num_kv_heads": 2}
BY_HEAD_DIM = {"head_dim": 24, "expand_v": 1.5}
OTHERS_OF_FLA = [
    *_variants(
        "kda",
        BY_HEAD_DIM,
        {
            "plain": {},
            "grouped-values": {"num_v_heads": 4},
            "bounded-gate": {"safe_gate": True, "lower_bound": -5.0, "allow_neg_eigval": True},
            "hybrid": {"attn": HYBRID, "num_hidden_layers": 3},
        },
    ),
    *_variants(
        "gla",
        {"expand_k": 0.75},
        {
            "plain": {},
            "grouped-keys": GROUPED,
            "conv": {"use_short_conv": True},
            "relu": {"feature_map": "relu", "use_output_gate": False},
            "sigmoid": {"feature_map": "sigmoid", "fuse_norm": False},
        },
    ),
    *_variants(
        "gated_deltaproduct",
        {**BY_HEAD_DIM, "num_householder": 2},
        {
            "plain": {"use_forget_gate": True},
            "ungated": {"num_householder": 3, "use_output_gate": False, "allow_neg_eigval": True},
        },
    ),
    *_variants("comba", BY_HEAD_DIM, {"plain": {}, "grouped-values": {"num_v_heads": 4, "use_output_gate": False}}),
    *_variants(
        "linear_attn",
        {"expand_k": 0.75, "feature_map": "relu"},
        {
            "plain": {},
            "grouped-keys": GROUPED,
            "elu": {"feature_map": "elu"},
            "normalised": {"norm_feature_map": True, "feature_map": "elu"},
        },
    ),
]
VARIANTS = {variant.name: variant for variant in (*DELTA_NET, *GATED_DELTANET, *HYBRIDS, *OTHERS_OF_FLA)}
PLAIN = ("delta_net-plain", "gated_deltanet-plain")
OF_FLA = tuple(name for name, variant in VARIANTS.items() if FAMILIES[variant.model_type].library == "fla")
OF_TRANSFORMERS = tuple(name for name in VARIANTS if name not in OF_FLA)
EVERY_PLAIN = tuple(name for name in VARIANTS if name.endswith("-plain"))


def build(variant: Variant, seed: int = 0, **changes: Any) -> torch.nn.Module:
    """A random model whose queries and keys are well spread, in float32: all that its files hold."""
    family = FAMILIES[variant.model_type]
    prepare(variant.model_type)
    config_class, model_class = stock_class(family, whole=True)
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {**COMMON, **variant.options, **changes}
        options = {key: value for key, value in options.items() if value is not None}
        if family.library == "fla":
            model = model_class.from_config(config_class.for_model(variant.model_type, **options))
        else:
            model = model_class(config_class(**options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and ("proj" in name or ("lm_head" in name and family.library == "transformers")):
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            elif "conv1d" in name:
                parameter.normal_(std=0.5)
            elif "embed" in name and "pos" not in name:
                parameter.normal_()
    return model.eval()


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(alphabet)}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", bos_token="<|end|>", pad_token="<|pad|>")


def save(model: torch.nn.Module, folder: Path, shard_size: str = "5GB") -> Path:
    model.save_pretrained(folder, max_shard_size=shard_size)
    if model.config.model_type == "olmo_hybrid":
        _split_convolutions(model, folder)
    tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "notes").mkdir(exist_ok=True)
    (folder / "notes" / "origin.md").write_text("a file that is not a weight")
    return folder


def _split_convolutions(model: torch.nn.Module, folder: Path) -> None:
    """As published checkpoints have them; save_pretrained splits them into equal parts, which is wrong."""
    sizes = [2 * 24, 2 * 24, 4 * 12] if model.config.linear_num_key_heads == 2 else None
    assert sizes is not None
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name, whole in model.state_dict().items():
            if name.endswith(".conv1d.weight"):
                parts = dict(zip("qkv", whole.split(sizes), strict=True))
                for letter, part in parts.items():
                    stored = name.replace(".conv1d.", f".{letter}_conv1d.")
                    if stored in tensors:
                        tensors[stored] = part.clone().contiguous()
        save_file(tensors, path, metadata={"format": "pt"})


def token_ids(batch: int = 2, length: int = 100, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


def text(characters: int = 40_000, seed: int = 0) -> str:
    words = ["state", "key", "query", "channel", "delta", "rule", "head", "linear", "attention", "\n"]
    picks = torch.randint(len(words), (characters // 5,), generator=torch.Generator().manual_seed(seed))
    return " ".join(words[i] for i in picks.tolist())[:characters]
