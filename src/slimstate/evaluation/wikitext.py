"""Word perplexity of WikiText as lm-eval's task `wikitext` defines it, which is the paper's.

lm-eval detokenises every page, scores it in windows of the model's context, and divides by the words that the page had
before. The text as it is stored, with ` @-@ ` and ` , `, gives other numbers, and other ratios between two models.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slimstate.data.documents import Reading
from slimstate.data.rows import Render, Texts, renderer
from slimstate.evaluation.lm_eval import harness_model, silence
from slimstate.evaluation.perplexity import MAX_NATS
from slimstate.models.load import Runtime
from slimstate.records.parts import TextScores
from slimstate.system.errors import ModelError
from slimstate.system.progress import Reporter
from slimstate.system.value import Value

NAME = re.compile(r"(^|[^a-z])wiki(text|[^a-z]|$)", re.IGNORECASE)  # of a file or folder that says it is WikiText


class WikiText(Value):
    """Pages of WikiText, as they are stored; `max_length` is the most tokens of a window, None that of the model."""

    pages: tuple[str, ...]
    max_length: int | None = None

    @property
    def words(self) -> int:
        return sum(len(re.split(r"\s+", page)) for page in self.pages)  # as in lm-eval, ends of a page included

    def word_perplexity(self, runtime: Runtime) -> float | None:
        """Return the perplexity per word, or None where it is too large for a record."""
        from lm_eval.api.instance import Instance
        from lm_eval.tasks.wikitext.preprocess_wikitext import process_results, wikitext_detokenizer

        documents = [{"page": page} for page in self.pages]
        requests = [
            Instance(
                request_type="loglikelihood_rolling", doc=document, arguments=(wikitext_detokenizer(document),), idx=0
            )
            for document in documents
        ]
        with silence():
            likelihoods = harness_model(runtime, self.max_length).loglikelihood_rolling(requests, disable_tqdm=True)
        pairs = [
            process_results(document, (likelihood,))["word_perplexity"]
            for document, likelihood in zip(documents, likelihoods, strict=True)
        ]
        nats = -sum(likelihood for likelihood, _ in pairs) / sum(words for _, words in pairs)
        if not math.isfinite(nats):
            raise ModelError("the model's predictions are NaN or infinite")
        return math.exp(nats) if nats <= MAX_NATS else None


def add_words(scores: TextScores, wikitext: WikiText | None, runtime: Runtime) -> TextScores:
    """Return the scores of a text with its word perplexity, if it is WikiText."""
    if wikitext is None:
        return scores
    return replace(scores, word_perplexity=wikitext.word_perplexity(runtime), words=wikitext.words)


def read_wikitext(
    source: str | Texts, tokenizer: Any, reporter: Reporter, *, max_tokens: int | None = None,
    max_length: int | None = None,
) -> WikiText | None:  # fmt: skip
    """Return the pages of a text if it is WikiText: all, or the first with `max_tokens` tokens at most, at least one.

    WikiText starts with a heading, or has one and a name that says WikiText. Where the name says so and there is no
    word perplexity, a line says why.
    """
    pages: list[str] = []
    for page in read_pages(source, renderer(tokenizer)):
        if max_tokens is not None:
            max_tokens -= len(tokenizer(page, add_special_tokens=False, verbose=False)["input_ids"])
            if max_tokens < 0 and pages:
                break
        pages.append(page)
    if not any(is_heading(page.split("\n", 1)[0]) for page in pages):
        if pages:
            reporter.say(f"{source} has no heading such as ` = Title = `: it is not WikiText, so no word perplexity")
        return None
    if find_spec("lm_eval") is None:
        reporter.say("lm-eval defines word perplexity and is not installed: pip install 'slimstate[eval]'")
        return None
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        reporter.say(
            "lm-eval needs a tokenizer with a BOS or an EOS token, and this one has neither: no word perplexity"
        )
        return None
    return WikiText(pages=tuple(pages), max_length=max_length)


def read_pages(source: str | Texts, render: Render | None = None) -> Iterator[str]:
    """Yield the text from each first-level heading to the next.

    A text that does not start with one has no pages, unless its name says that it is WikiText.
    """
    lines: list[str] = []
    is_wikitext = NAME.search(Path(str(source)).name) is not None
    for line in _lines(source, render):
        if is_heading(line):
            if any(map(str.strip, lines)):
                yield "\n".join(lines)
            lines, is_wikitext = [], True
        elif line.strip() and not is_wikitext:
            return
        lines.append(line)
    if any(map(str.strip, lines)):
        yield "\n".join(lines)


def is_heading(line: str) -> bool:
    """Return whether a line is ` = Title = `, and not a deeper heading such as ` = = Section = = `."""
    line = line.strip()
    return line.startswith("= ") and line.endswith(" =") and not (line.startswith("= =") or line.endswith("= ="))


def _lines(source: str | Texts, render: Render | None) -> Iterator[str]:
    """Yield the lines of a text without their ends; the last of a document is what follows its last line end."""
    rest = ""
    for piece in Reading(source).pieces(render):
        *lines, rest = (rest + piece.text).split("\n")
        yield from lines
        if piece.ends:
            yield rest
            rest = ""
