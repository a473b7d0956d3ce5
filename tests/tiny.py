"""Tiny random models of every family and option, as folders that look like real checkpoints."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from slimstate.runtime import prepare_fla

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
VARIANTS = {variant.name: variant for variant in (*DELTA_NET, *GATED_DELTANET)}
PLAIN = ("delta_net-plain", "gated_deltanet-plain")


def build(variant: Variant, seed: int = 0, **changes: Any) -> torch.nn.Module:
    """A random model whose queries and keys are well spread, in float32."""
    prepare_fla()
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.for_model(variant.model_type, **{**COMMON, **variant.options, **changes})
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_proj.weight" in name:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            elif "conv1d" in name:
                parameter.normal_(std=0.5)
            elif "embeddings" in name:
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
    tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "notes").mkdir(exist_ok=True)
    (folder / "notes" / "origin.md").write_text("a file that is not a weight")
    return folder


def token_ids(batch: int = 2, length: int = 100, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


def text(characters: int = 40_000, seed: int = 0) -> str:
    words = ["state", "key", "query", "channel", "delta", "rule", "head", "linear", "attention", "\n"]
    picks = torch.randint(len(words), (characters // 5,), generator=torch.Generator().manual_seed(seed))
    return " ".join(words[i] for i in picks.tolist())[:characters]
