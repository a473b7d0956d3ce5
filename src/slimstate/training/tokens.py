"""The windows of a training: those it is trained on, and those on which models are measured before and after."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from slimstate.checkpoints.reader import Checkpoint
from slimstate.checkpoints.safetensors_io import DTYPES
from slimstate.core.standard_errors import standard_error
from slimstate.data.corpus import Corpus, Schedule, held_out_count
from slimstate.data.sources import is_same_text
from slimstate.evaluation.associative_recall import associative_recall, recall_tokens
from slimstate.evaluation.perplexity import TextSize, evaluation_windows, perplexity_of, window_nats
from slimstate.evaluation.wikitext import WikiText, add_words, read_wikitext
from slimstate.models.load import Runtime, load_with
from slimstate.models.options import RunOptions
from slimstate.records.numbers import plural
from slimstate.records.parts import TextScores
from slimstate.records.training import MIN_EVAL_TOKENS, Measurements, Nats
from slimstate.system.errors import DataError
from slimstate.system.progress import Reporter
from slimstate.system.value import Value
from slimstate.training.options import TrainOptions

MAX_EVAL_LENGTH = 1024  # tokens per window of `eval_text`
MIN_GAP = 0.01  # nats per token; a share of a smaller gap says nothing


class Tokens(Value):
    """The windows of a training; `held_out` [N, T] are measured on, and `measured_on` says where they are from.

    `size` counts their bytes; `wikitext` are pages for the word perplexity, where the text has any.
    """

    corpus: Corpus
    held_out: Tensor
    size: TextSize
    measured_on: str
    wikitext: WikiText | None = None

    @classmethod
    def of_corpus(cls, corpus: Corpus, tokenizer: Any) -> "Tokens":
        """Return the tokens of a training that is measured on windows of its own text."""
        windows = corpus.held_out_windows
        return cls(
            corpus=corpus, held_out=windows, size=TextSize.of(tokenizer, windows, contiguous=False),
            measured_on=f"windows of {corpus.source} that were not trained on",
        )  # fmt: skip

    def measurements(
        self, nats: Nats, windows: Mapping[str, Sequence[float]], word_perplexity: Mapping[str, float | None]
    ) -> Measurements:
        """Return nats per token with perplexities, bits per byte, and the shares of the gaps that were closed."""
        values, size, before = nats.by_name(), self.size, windows["before"]
        least = {name: max(MIN_GAP, 2 * (standard_error(before, each) or 0.0)) for name, each in windows.items()}
        words = None if self.wikitext is None else sum(self.wikitext.page_words)
        return Measurements(
            text=self.measured_on, tokens=size.tokens, words=words, bytes=size.bytes, nats=nats,
            perplexity={name: perplexity_of(value) for name, value in values.items()},
            word_perplexity=word_perplexity,
            bits_per_byte={name: size.scores(value).bits_per_byte for name, value in values.items()},
            window_nats={name: tuple(each) for name, each in windows.items()},
            nats_error={name: standard_error(each) for name, each in windows.items()},
            gain_error=standard_error(windows["after"], before),
            closed={
                goal: (nats.before - nats.after) / gap if (gap := nats.before - values[goal]) > least[goal] else None
                for goal in ("uncut", "control")
                if goal in values
            },
        )  # fmt: skip


def measure(
    student: Checkpoint, weights: Mapping[str, Tensor], tokens: Tokens, run: RunOptions,
    teacher: Checkpoint | None, control: Measurements | None, reporter: Reporter,
) -> Measurements:  # fmt: skip
    """Return the scores of the student before and after training, of the uncut model, and of its control.

    `weights` are those that training changed; they are measured as they will be stored. `control` are those of
    the uncut model before and after its own training.
    """
    words: dict[str, float | None] = {}
    windows: dict[str, Sequence[float]] = {}
    recall: dict[str, tuple[float, float]] = {}
    residuals: dict[str, tuple[float, ...]] = {}

    def score(runtime: Runtime, stage: str) -> None:
        if tokens.held_out.numel() >= recall_tokens():
            result = associative_recall(runtime, tokens.held_out, reporter=reporter)
            recall[stage] = (result.mean or 0.0, result.stderr or 0.0)
            residuals[stage] = next(result.measures()).residuals
        if tokens.wikitext is not None:
            words[stage] = add_words(TextScores(), tokens.wikitext, runtime).word_perplexity
        label = "the uncut model" if stage == "uncut" else stage
        windows[stage] = window_nats(runtime, tokens.held_out, reporter, f"measuring {label}")

    runtime = load_with(run, student.folder)
    score(runtime, "before")
    as_stored = {
        name: tensor.to(DTYPES[student.tensors[stored[0]].dtype])
        for name, tensor in weights.items()
        if (stored := student.stored_names(name))
    }
    runtime.model.load_state_dict(as_stored, strict=False)
    score(runtime, "after")
    del runtime  # so that one model at a time is in memory
    if control is None and teacher is not None and teacher.fingerprint != student.fingerprint:
        score(load_with(run, teacher.folder), "uncut")
    nats = {stage: statistics.fmean(each) for stage, each in windows.items()}
    if control is not None:
        for stage, name in (("uncut", "before"), ("control", "after")):
            nats[stage], windows[stage] = control.nats.by_name()[name], control.window_nats.get(name, ())
            words[stage] = control.word_perplexity.get(name)
            recall |= {stage: control.recall[name]} if name in control.recall else {}
            residuals[stage] = control.recall_residuals.get(name, ())
    return replace(tokens.measurements(Nats(**nats), windows, words), recall=recall, recall_residuals=residuals)


def read_tokens(options: TrainOptions, tokenizer: Any, folder: Path, reporter: Reporter) -> Tokens:
    """Return the tokens of a training, read now or stored in the folder by an earlier run."""
    text = options.text
    if text.eval_text is None:
        tokens = Tokens.of_corpus(_corpus(options, tokenizer, folder, reporter), tokenizer)
        if tokens.size.tokens < MIN_EVAL_TOKENS:
            count = f"{tokens.size.tokens:,} held-out tokens"
            reporter.say(f"measuring on {count}, too few to compare models: hold out more (`eval_tokens`)")
        return tokens
    if is_same_text(text.eval_text, text.data):
        reporter.say("the evaluation text is also the training text, which models fit better than other text")
    length = min(MAX_EVAL_LENGTH, options.length)
    windows = evaluation_windows(tokenizer, text.reading(text.eval_text), length, text.eval_tokens).tokens
    corpus = _corpus(options, tokenizer, folder, reporter)
    size = TextSize.of(tokenizer, windows)
    wikitext = read_wikitext(text.eval_text, tokenizer, reporter, max_tokens=text.eval_tokens)
    return Tokens(corpus=corpus, held_out=windows, size=size, measured_on=str(text.eval_text), wikitext=wikitext)


def _corpus(options: TrainOptions, tokenizer: Any, folder: Path, reporter: Reporter) -> Corpus:
    text, samples = options.text, options.samples
    if Corpus.exists_in(folder):
        corpus = Corpus.open(folder)
    else:
        held_out = held_out_count(samples) if text.eval_text is None else 0
        exact = text.eval_text is None and text.eval_tokens is not None
        if exact:
            held_out = math.ceil((text.eval_tokens or 0) / options.length)
        with reporter.waiting(f"reading {text.data}"):
            reading = text.reading(text.data)
            corpus = Corpus.collect(tokenizer, reading, options.length, samples, held_out, folder, exact=exact)
    epochs = Schedule(corpus, samples, text.seed).epochs
    if epochs > 1:
        windows = plural(corpus.count - corpus.held_out, "window")
        size = f"{corpus.source} has {windows} of {corpus.length} tokens to train on"
        line = f"{size}, the training takes {samples:,}: {epochs:.2f} epochs"
        if text.no_repeat:
            raise DataError(f"{line}; with `no_repeat` at most `steps` {int(samples / epochs) // options.batch_size}")
        reporter.say(line)
    return corpus
