"""Measure one model: perplexity of a text, tasks of lm-eval, associative recall; and compare two results."""

import statistics
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.standard_errors import standard_error
from slimstate.core.state_dtype import StateRounding
from slimstate.data.documents import Reading
from slimstate.data.text import Windows
from slimstate.evaluation.associative_recall import associative_recall, recall_tokens
from slimstate.evaluation.lm_eval import run_tasks
from slimstate.evaluation.options import MeasureOptions
from slimstate.evaluation.perplexity import TextSize, perplexity_of, window_nats
from slimstate.evaluation.wikitext import WikiText, add_words
from slimstate.models.load import Runtime, load_with
from slimstate.models.options import RunOptions
from slimstate.models.state_rounding import rounded_states
from slimstate.records.evaluation import MeasurePair, Result
from slimstate.system.progress import Reporter
from slimstate.system.value import Value


class Measurement(Value):
    """What to measure: perplexity where there are windows of a text, recall in the text, tasks where some are named."""

    text: Reading | None
    windows: Windows | None
    wikitext: WikiText | None
    associative: bool
    options: MeasureOptions
    seed: int
    run: RunOptions
    reporter: Reporter

    def measure_all(self, checkpoints: Mapping[str, Checkpoint], rounding: StateRounding) -> list[Result]:
        """Return the measures of a model, whose states are rounded, and of its baseline, whose are not."""
        if (advice := rounding.advice()) is not None:
            self.reporter.say(advice)
        recall = recall_tokens(max_tokens=self.options.max_tokens) * self.associative
        tokens = 0 if self.windows is None else self.windows.tokens.numel() + recall
        (name, checkpoint), *others = checkpoints.items()
        with self._then("the baseline", tokens * rounding.is_exact, bool(others)):
            results = [self.measure(checkpoint, name, rounding)]
        return results + [self.measure(checkpoint, name, StateRounding()) for name, checkpoint in others]

    def measure(self, checkpoint: Checkpoint, name: str, rounding: StateRounding) -> Result:
        """Load a model and return all its measures, with its states stored as `rounding` says."""
        with self.reporter.waiting("loading the model"):
            runtime = load_with(self.run, checkpoint.folder)
        self.reporter.detail(f"kernels: {runtime.kernels}")
        mixers, options = checkpoint.mixers, self.options
        scores: dict[str, Any] = {}
        with rounded_states(runtime.model, mixers, rounding):
            with self._then("the tasks", 0, bool(options.tasks)):
                if self.windows is not None:
                    with self._then("the recall", recall_tokens(max_tokens=options.max_tokens), self.associative):
                        scores = self._predict(runtime, self.windows)
                if self.text is not None and self.associative:
                    scores["associative_recall"] = associative_recall(
                        runtime, self.text, seed=self.seed, max_tokens=options.max_tokens, reporter=self.reporter
                    )
            if options.tasks:
                scores["lm_eval"] = run_tasks(runtime, options, seed=self.seed, reporter=self.reporter)
        return Result(
            **vars(checkpoint.identity(name)), **scores, kernels=runtime.kernels, state_dtype=rounding.dtype,
            state_every=None if rounding.is_exact else rounding.every,
            state_bytes=rounding.state_bytes(mixers, mixers[0].axis.width),
        )  # fmt: skip

    def _then(self, work: str, tokens: int, follows: bool) -> AbstractContextManager[object]:
        return self.reporter.then(work, tokens) if follows else nullcontext()

    def _predict(self, runtime: Runtime, windows: Windows) -> dict[str, Any]:
        """Return how well the text is predicted, by the names that this has in records."""
        tokens = windows.tokens
        with self._then("the word perplexity", tokens.numel(), self.wikitext is not None):
            by_window, size = window_nats(runtime, tokens, self.reporter), TextSize.of(runtime.tokenizer, tokens)
        nats = statistics.fmean(by_window)
        return {
            "text": windows.source, "digest": windows.digest, "documents": windows.documents, "windows": len(tokens),
            "length": tokens.shape[1], "perplexity": perplexity_of(nats), "nats_per_token": nats,
            "nats_error": standard_error(by_window), "window_nats": tuple(by_window),
            "nats_per_byte": size.nats_per_byte(nats), **vars(add_words(size.scores(nats), self.wikitext, runtime)),
        }  # fmt: skip


def compare(result: Result, baseline: Result) -> tuple[MeasurePair, ...]:
    """Return the numbers of both models side by side; a share of 1 is all of the baseline's score."""
    references, rows = {measure.name: measure for measure in baseline.measures()}, []
    for measure in result.measures():
        if (other := references.get(measure.name)) is None:
            continue
        value, reference = measure.value, other.value
        if value is not None and reference is not None and measure.more_is_better is not None:
            above, below = (measure, other) if measure.more_is_better else (other, measure)
            share = share_error = None
            if above.value is not None and below.value:
                share = above.value / below.value
                error = above.difference_error(below, share)
                share_error = None if error is None else error / abs(below.value)
            rows.append(
                MeasurePair(
                    measure=measure.name, model=value, baseline=reference, share=share, share_error=share_error,
                    error=measure.difference_error(other),
                )
            )  # fmt: skip
    return tuple(rows)
