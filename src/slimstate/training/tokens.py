"""What a training reads, as tokens: the windows it is trained on, and those it is measured on."""

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
from slimstate.training.options import TrainingText, TrainOptions

LONGEST_MEASURED = 1024  # tokens of a window of another text


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The windows of a training; `held_out` [N, T] are measured on, and `measured_on` says where they are from.

    `size` counts the words and bytes of those.
    """

    corpus: Corpus
    held_out: Tensor
    size: TextSize
    measured_on: str


def read_tokens(text: TrainingText, options: TrainOptions, tokenizer: Any, folder: Path, reporter: Reporter) -> Tokens:
    """Read now, or left in the folder by an earlier run."""
    if text.eval_text is None:
        corpus = _corpus(text, options, tokenizer, folder, reporter)
        measured_on = f"windows of {text.data} that were not trained on"
        held_out = corpus.held_out_windows
        size = TextSize.of(tokenizer, held_out, apart=True)
        return Tokens(corpus=corpus, held_out=held_out, size=size, measured_on=measured_on)
    length = min(LONGEST_MEASURED, options.length)
    unseen = evaluation_windows(tokenizer, Reading(text.eval_text, text.documents), length, text.eval_tokens).tokens
    corpus = _corpus(text, options, tokenizer, folder, reporter)
    size = TextSize.of(tokenizer, unseen)
    return Tokens(corpus=corpus, held_out=unseen, size=size, measured_on=str(text.eval_text))


def _corpus(text: TrainingText, options: TrainOptions, tokenizer: Any, folder: Path, reporter: Reporter) -> Corpus:
    samples = options.samples
    if Corpus.exists_in(folder):
        corpus = Corpus.open(folder)
    else:
        held_out = held_out_count(samples) if text.eval_text is None else 0
        reading = Reading(text.data, text.documents)
        with reporter.waiting(f"reading {text.data}"):
            corpus = Corpus.collect(tokenizer, reading, options.length, samples, held_out, folder)
    epochs = Schedule(corpus, samples, options.seed).epochs
    if epochs > 1:
        size = f"{corpus.source} has {corpus.count - corpus.held_out:,} windows of {corpus.length} tokens to train on"
        line = f"{size}, {samples:,} are wanted: {epochs:.2f} epochs"
        if text.no_repeat:
            most = int(samples / epochs) // options.batch_size
            raise DataError(f"{line}; with `no_repeat` at most `steps` {most}")
        reporter.say(line)
    return corpus
