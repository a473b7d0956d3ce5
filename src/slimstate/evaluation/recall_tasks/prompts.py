"""Prompts and scores of the recall tasks: the document first, the question last, and whether the text has the answer.

A prompt is two strings, document and question, so that the document can be truncated and the question cannot.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Document = Mapping[str, Any]
SUMMARY = "Summary of information above..."
MARKS = re.compile(r"\[(?:PAR|DOC|TLE)\]")  # of TriviaQA: paragraph, document, title
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n\s*")


def fda(document: Document) -> tuple[str, str]:
    return _join(_without(document["text"], document["key"] + ":").strip("\n"), _as_heading(document["key"]))


def swde(document: Document) -> tuple[str, str]:
    body = _without(document["text"].split(SUMMARY)[0], document["key"] + ":")
    return _join(body.strip(), _as_heading(document["key"]))


def squad(document: Document) -> tuple[str, str]:
    """Return the last statement of the text as the question; it breaks off where the answer belongs."""
    text = document["text"].strip()
    start = max((end.start() for end in SENTENCE_END.finditer(text)), default=0)
    return text[:start], text[start:]


def question(document: Document) -> tuple[str, str]:
    return _with_question(document["context"].strip(), document["question"].strip())


def triviaqa(document: Document) -> tuple[str, str]:
    return _with_question(MARKS.sub("", document["context"].strip()), document["question"].strip())


def score_value(document: Document, results: Sequence[str]) -> dict[str, int]:
    return {"contains": contains(results[0], [document["value"]])}


def score_answers(document: Document, results: Sequence[str]) -> dict[str, int]:
    return {"contains": contains(results[0], document["answers"])}


def contains(text: str, answers: Iterable[str]) -> int:
    """Return 1 if any of the answers occurs in the text, in upper or lower case."""
    return int(any(answer and re.search(re.escape(answer), text, re.IGNORECASE) for answer in answers))


def _with_question(context: str, question: str) -> tuple[str, str]:
    return _join(_without(context, question).strip(), question)


def _join(body: str, question: str) -> tuple[str, str]:
    return body.strip("."), f". {question}"


def _as_heading(key: str) -> str:
    return f"{key[:1].upper()}{key[1:]}:"


def _without(text: str, question: str) -> str:
    """Return the text without the question at its end."""
    while question and text.lower().endswith(question.lower()):
        text = text[: -len(question)]
    return text
