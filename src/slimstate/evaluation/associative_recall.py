"""Associative recall, the known weak spot of a small state, measured with no download.

Names of two words, a key and a value, stand here and there in real text; at its end the first words come again, and
the model has to say the second. Both are single tokens paired by a seed, so only the state can know the answers. Small
language models do this with names, which text repeats, and hardly with other words.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimstate.data.documents import Reading
from slimstate.data.text import windows
from slimstate.models.load import Runtime
from slimstate.records.evaluation import AssociativeRecall, RecallPoint
from slimstate.system.errors import DataError
from slimstate.system.progress import SILENT, Reporter

PAIRS = (2, 4, 8, 16, 32)
CANDIDATES = 64  # values to choose among; chance is one in so many
QUESTIONS = 16  # asked at the end of a sequence, at most
AT_LEAST = 64  # questions for each number of pairs
SEQUENCES_AT_ONCE = {"cpu": 1, "cuda": 16}
NAME = re.compile(" [A-Z][a-z]{2,}")
BEFORE, AFTER = "\n", " ."


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Sequences [n, T] with the positions [n, Q] after which an answer [n, Q] is due."""

    tokens: Tensor
    positions: Tensor
    answers: Tensor


def associative_recall(
    runtime: Runtime,
    text: str | Reading,
    *,
    pairs: Sequence[int] = PAIRS,
    sequences: int = 8,
    length: int = 512,
    seed: int = 0,
    max_tokens: int | None = None,
    reporter: Reporter = SILENT,
) -> AssociativeRecall:
    """The share of questions answered, by the number of pairs to remember; the model reads `max_tokens` at most.

    But every number of pairs is asked in one sequence at least. `accuracy` takes the likeliest of the candidate values,
    `exact` the likeliest of all tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    keys, values = draw_vocabulary(runtime.tokenizer, max(pairs), generator)
    filler = _filler(runtime.tokenizer, Reading.of(text), length)
    points, digest = [], hashlib.sha256()
    most = None if max_tokens is None else max(1, max_tokens // (length * len(pairs)))
    for count in reporter.track(pairs, "associative recall", len(pairs)):
        enough = max(sequences, -(-AT_LEAST // min(count, QUESTIONS)))
        enough = enough if most is None else min(enough, most)
        probe = make_probe(runtime.tokenizer, filler, keys, values, count, enough, length, generator)
        digest.update(probe.tokens.numpy().tobytes())
        chosen, likeliest = _answers(runtime, probe, values)
        right, exact = (chosen == probe.answers).double(), (likeliest == probe.answers).double()
        share = float(right.mean())
        points.append(
            RecallPoint(
                pairs=count,
                accuracy=share,
                stderr=math.sqrt(share * (1 - share) / right.numel()),
                exact=float(exact.mean()),
                questions=right.numel(),
            )
        )
    return AssociativeRecall(
        points=tuple(points),
        mean=sum(point.accuracy for point in points) / len(points),
        candidates=len(values),
        sequences=sequences if most is None else min(sequences, most),
        length=length,
        seed=seed,
        digest=f"sha256:{digest.hexdigest()}",
    )


def draw_vocabulary(tokenizer: Any, pairs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens to be keys and tokens to be values: capitalised words where the tokenizer has enough of them."""
    taken = {*tokenizer.all_special_ids, *_ids(tokenizer, BEFORE).tolist(), *_ids(tokenizer, AFTER).tolist()}
    usable = [number for number in range(len(tokenizer)) if number not in taken]
    texts = tokenizer.batch_decode([[number] for number in usable])
    names = [number for number, text in zip(usable, texts, strict=True) if NAME.fullmatch(text)]
    pool = names if len(names) >= pairs + CANDIDATES else usable
    if len(pool) < 2 * pairs:
        raise DataError(f"the tokenizer has {len(pool)} tokens, too few for {pairs} keys and as many values")
    order = torch.tensor(pool)[torch.randperm(len(pool), generator=generator)]
    candidates = min(CANDIDATES, len(pool) // 2)
    return order[candidates:], order[:candidates]


def _ids(tokenizer: Any, text: str) -> Tensor:
    return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.long)


def _filler(tokenizer: Any, text: Reading, length: int) -> Tensor:
    """The first tokens of the text, enough for every sequence to start elsewhere in them."""
    tokens = torch.cat(list(windows(tokenizer, text, length, max_windows=64))).long()
    if len(tokens) < length:
        raise DataError(f"{text.source} has {len(tokens)} tokens; associative recall over {length} needs as many")
    return tokens


def make_probe(
    tokenizer: Any,
    filler: Tensor,
    keys: Tensor,
    values: Tensor,
    pairs: int,
    sequences: int,
    length: int,
    generator: torch.Generator,
) -> Probe:
    """Sequences of equal length: text with `pairs` sentences in random places, then questions with their answers."""
    before, after = _ids(tokenizer, BEFORE), _ids(tokenizer, AFTER)
    sentence = len(before) + len(after) + 2
    questions = min(pairs, QUESTIONS)
    rest = length - (pairs + questions) * sentence
    if rest < pairs + 1:
        raise DataError(f"{pairs} pairs need {(pairs + questions) * sentence} of {length} tokens: too many")

    def say(key: Tensor, value: Tensor) -> Tensor:
        return torch.cat([before, key.view(1), value.view(1), after])

    tokens, positions, answers = [], [], []
    for _ in range(sequences):
        start = int(torch.randint(len(filler) - rest + 1, (1,), generator=generator))
        around = filler[start : start + rest]
        said = _draw(keys[~torch.isin(keys, around)], pairs, generator)
        meant = _draw(values, pairs, generator)
        places = _draw(torch.arange(1, rest), pairs, generator).sort().values
        chunks = around.tensor_split(places.tolist())
        story = [chunks[0]]
        for chunk, key, value in zip(chunks[1:], said, meant, strict=True):
            story += [say(key, value), chunk]
        asked = _draw(torch.arange(pairs), questions, generator)
        story += [say(said[number], meant[number]) for number in asked.tolist()]
        tokens.append(torch.cat(story))
        positions.append(length - questions * sentence + torch.arange(questions) * sentence + len(before))
        answers.append(meant[asked])
    return Probe(tokens=torch.stack(tokens), positions=torch.stack(positions), answers=torch.stack(answers))


def _draw(pool: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """So many of the pool, each once, in random order."""
    if len(pool) < count:
        raise DataError(f"{count} pairs need as many words that the text around them has not; there are {len(pool)}")
    return pool[torch.randperm(len(pool), generator=generator)[:count]]


def _answers(runtime: Runtime, probe: Probe, values: Tensor) -> tuple[Tensor, Tensor]:
    """What the model says, out of the candidates and out of all tokens."""
    chosen, likeliest = [], []
    size = SEQUENCES_AT_ONCE[runtime.device.type]
    for tokens, positions in zip(probe.tokens.split(size), probe.positions.split(size), strict=True):
        with torch.inference_mode():
            logits = runtime.model(input_ids=tokens.to(runtime.device), use_cache=False).logits
        due = logits.gather(1, positions.to(logits.device).unsqueeze(-1).expand(-1, -1, logits.shape[-1])).float().cpu()
        chosen.append(values[due[..., values].argmax(-1)])
        likeliest.append(due.argmax(-1))
    return torch.cat(chosen), torch.cat(likeliest)
