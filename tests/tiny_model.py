"""Build tiny random models; options that several families share."""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slimstate.families import FAMILIES
from slimstate.models.prepare import prepare
from slimstate.models.stock import stock_class

WITH_SOFTMAX = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "window_size": 16}
COMMON = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": 258,
    "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 257, "max_position_embeddings": 256,
}  # fmt: skip
GROUPED = {"num_heads": 4, "num_kv_heads": 2}
BY_HEAD_DIM = {"head_dim": 24, "expand_v": 1.5}
SOFTMAX = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "layer_types": None}
KINDS = ["linear_attention", "full_attention", "linear_attention"]
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
GATED_DELTA_HYBRID = {
    **SOFTMAX, "num_hidden_layers": 3, "layer_types": KINDS, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 24, "linear_value_head_dim": 12,
}  # fmt: skip
MIXTURE = {**GATED_DELTA_HYBRID, **EXPERTS}
VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4,
    "num_position_embeddings": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One architecture with some options of its config changed."""

    name: str
    model_type: str
    options: dict[str, Any] = field(default_factory=dict)


def variants(model_type: str, base: dict[str, Any], changes: dict[str, dict[str, Any]]) -> list[Variant]:
    return [Variant(f"{model_type}-{name}", model_type, {**base, **options}) for name, options in changes.items()]


def seeing(text: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A vision-language model around a language model."""
    return {"plain": {"text_config": {**COMMON, **text}, "vision_config": VISION}}


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


def tokenizer(*merges: tuple[str, str]) -> PreTrainedTokenizerFast:
    """One token per byte, and one for each merge."""
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", bos_token="<|end|>", pad_token="<|pad|>")


def token_ids(batch: int = 2, length: int = 100, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


def text(characters: int = 40_000, seed: int = 0) -> str:
    words = ["state", "key", "query", "channel", "delta", "rule", "head", "linear", "attention", "\n"]
    picks = torch.randint(len(words), (characters // 5,), generator=torch.Generator().manual_seed(seed))
    return " ".join(words[i] for i in picks.tolist())[:characters]
