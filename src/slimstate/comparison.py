"""Several models on the same footing: the same tokens for all, a name for each, and what a record says of a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slimstate.checkpoint import Checkpoint
from slimstate.data import Windows
from slimstate.errors import DataError, PlanError
from slimstate.perplexity import evaluation_windows
from slimstate.runtime import load_tokenizer


def shared_windows(checkpoints: Sequence[Checkpoint], text: str, length: int, max_tokens: int | None) -> Windows:
    """The same tokens for every model; models that cut text into other tokens cannot be compared."""
    tokenizers = same_tokenizers(checkpoints)
    first, *others = (evaluation_windows(tokenizer, text, length, max_tokens) for tokenizer in tokenizers)
    for other, checkpoint in zip(others, checkpoints[1:], strict=True):
        if other.digest != first.digest:
            both = f"{checkpoints[0].source} and {checkpoint.source}"
            raise DataError(f"{both} cut {text} into different tokens: their numbers cannot be compared")
    return first


def same_tokenizers(checkpoints: Sequence[Checkpoint]) -> list[Any]:
    """The tokenizer of every model; refused where their vocabularies differ."""
    tokenizers = [load_tokenizer(checkpoint.folder) for checkpoint in checkpoints]
    for theirs, other in zip(tokenizers[1:], checkpoints[1:], strict=True):
        if theirs.get_vocab() != tokenizers[0].get_vocab():
            both = f"{checkpoints[0].source} and {other.source}"
            sizes = f"{len(tokenizers[0])} and {len(theirs)} tokens"
            raise DataError(f"{both} have different tokenizers ({sizes}): their numbers cannot be compared")
    return tokenizers


def distinct_names(sources: Sequence[str]) -> list[str]:
    """The last part of each path; where two are the same, more of it."""
    paths = [_parts(source) for source in sources]
    for size in range(1, max(map(len, paths)) + 1):
        names = ["-".join(part[-size:]).replace("/", "-") for part in paths]
        if len(set(names)) == len(names):
            return names
    raise PlanError("the same model is given twice")


def _parts(source: str) -> tuple[str, ...]:
    path = Path(source).expanduser()
    return path.resolve().parts if path.exists() else tuple(source.split("/"))


def identity(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """Which model a record is of."""
    first = checkpoint.mixers[0]
    return {
        "name": name,
        "model": checkpoint.source,
        "fingerprint": checkpoint.fingerprint,
        "model_type": checkpoint.family.model_type,
        "key_dim": first.axis.width,
        "value_dim": first.value_dim,
        "cut": checkpoint.config.get("slimstate"),
    }
