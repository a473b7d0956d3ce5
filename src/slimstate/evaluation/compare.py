"""Several models on the same footing: the same tokens for all, a name for each, and what a record says of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slimstate.checkpoints.reader import Checkpoint
from slimstate.data.documents import Reading
from slimstate.data.text import Windows
from slimstate.evaluation.perplexity import evaluation_windows
from slimstate.models.load import load_tokenizer
from slimstate.records.parts import Text
from slimstate.records.schema import from_json
from slimstate.system.errors import DataError, PlanError
from slimstate.system.paths import expand_home


def same_tokenizers(checkpoints: Sequence[Checkpoint]) -> Mapping[str, Any]:
    """The tokenizer of every model by its source; refused where their vocabularies differ."""
    found = {checkpoint.source: load_tokenizer(checkpoint.folder) for checkpoint in checkpoints}
    (first, ours), *others = found.items()
    for other, theirs in others:
        if theirs.get_vocab() != ours.get_vocab():
            sizes = f"{len(ours)} and {len(theirs)} tokens"
            raise DataError(
                f"{first} and {other} have different tokenizers ({sizes}): their numbers cannot be compared"
            )
    return found


def shared_windows(tokenizers: Mapping[str, Any], text: Reading, length: int, max_tokens: int | None) -> Windows:
    """The same tokens for every model; models that cut text into other tokens cannot be compared."""
    (first, windows), *others = (
        (source, evaluation_windows(tokenizer, text, length, max_tokens)) for source, tokenizer in tokenizers.items()
    )
    for other, theirs in others:
        if theirs.digest != windows.digest:
            raise DataError(
                f"{first} and {other} cut {text.source} into different tokens: their numbers cannot be compared"
            )
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
    path = expand_home(source)
    return path.resolve().parts if path.exists() else tuple(source.split("/"))


def text_of(windows: Windows) -> Text:
    """Which tokens a record is of."""
    return from_json(Text, windows.describe())
