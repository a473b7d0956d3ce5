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
    first = checkpoints[0]
    tokenizer = load_tokenizer(first.folder)
    windows = evaluation_windows(tokenizer, text, length, max_tokens)
    for other in checkpoints[1:]:
        theirs = load_tokenizer(other.folder)
        if theirs.get_vocab() != tokenizer.get_vocab():
            both, sizes = f"{first.source} and {other.source}", f"{len(tokenizer)} and {len(theirs)} tokens"
            raise DataError(f"{both} have different tokenizers ({sizes}): their numbers cannot be compared")
        if evaluation_windows(theirs, text, length, max_tokens).digest != windows.digest:
            raise DataError(f"{first.source} and {other.source} cut {text} into different tokens: no comparison")
    return windows


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
    return path.absolute().parts if path.exists() else tuple(source.split("/"))


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
