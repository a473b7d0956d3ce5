"""Compare several models: a name for each, and the same tokens for all."""

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

from slimstate.checkpoints.reader import Checkpoint
from slimstate.data.documents import Reading
from slimstate.data.text import Windows
from slimstate.evaluation.perplexity import evaluation_windows
from slimstate.models.load import load_tokenizer
from slimstate.system.errors import DataError, PlanError
from slimstate.system.input_files import expand_home


def open_models(sources: Sequence[str | PathLike[str]]) -> dict[str, Checkpoint]:
    """Open models and return them by name: the last part of each path or, where two are the same, more of it."""
    checkpoints = [Checkpoint.open(source) for source in sources]
    places = [(expand_home(checkpoint.source), checkpoint.source) for checkpoint in checkpoints]
    paths = [path.resolve().parts if path.exists() else tuple(name.split("/")) for path, name in places]
    for size in range(1, max(map(len, paths)) + 1):
        names = ["-".join(path[-size:]).replace("/", "-") for path in paths]
        if len(set(names)) == len(names):
            return dict(zip(names, checkpoints, strict=True))
    raise PlanError("models must differ, got the same one twice")


def same_tokenizers(checkpoints: Iterable[Checkpoint]) -> Mapping[str, Any]:
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
            problem = f"{first} and {name} split {text.source} into different tokens"
            raise DataError(f"{problem}: their numbers cannot be compared")
    return windows
