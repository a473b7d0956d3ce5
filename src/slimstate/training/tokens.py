"""The windows of a training: those it is trained on, and those it is measured on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from slimstate.data.corpus import Corpus, Schedule, held_out_count
from slimstate.data.documents import Reading
from slimstate.evaluation.perplexity import TextSize, evaluation_windows
from slimstate.system.errors import DataError
from slimstate.system.progress import Reporter
from slimstate.training.options import TrainOptions

MAX_EVAL_LENGTH = 1024  # tokens per window of `eval_text`


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The windows of a training; `held_out` [N, T] are measured on, and `measured_on` says where they are from.

    `size` counts the words and bytes of those.
    """

    corpus: Corpus
    held_out: Tensor
    size: TextSize
    measured_on: str

    @classmethod
    def of_corpus(cls, corpus: Corpus, tokenizer: Any) -> Tokens:
        """Return the tokens of a training that is measured on windows of its own text."""
        windows = corpus.held_out_windows
        return cls(
            corpus=corpus, held_out=windows, size=TextSize.of(tokenizer, windows, contiguous=False),
            measured_on=f"windows of {corpus.source} that were not trained on",
        )  # fmt: skip


def read_tokens(options: TrainOptions, tokenizer: Any, folder: Path, reporter: Reporter) -> Tokens:
    """Return the tokens of a training, read now or stored in the folder by an earlier run."""
    text = options.text
    if text.eval_text is None:
        return Tokens.of_corpus(_corpus(options, tokenizer, folder, reporter), tokenizer)
    length = min(MAX_EVAL_LENGTH, options.length)
    windows = evaluation_windows(tokenizer, Reading(text.eval_text, text.documents), length, text.eval_tokens).tokens
    corpus = _corpus(options, tokenizer, folder, reporter)
    size = TextSize.of(tokenizer, windows)
    return Tokens(corpus=corpus, held_out=windows, size=size, measured_on=str(text.eval_text))


def _corpus(options: TrainOptions, tokenizer: Any, folder: Path, reporter: Reporter) -> Corpus:
    text, samples = options.text, options.samples
    if Corpus.exists_in(folder):
        corpus = Corpus.open(folder)
    else:
        held_out = held_out_count(samples) if text.eval_text is None else 0
        with reporter.waiting(f"reading {text.data}"):
            reading = Reading(text.data, text.documents)
            corpus = Corpus.collect(tokenizer, reading, options.length, samples, held_out, folder)
    epochs = Schedule(corpus, samples, text.seed).epochs
    if epochs > 1:
        size = f"{corpus.source} has {corpus.count - corpus.held_out:,} windows of {corpus.length} tokens to train on"
        line = f"{size}, the training takes {samples:,}: {epochs:.2f} epochs"
        if text.no_repeat:
            raise DataError(f"{line}; with `no_repeat` at most `steps` {int(samples / epochs) // options.batch_size}")
        reporter.say(line)
    return corpus
