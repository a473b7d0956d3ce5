"""What a config may ask for, by value. A config comes from a stranger, and the libraries do what it says.

Some of its fields name code: an attention implementation such as `owner/kernel` is fetched from the hub and run. Others
name files that are read in place of those that were looked at, or numbers that keep a library busy for hours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from slimstate.families.contract import Config
from slimstate.system.errors import ModelError, quoted

ATTENTION = (
    "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention",
)  # fmt: skip
EXPERTS = ("eager", "batched_mm", "grouped_mm")
DTYPES = ("float64", "float32", "bfloat16", "float16")
NAMED = {
    "attn_implementation": ATTENTION,
    "experts_implementation": EXPERTS,
    "dtype": DTYPES,
    "torch_dtype": DTYPES,
}
REFUSED = {
    "configuration_files": "another config would be read in place of this one",
    "transformers_weights": "it would say which weights are read",
    "kernel_config": "it asks for code from the hub",
    "use_kernels": "it asks for code from the hub",
    "allow_all_kernels": "it asks for code from the hub",
    "fusion_config": "it asks for other layers than those of the stock class",
    "per_layer_config": "its layers differ in size",
}
MOST_LAYERS, MOST_LABELS, MOST_MEMBERS, LARGEST = 1024, 2**16, 2**17, 2**40
LARGEST_EPSILON = 1.0


def check_values(config: Config) -> None:
    """Refuse a config that asks for what no checkpoint has to ask for, wherever in it that stands."""
    for name, value in _fields(config):
        if (words := _objection(name, value)) is not None:
            raise ModelError(f"config.json: {quoted(name)} {words}")


def _fields(tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield str(name), value
            yield from _fields(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _fields(value)


def _objection(name: str, value: Any) -> str | None:
    """What is wrong with a field, in words; `_x` and `_x_internal` are `x` as libraries keep it."""
    bare = name.removeprefix("_").removesuffix("_internal").removesuffix("_autoset")
    if bare in REFUSED and value is not None:
        return f"is not for a checkpoint to set: {REFUSED[bare]}"
    if bare in NAMED:
        return _name_objection(NAMED[bare], value)
    if isinstance(value, (str, list, Mapping)) and len(value) > MOST_MEMBERS:
        return f"has {len(value):,} members"
    if name.endswith("_token_id") and not _names_tokens(value):
        return f"is {quoted(value)}, which is no token"
    return _number_objection(name, value)


def _names_tokens(value: Any) -> bool:
    """A token, several of them, or none; true and false are numbers too, and no class loads with them."""
    each = value if isinstance(value, list) else [value]
    return value is None or all(isinstance(one, int) and not isinstance(one, bool) for one in each)


def _name_objection(known: tuple[str, ...], value: Any) -> str | None:
    """One of the known names, or one for each part of the model."""
    for each in value.values() if isinstance(value, Mapping) else (value,):
        if each is not None and not isinstance(each, bool) and str(each).removeprefix("torch.") not in known:
            return f"asks for {quoted(each)}; there are {', '.join(known)}"
    return None


def _number_objection(name: str, value: Any) -> str | None:
    if isinstance(value, list) and name.endswith(("layers", "layer_types", "block_type")) and len(value) > MOST_LAYERS:
        return f"lists {len(value):,} layers; {MOST_LAYERS:,} can be meant"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        counted = name.endswith(("_eps", "epsilon")) and value is not None
        return f"is {quoted(value)}, which is no number" if counted else None
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"is {quoted(value)}, which is beyond all sizes"
    most = MOST_LAYERS if name.endswith("layers") or name == "depth" else MOST_LABELS if name == "num_labels" else None
    if most is not None and value > most:
        return f"is {quoted(value)}; {most:,} can be meant"
    if name.endswith(("_eps", "epsilon")) and not (math.isfinite(value) and 0 <= value < LARGEST_EPSILON):
        return f"is {quoted(value)}, which is not an epsilon between 0 and {LARGEST_EPSILON:g}"
    return None
