"""A task whose long documents are cut with the model's tokenizer: a window around the answer, or the beginning.

lm-eval gives every task the model's arguments as metadata, which is how the tokenizer gets here: `tokenizer=` or
`pretrained=` of `model_args`, or the tokenizer itself from a caller that has one. lm-eval loads this file by its
path, so it imports nothing of slimstate.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from lm_eval.api.task import ConfigurableTask

PROMPT = 2048  # tokens, with the question
SHORTEST = 2  # characters of an answer that can be looked for
LOADING = ("revision", "subfolder", "trust_remote_code", "add_bos_token")  # what lm-eval's `hf` loads a tokenizer with
log = logging.getLogger(__name__)


class RecallTask(ConfigurableTask):  # type: ignore[misc]
    """`doc_to_text` of the task file gives two strings, the document and the question after it, for `prompt` to join.

    `metadata.sought` of the task file names the fields to look for in the document: the window lies around what comes
    first, and a document where one of them is too short is left out. Without it the beginning is kept.
    """

    prompt_tokens = PROMPT
    rows: tuple[int, ...]  # of the split, those that were not left out

    def __init__(self, config: Mapping[str, Any]) -> None:
        metadata = dict(config["metadata"])
        self._tokenizer = _tokenizer(metadata)
        self._sought: tuple[str, ...] = tuple(metadata.get("sought", ()))
        if self._tokenizer is None:
            log.warning("%s: no tokenizer= or pretrained= in the model's arguments: nothing is cut", config["task"])
        if not isinstance(metadata.get("tokenizer"), str):
            metadata.pop("tokenizer", None)  # lm-eval writes metadata into its results
        rest = {key: value for key, value in config.items() if key != "class"}
        super().__init__(config={**rest, "metadata": metadata})

    def download(self, dataset_kwargs: Mapping[str, object] | None = None, **options: Any) -> None:
        super().download(dataset_kwargs, **options)
        split = self.config.validation_split
        documents = self.dataset[split]
        self.rows = tuple(range(len(documents)))
        if self._sought:
            self.rows = tuple(_long_enough(documents.select_columns(list(self._sought)), self._sought))
            self.dataset[split] = documents.select(self.rows)
        if not self.rows:
            raise ValueError(f"no document has {' and '.join(self._sought)} of {SHORTEST} characters or more")

    def doc_to_text(self, doc: Mapping[str, Any], doc_to_text: Any = None) -> str:
        body, asked = (doc_to_text or self.config.doc_to_text)(doc)
        if self._tokenizer is None:
            return f"{body}{asked}"
        return prompt(self._tokenizer, body, asked, [_first(doc[field]) for field in self._sought])


def prompt(tokenizer: Any, body: str, asked: str, sought: Iterable[str] = (), limit: int = PROMPT) -> str:
    """The document and the question in at most `limit` tokens, of which a long document leaves few unused.

    Of a document that is too long stays a window of tokens with the first of `sought` in its middle, or as near to the
    middle as the document's ends allow; its beginning where nothing is sought, its end where nothing is found.
    """
    whole = f"{body}{asked}"
    excess = _length(tokenizer, whole) - limit
    if excess <= 0:
        return whole
    tokens = tokenizer(body, add_special_tokens=False)["input_ids"]
    middle = _place(tokenizer, body, sought)
    size = len(tokens)
    while excess > 0 and size > 0:  # text between two tokens may have more of them once it stands alone
        size = max(0, size - excess)
        start = max(0, min(middle - size // 2, len(tokens) - size))
        window = tokenizer.decode(
            tokens[start : start + size], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        whole = _joined(window, asked)
        excess = _length(tokenizer, whole) - limit
    return whole


def _place(tokenizer: Any, body: str, sought: Iterable[str]) -> int:
    """How many tokens come before the first of what is sought."""
    looked_for = [text for text in sought if text]
    if not looked_for:
        return 0
    found = [match.start() for text in looked_for if (match := re.search(re.escape(text), body, re.IGNORECASE))]
    return len(tokenizer(body[: min(found, default=len(body))], add_special_tokens=False)["input_ids"])


def _joined(window: str, asked: str) -> str:
    """A window may begin and end within a character or a sentence."""
    inside = window.strip("\N{REPLACEMENT CHARACTER}").strip()
    return f"{inside.strip('.') if asked.startswith('.') else inside}{asked}"


def _length(tokenizer: Any, text: str) -> int:
    """With the special tokens that lm-eval adds as well."""
    return len(tokenizer(text)["input_ids"])


def _long_enough(documents: Iterable[Mapping[str, Any]], fields: Iterable[str]) -> Iterable[int]:
    for row, document in enumerate(documents):
        for field in fields:
            if document[field] is None:
                raise ValueError(f"document {row + 1} has no {field}")
        if all(len(_first(document[field])) >= SHORTEST for field in fields):
            yield row


def _first(answer: str | list[str]) -> str:
    if isinstance(answer, str):
        return answer
    return answer[0] if answer else ""


def _tokenizer(metadata: Mapping[str, Any]) -> Any:
    """The tokenizer that the model will use; None where the metadata does not tell."""
    given = metadata.get("tokenizer")
    if given is not None and not isinstance(given, str):
        return given
    name = given or metadata.get("pretrained")
    if not isinstance(name, str):
        return None
    return _load(name, tuple((key, metadata[key]) for key in LOADING if metadata.get(key) is not None))


@cache
def _load(name: str, options: tuple[tuple[str, Any], ...]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name, **dict(options))
