"""Prompts and scores of the recall tasks: the document first, the question last, and is the answer in the text?

A prompt comes as two strings, so that the document can be cut and the question cannot; joined they are the whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Document = Mapping[str, Any]
SUMMARY = "Summary of information above..."
MARKS = re.compile(r"\[(?:PAR|DOC|TLE)\]")  # of TriviaQA: paragraph, document, title
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n\s*")


def fda(document: Document) -> tuple[str, str]:
    body = _before(document["text"], document["key"] + ":")
    return _ask(body.strip("\n"), _as_heading(document["key"]))


def swde(document: Document) -> tuple[str, str]:
    body = _before(document["text"].split(SUMMARY)[0], document["key"] + ":")
    return _ask(body.strip(), _as_heading(document["key"]))


def squad(document: Document) -> tuple[str, str]:
    """The text ends with a statement that breaks off where the answer belongs; it is the question."""
    text = document["text"].strip()
    start = max((end.start() for end in SENTENCE_END.finditer(text)), default=0)
    return text[:start], text[start:]


def question(document: Document) -> tuple[str, str]:
    return _question_on(document["context"].strip(), document["question"].strip())


def triviaqa(document: Document) -> tuple[str, str]:
    return _question_on(MARKS.sub("", document["context"].strip()), document["question"].strip())


def score_value(document: Document, results: Sequence[str]) -> dict[str, int]:
    return {"contains": contains(results[0], [document["value"]])}


def score_answers(document: Document, results: Sequence[str]) -> dict[str, int]:
    return {"contains": contains(results[0], document["answers"])}


def contains(text: str, answers: Iterable[str]) -> int:
    """1 if any of the answers occurs in the text, in whatever case."""
    return int(any(answer and re.search(re.escape(answer), text, re.IGNORECASE) for answer in answers))


def _question_on(context: str, asked: str) -> tuple[str, str]:
    return _ask(_before(context, asked).strip(), asked)


def _ask(body: str, asked: str) -> tuple[str, str]:
    return body.strip("."), f". {asked}"


def _as_heading(key: str) -> str:
    return f"{key[:1].upper()}{key[1:]}:"


def _before(text: str, asked: str) -> str:
    """The text without the question, where it already ends with it."""
    while asked and text.lower().endswith(asked.lower()):
        text = text[: -len(asked)]
    return text
