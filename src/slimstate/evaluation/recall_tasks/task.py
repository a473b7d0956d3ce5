"""A task that truncates long documents with the model's tokenizer: to a window around the answer, or the beginning.

lm-eval passes the model's arguments to every task as metadata, and so the tokenizer: `tokenizer=` or `pretrained=` of
`model_args`, or the tokenizer itself from a caller that has one. lm-eval loads this file by its path, so it imports
nothing of slimstate.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from lm_eval.api.task import ConfigurableTask

MAX_PROMPT = 2048  # tokens, with the question
HARNESS_WINDOW = 1998  # tokens of a document in the harness of prefix-linear-attention
MIN_ANSWER = 2  # characters of an answer that can be searched for
LOAD_OPTIONS = ("revision", "subfolder", "trust_remote_code", "add_bos_token")  # of a tokenizer in lm-eval's `hf`
log = logging.getLogger(__name__)


class RecallTask(ConfigurableTask):  # type: ignore[misc]
    """A task whose `doc_to_text` returns two strings, the document and the question, which `prompt` joins.

    `metadata.answer_fields` of the task file names the fields to search for in the document: the window lies around the
    first match, and documents where one of them is too short are left out. Without it the beginning is kept.
    """

    prompt_tokens = MAX_PROMPT
    rows: tuple[int, ...]  # of the split, without those that are left out

    def __init__(self, config: Mapping[str, Any]) -> None:
        metadata = dict(config["metadata"])
        self._tokenizer = _tokenizer(metadata)
        self._answer_fields: tuple[str, ...] = tuple(metadata.get("answer_fields", ()))
        self._as_harness = metadata.get("prompts") == "harness"
        if self._as_harness:
            self.prompt_tokens = 2 * MAX_PROMPT  # the question comes on top
        if self._tokenizer is None:
            log.warning("%s: no tokenizer= or pretrained= in model_args: nothing is truncated", config["task"])
        if not isinstance(metadata.get("tokenizer"), str):
            metadata.pop("tokenizer", None)  # lm-eval writes metadata into its results
        rest = {key: value for key, value in config.items() if key != "class"}
        super().__init__(config={**rest, "metadata": metadata})

    def download(self, dataset_kwargs: Mapping[str, object] | None = None, **options: Any) -> None:
        super().download(dataset_kwargs, **options)
        split = self.config.validation_split
        documents = self.dataset[split]
        self.rows = tuple(range(len(documents)))
        if self._answer_fields:
            self.rows = tuple(_long_enough(documents.select_columns(list(self._answer_fields)), self._answer_fields))
            self.dataset[split] = documents.select(self.rows)
        if not self.rows:
            raise ValueError(f"no document has {' and '.join(self._answer_fields)} of {MIN_ANSWER} characters or more")

    def doc_to_text(self, doc: Mapping[str, Any], doc_to_text: Any = None) -> str:
        body, question = (doc_to_text or self.config.doc_to_text)(doc)
        if self._tokenizer is None:
            return f"{body}{question}"
        answers = [_first(doc[field]) for field in self._answer_fields]
        if self._as_harness:
            return harness_prompt(self._tokenizer, body, question, answers, doc)
        return prompt(self._tokenizer, body, question, answers)


def prompt(tokenizer: Any, body: str, question: str, answers: Iterable[str] = (), limit: int = MAX_PROMPT) -> str:
    """Return the document and the question in at most `limit` tokens, of which a long document leaves few unused.

    A document that is too long is truncated to a window with the first of the `answers` in its middle, or as near to
    the middle as the ends of the document allow; without answers to its beginning, without a match to its end.
    """
    whole = f"{body}{question}"
    excess = _length(tokenizer, whole) - limit
    if excess <= 0:
        return whole
    tokens = tokenizer(body, add_special_tokens=False)["input_ids"]
    middle = _first_match(tokenizer, body, answers)
    size = len(tokens)
    while excess > 0 and size > 0:  # text between two tokens may have more of them once it stands alone
        size = max(0, size - excess)
        start = max(0, min(middle - size // 2, len(tokens) - size))
        window = tokenizer.decode(
            tokens[start : start + size], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        whole = _join(window, question)
        excess = _length(tokenizer, whole) - limit
    return whole


def harness_prompt(tokenizer: Any, body: str, question: str, answers: Iterable[str], doc: Mapping[str, Any]) -> str:
    """Return a prompt as prefix-linear-attention cuts it: at most half of the window stands before the answer.

    `alt_answers` and then `tok_pos` of the document say where, if none of the answers occurs in it.
    """
    tokens, answers = tokenizer(body, add_special_tokens=False)["input_ids"], [*answers]
    middle = _first_match(tokenizer, body, answers)
    if answers and middle >= len(tokens):
        middle = _first_match(tokenizer, body, doc.get("alt_answers") or answers)
        if middle >= len(tokens) > HARNESS_WINDOW:
            middle = doc.get("tok_pos") or middle
    start = max(0, middle - HARNESS_WINDOW // 2)
    window = tokenizer.decode(tokens[start : start + HARNESS_WINDOW], skip_special_tokens=True)
    return f"{window}{question}"


def _first_match(tokenizer: Any, body: str, answers: Iterable[str]) -> int:
    """Return how many tokens come before the first of the answers."""
    answers = [answer for answer in answers if answer]
    if not answers:
        return 0
    starts = [match.start() for text in answers if (match := re.search(re.escape(text), body, re.IGNORECASE))]
    return len(tokenizer(body[: min(starts, default=len(body))], add_special_tokens=False)["input_ids"])


def _join(window: str, question: str) -> str:
    """Append the question to a window, which may begin and end within a character or a sentence."""
    inside = window.strip("\N{REPLACEMENT CHARACTER}").strip()
    return f"{inside.strip('.') if question.startswith('.') else inside}{question}"


def _length(tokenizer: Any, text: str) -> int:
    """Count tokens with the special ones, which lm-eval adds too."""
    return len(tokenizer(text)["input_ids"])


def _long_enough(documents: Iterable[Mapping[str, Any]], fields: Iterable[str]) -> Iterable[int]:
    for row, document in enumerate(documents):
        for field in fields:
            if document[field] is None:
                raise ValueError(f"document {row + 1} has no {field}")
        if all(len(_first(document[field])) >= MIN_ANSWER for field in fields):
            yield row


def _first(answer: str | list[str]) -> str:
    if isinstance(answer, str):
        return answer
    return answer[0] if answer else ""


def _tokenizer(metadata: Mapping[str, Any]) -> Any:
    """Return the tokenizer that the model will use, or None if the metadata has none."""
    tokenizer = metadata.get("tokenizer")
    if tokenizer is not None and not isinstance(tokenizer, str):
        return tokenizer
    name = tokenizer or metadata.get("pretrained")
    if not isinstance(name, str):
        return None
    return _load(name, tuple((key, metadata[key]) for key in LOAD_OPTIONS if metadata.get(key) is not None))


@cache
def _load(name: str, options: tuple[tuple[str, Any], ...]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name, **dict(options))
