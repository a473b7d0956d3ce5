"""Word perplexity of WikiText as lm-eval's task `wikitext` defines it, which is the paper's.

lm-eval detokenises every page, scores it in windows of the model's context, and divides by the words that the page had
before. The text as it is stored, with ` @-@ ` and ` , `, gives other numbers, and other ratios between two models.
"""

import hashlib
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
    def page_words(self) -> tuple[int, ...]:
        return tuple(len(re.split(r"\s+", page)) for page in self.pages)  # as in lm-eval, ends of a page included

    @property
    def digest(self) -> str:
        return f"sha256:{hashlib.sha256(repr(self.pages).encode()).hexdigest()}"

    def page_nats(self, runtime: Runtime) -> tuple[float, ...]:
        """Return the negative log likelihood of each page."""
        from lm_eval.api.instance import Instance
        from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

        requests = [
            Instance(request_type="loglikelihood_rolling", doc=page, arguments=(wikitext_detokenizer(page),), idx=0)
            for page in ({"page": page} for page in self.pages)
        ]
        with silence():
            likelihoods = harness_model(runtime, self.max_length).loglikelihood_rolling(requests, disable_tqdm=True)
        if not all(map(math.isfinite, likelihoods)):
            raise ModelError("the model's predictions are NaN or infinite")
        return tuple(-likelihood for likelihood in likelihoods)


def add_words(scores: TextScores, wikitext: WikiText | None, runtime: Runtime) -> TextScores:
    """Return the scores of a text with its word perplexity, if it is WikiText; None where too large for a record."""
    if wikitext is None:
        return scores
    nats, sizes = wikitext.page_nats(runtime), wikitext.page_words
    words, mean = sum(sizes), math.fsum(nats) / sum(sizes)
    perplexity = math.exp(mean) if mean <= MAX_NATS else None
    return replace(scores, word_perplexity=perplexity, words=words, page_nats=nats, page_words=sizes)


def read_wikitext(
    source: str | Texts, tokenizer: Any, reporter: Reporter, *, max_tokens: int | None = None,
    max_length: int | None = None,
) -> WikiText | None:  # fmt: skip
    """Return the pages of a text if it is WikiText: all, or the first with `max_tokens` tokens at most, at least one.

    WikiText starts with a heading, or has one and a name that says WikiText. Where the name says so and there is no
    word perplexity, a line says why.
    """
    pages: list[str] = []
    place = ""
    for page in read_pages(source, renderer(tokenizer)):
        if max_tokens is not None:
            max_tokens -= len(tokenizer(page, add_special_tokens=False, verbose=False)["input_ids"])
            if max_tokens < 0 and pages:
                place = " within `max_tokens`"
                break
        pages.append(page)
    if not any(is_heading(page.split("\n", 1)[0]) for page in pages):
        if pages:
            reporter.say(f"{source} has no heading such as ` = Title = `{place}: not WikiText, so no word perplexity")
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
