"""Several models on the same footing: the same tokens for all, and a name for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slimstate.checkpoints.reader import Checkpoint
from slimstate.data.documents import Reading
from slimstate.data.text import Windows
from slimstate.evaluation.perplexity import evaluation_windows
from slimstate.models.load import load_tokenizer
from slimstate.system.errors import DataError, PlanError
from slimstate.system.input_files import expand_home


def same_tokenizers(checkpoints: Sequence[Checkpoint]) -> Mapping[str, Any]:
    """Return the tokenizer of every model by its source; refuse different vocabularies."""
    tokenizers = {checkpoint.source: load_tokenizer(checkpoint.folder) for checkpoint in checkpoints}
    (first, tokenizer), *others = tokenizers.items()
    for name, other in others:
        if other.get_vocab() != tokenizer.get_vocab():
            sizes = f"{len(tokenizer)} and {len(other)} tokens"
            raise DataError(f"{first} and {name} have different tokenizers ({sizes}): their numbers cannot be compared")
    return tokenizers


def shared_windows(tokenizers: Mapping[str, Any], text: Reading, length: int, max_tokens: int | None) -> Windows:
    """Return the windows of a text; refuse models that split it into different tokens."""
    each = {name: evaluation_windows(tokenizer, text, length, max_tokens) for name, tokenizer in tokenizers.items()}
    (first, windows), *others = each.items()
    for name, other in others:
        if other.digest != windows.digest:
            raise DataError(
                f"{first} and {name} split {text.source} into different tokens: their numbers cannot be compared"
            )
    return windows


def distinct_names(sources: Sequence[str]) -> list[str]:
    """Return the last part of each path; where two are the same, more of it."""
    paths = [_parts(source) for source in sources]
    for size in range(1, max(map(len, paths)) + 1):
        names = ["-".join(part[-size:]).replace("/", "-") for part in paths]
        if len(set(names)) == len(names):
            return names
    raise PlanError("the same model is given twice")


def _parts(source: str) -> tuple[str, ...]:
    path = expand_home(source)
    return path.resolve().parts if path.exists() else tuple(source.split("/"))
