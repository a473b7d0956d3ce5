"""Check the values of an untrusted config, which the libraries would follow.

Some fields name code: an attention implementation such as `owner/kernel` is downloaded from the hub and run. Others
name files to read in place of those that were checked, or sizes that keep a library busy for hours.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from slimstate.families.contract import Config
from slimstate.system.errors import ModelError, quoted

ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
EXPERTS = ("eager", "batched_mm", "grouped_mm")
DTYPES = ("float64", "float32", "bfloat16", "float16")
NAMED = {"attn_implementation": ATTENTION, "experts_implementation": EXPERTS, "dtype": DTYPES, "torch_dtype": DTYPES}
REFUSED = {
    "configuration_files": "another config would be read instead",
    "transformers_weights": "other weights would be read instead",
    "kernel_config": "it loads code from the hub",
    "use_kernels": "it loads code from the hub",
    "allow_all_kernels": "it loads code from the hub",
    "fusion_config": "it replaces the layers of the stock class",
    "per_layer_config": "its layers differ in size",
}
QUANTISATIONS = ("quantization_config", "quantization", "compression_config")
MAX_LAYERS, MAX_LABELS, MAX_ITEMS, MAX_SIZE = 1024, 2**16, 2**17, 2**40
MAX_EPSILON = 1.0


def check_values(config: Config) -> None:
    """Refuse a config with values that no checkpoint needs, at any depth."""
    for name, value in _fields(config):
        if (problem := _problem(name, value)) is not None:
            raise ModelError(f"config.json: {quoted(name)} {problem}")


def _fields(tree: Any, within: str | None = None) -> Iterator[tuple[str, Any]]:
    """Yield all fields by name; those of a quantisation, whose names mean other things, by the name of it."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield within or str(name), value
            yield from _fields(value, str(name) if name in QUANTISATIONS else within)
    elif isinstance(tree, list):
        for value in tree:
            yield from _fields(value, within)


def _problem(name: str, value: Any) -> str | None:
    """Return what is wrong with a field, or None; libraries store `x` as `_x` or `_x_internal`, too."""
    bare = name.removeprefix("_").removesuffix("_internal").removesuffix("_autoset")
    if bare in REFUSED and value is not None:
        return f"must not be set by a checkpoint: {REFUSED[bare]}"
    if bare in NAMED:
        return _name_problem(NAMED[bare], value)
    if isinstance(value, (str, list, Mapping)) and len(value) > MAX_ITEMS:
        return f"must have at most {MAX_ITEMS:,} items, got {len(value):,}"
    if name.endswith("_token_id") and not _names_tokens(value):
        return f"must be a token id, got {quoted(value)}"
    return _number_problem(name, value)


def _names_tokens(value: Any) -> bool:
    """Return whether this is a token id, a list of them, or None; bool is an int, but no class loads with it."""
    items = value if isinstance(value, list) else [value]
    return value is None or all(isinstance(item, int) and not isinstance(item, bool) for item in items)


def _name_problem(allowed: tuple[str, ...], value: Any) -> str | None:
    """Return which name is not allowed, of one name or one for each part of the model, or None."""
    for name in value.values() if isinstance(value, Mapping) else (value,):
        if name is not None and not isinstance(name, bool) and str(name).removeprefix("torch.") not in allowed:
            return f"names {quoted(name)}; there are {', '.join(allowed)}"
    return None


def _number_problem(name: str, value: Any) -> str | None:
    if isinstance(value, list) and name.endswith(("layers", "layer_types", "block_type")) and len(value) > MAX_LAYERS:
        return f"must have at most {MAX_LAYERS:,} layers, got {len(value):,}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        needs_number = name.endswith(("_eps", "epsilon")) and value is not None
        return f"must be a number, got {quoted(value)}" if needs_number else None
    if isinstance(value, int) and abs(value) > MAX_SIZE:
        return f"must be at most {MAX_SIZE:,}, got {quoted(value)}"
    limit = MAX_LAYERS if name.endswith("layers") or name == "depth" else MAX_LABELS if name == "num_labels" else None
    if limit is not None and value > limit:
        return f"must be at most {limit:,}, got {quoted(value)}"
    if name.endswith(("_eps", "epsilon")) and not (math.isfinite(value) and 0 <= value < MAX_EPSILON):
        return f"must be between 0 and {MAX_EPSILON:g}, got {quoted(value)}"
    return None
