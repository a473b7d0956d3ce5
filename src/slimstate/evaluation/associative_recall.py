"""Associative recall, the known weakness of a small state, measured without any download.

Names of two words, a key and a value, stand at random places of real text; at its end the keys come again, and the
model has to predict the values. Both are single tokens that a seed pairs, so only the state can know the answers. Small
language models can do this with names, which text repeats, and hardly with other words.
"""

import hashlib
import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slimstate.core.standard_errors import share_error
from slimstate.data.documents import Reading
from slimstate.data.text import windows
from slimstate.models.load import Runtime
from slimstate.records.evaluation import AssociativeRecall, RecallPoint
from slimstate.system.errors import DataError
from slimstate.system.progress import SILENT, Reporter
from slimstate.system.value import Value

PAIRS, SEQUENCES, LENGTH = (2, 4, 8, 16, 32), 8, 512
CANDIDATES = 64  # values to choose among
MAX_QUESTIONS = 16  # at the end of a sequence
MIN_QUESTIONS = 64  # for each number of pairs
BATCH = {"cpu": 1, "cuda": 16}  # sequences
NAME = re.compile(" [A-Z][a-z]{2,}")
BEFORE, AFTER = "\n", " ."


def associative_recall(
    runtime: Runtime, text: str | Reading | Tensor, *, pairs: Sequence[int] = PAIRS, sequences: int = SEQUENCES,
    length: int = LENGTH, seed: int = 0, max_tokens: int | None = None, reporter: Reporter = SILENT,
) -> AssociativeRecall:  # fmt: skip
    """Return the share of correct answers by the number of pairs to remember; `accuracy` is among the candidates.

    `exact` is among all tokens. The model reads at most `max_tokens`, but one sequence for every number of pairs.
    """
    generator = torch.Generator().manual_seed(seed)
    keys, values = draw_vocabulary(runtime.tokenizer, max(pairs), generator)
    source = text if isinstance(text, Tensor) else Reading.of(text)
    builder = SequenceBuilder.read(runtime.tokenizer, source, keys, values, length)
    points, digest = [], hashlib.sha256()
    limit = None if max_tokens is None else max(1, max_tokens // (length * len(pairs)))
    for count in reporter.track(pairs, "associative recall", len(pairs)):
        size = _size(count, sequences)
        probe = builder.probe(count, size if limit is None else min(size, limit), generator)
        digest.update(probe.tokens.numpy().tobytes())
        chosen, likeliest = _answers(runtime, probe, values)
        correct, exact = (chosen == probe.answers).double(), (likeliest == probe.answers).double()
        scores = {"accuracy": float(correct.mean()), "exact": float(exact.mean())}
        error, shares = share_error(float(correct.sum()), correct.numel()), tuple(correct.mean(1).tolist())
        points.append(RecallPoint(pairs=count, **scores, questions=correct.numel(), stderr=error, shares=shares))
    return AssociativeRecall(
        points=tuple(points), mean=sum(point.accuracy for point in points) / len(points), candidates=len(values),
        stderr=math.hypot(*(point.stderr or 0.0 for point in points)) / len(points),
        sequences=sequences if limit is None else min(sequences, limit), length=length, seed=seed,
        digest=f"sha256:{digest.hexdigest()}",
    )  # fmt: skip


def _size(pairs: int, sequences: int) -> int:
    return max(sequences, -(-MIN_QUESTIONS // min(pairs, MAX_QUESTIONS)))


def recall_tokens(sequences: int = SEQUENCES, max_tokens: int | None = None) -> int:
    """Return how many tokens a model reads for its recall."""
    tokens = LENGTH * sum(_size(pairs, sequences) for pairs in PAIRS)
    return tokens if max_tokens is None else min(tokens, max(max_tokens, LENGTH * len(PAIRS)))


def recall_change(recall: AssociativeRecall, uncut: AssociativeRecall) -> tuple[float, float | None]:
    """Return the difference of the means and its standard error, over the sequences that both models read."""
    mean, other = next(recall.measures()), next(uncut.measures())
    return (mean.value or 0.0) - (other.value or 0.0), mean.difference_error(other)


def draw_vocabulary(tokenizer: Any, pairs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw tokens for keys and tokens for values: capitalised words where the tokenizer has enough of them."""
    excluded = {*tokenizer.all_special_ids, *_ids(tokenizer, BEFORE).tolist(), *_ids(tokenizer, AFTER).tolist()}
    usable = [number for number in range(len(tokenizer)) if number not in excluded]
    anchor = _ids(tokenizer, AFTER)[-1:].tolist()  # a token by itself may lose its leading space
    texts = tokenizer.batch_decode([[*anchor, number] for number in usable])
    start = len(tokenizer.decode(anchor))
    names = [number for number, text in zip(usable, texts, strict=True) if NAME.fullmatch(text[start:])]
    pool = names if len(names) >= pairs + CANDIDATES else usable
    if len(pool) < 2 * pairs:
        raise DataError(f"the tokenizer has {len(pool)} tokens, too few for {pairs} keys and as many values")
    order = torch.tensor(pool)[torch.randperm(len(pool), generator=generator)]
    candidates = min(CANDIDATES, len(pool) // 2)
    return order[candidates:], order[:candidates]


def _ids(tokenizer: Any, text: str) -> Tensor:
    return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.long)


class Probe(Value):
    """Sequences [n, T], and the positions [n, Q] after which an answer [n, Q] is due."""

    tokens: Tensor
    positions: Tensor
    answers: Tensor


class SequenceBuilder(Value):
    """Build sequences of `length` tokens from text, keys and values, and the tokens before and after a pair."""

    filler: Tensor
    keys: Tensor
    values: Tensor
    before: Tensor
    after: Tensor
    length: int

    @classmethod
    def read(
        cls, tokenizer: Any, text: Reading | Tensor, keys: Tensor, values: Tensor, length: int
    ) -> "SequenceBuilder":
        """Return a builder with tokens, or the first of a text, enough for sequences to start at different places."""
        parts = [text.flatten()] if isinstance(text, Tensor) else windows(tokenizer, text, length, max_windows=64)
        filler = torch.cat(list(parts)).long()
        if len(filler) < length:
            source = text.source if isinstance(text, Reading) else "the text"
            raise DataError(f"{source} has {len(filler)} tokens; associative recall needs at least {length}")
        marks = {"before": _ids(tokenizer, BEFORE), "after": _ids(tokenizer, AFTER)}
        return cls(filler=filler, keys=keys, values=values, length=length, **marks)

    def probe(self, pairs: int, sequences: int, generator: torch.Generator) -> Probe:
        """Return sequences of equal length: text with pairs at random places, then questions with their answers."""
        questions, sentence = min(pairs, MAX_QUESTIONS), len(self.before) + len(self.after) + 2
        rest = self.length - (pairs + questions) * sentence
        if rest < pairs + 1:
            length = (pairs + questions) * sentence + pairs + 1
            raise DataError(f"{pairs} pairs need {length} tokens, more than the length {self.length}")
        tokens, answers = [], []
        for _ in range(sequences):
            start = int(torch.randint(len(self.filler) - rest + 1, (1,), generator=generator))
            text = self.filler[start : start + rest]
            keys = _draw(self.keys[~torch.isin(self.keys, text)], pairs, generator)
            values = _draw(self.values, pairs, generator)
            places = _draw(torch.arange(1, rest), pairs, generator).sort().values
            first, *chunks = text.tensor_split(places.tolist())
            parts = [first]
            for chunk, key, value in zip(chunks, keys, values, strict=True):
                parts += [self._sentence(key, value), chunk]
            order = _draw(torch.arange(pairs), questions, generator)
            parts += [self._sentence(keys[number], values[number]) for number in order.tolist()]
            tokens.append(torch.cat(parts))
            answers.append(values[order])
        positions = self.length - questions * sentence + torch.arange(questions) * sentence + len(self.before)
        return Probe(
            tokens=torch.stack(tokens), positions=positions.expand(sequences, -1), answers=torch.stack(answers)
        )

    def _sentence(self, key: Tensor, value: Tensor) -> Tensor:
        return torch.cat([self.before, key.view(1), value.view(1), self.after])


def _draw(pool: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw members of the pool, each once, in random order."""
    if len(pool) < count:
        raise DataError(f"{count} pairs need as many words that are not in the text around them; there are {len(pool)}")
    return pool[torch.randperm(len(pool), generator=generator)[:count]]


def _answers(runtime: Runtime, probe: Probe, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the likeliest of the candidates, and of all tokens, at the positions of a probe."""
    chosen, likeliest = [], []
    size = BATCH[runtime.device.type]
    for tokens, positions in zip(probe.tokens.split(size), probe.positions.split(size), strict=True):
        with torch.inference_mode():
            logits = runtime.model(input_ids=tokens.to(runtime.device), use_cache=False).logits
        due = logits.gather(1, positions.to(logits.device).unsqueeze(-1).expand(-1, -1, logits.shape[-1])).float().cpu()
        chosen.append(values[due[..., values].argmax(-1)])
        likeliest.append(due.argmax(-1))
    return torch.cat(chosen), torch.cat(likeliest)
