"""Linear-attention models that cannot be cut, and why: mostly, a stock config has no number for the key width."""

from __future__ import annotations

from collections.abc import Mapping

from slimstate.families.contract import Config

ONE_HEAD_DIM = "its config has one {field} for keys, values and {also}, so no stock config says a smaller key dim"
REFUSED = {
    "kimi_linear": ONE_HEAD_DIM.format(field="linear_head_dim", also="the bottlenecks of the gates"),
    "glm5_next": ONE_HEAD_DIM.format(field="linear_head_dim", also="the bottlenecks of the gates"),
    "bailing_hybrid": ONE_HEAD_DIM.format(field="linear_head_dim", also="the softmax layers"),
    "minimax": ONE_HEAD_DIM.format(field="head_dim", also="the softmax layers"),
    "mesa_net": ONE_HEAD_DIM.format(field="head_dim", also="the kernels, which ask for equal widths"),
    "rwkv7": "its key width is the hidden size, so no stock config says a smaller key dim",
    "retnet": "it rotates keys and queries by frequencies made from the key dim, so a cut model would rotate otherwise",
    "gdn2": "flash-linear-attention has the layer but no model class that would load a checkpoint",
}


def refusal(config: Config) -> str | None:
    """Why a model with this config cannot be cut, in a line; None where nothing is known against it."""
    quantised = _quantisation(config)
    if quantised is not None:
        return (
            f"its weights are quantised ({quantised}), in blocks that rows cannot be cut out of;"
            " cut the unquantised model and quantise the result"
        )
    return REFUSED.get(str(config.get("model_type")))


def _quantisation(config: Config) -> str | None:
    """The way the weights are quantised, where they are."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, Mapping) else {}):
        if part.get("quantization_config") is not None:
            how = part["quantization_config"]
            return str(how.get("quant_method", "method not named")) if isinstance(how, Mapping) else str(how)
    return None
