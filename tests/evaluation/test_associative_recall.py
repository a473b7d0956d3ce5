"""Associative recall: sequences contain the answers; a perfect memory finds them, a blind model does not."""

from string import ascii_lowercase
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import tiny
from slimstate.data.documents import Reading
from slimstate.data.text import windows
from slimstate.evaluation.associative_recall import (
    CANDIDATES,
    MAX_QUESTIONS,
    SequenceBuilder,
    associative_recall,
    draw_vocabulary,
)
from slimstate.system.errors import DataError


class Memory(torch.nn.Module):
    """A model that predicts what followed the same token the last time or, if blind, always the same token."""

    def __init__(self, blind: bool = False) -> None:
        super().__init__()
        self.blind = blind

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        logits = torch.zeros(*input_ids.shape, 258)
        for row, ids in enumerate(input_ids.tolist()):
            follows: dict[int, int] = {}
            for place, token in enumerate(ids):
                if not self.blind and token in follows:
                    logits[row, place, follows[token]] = 1
                if place + 1 < len(ids):
                    follows[token] = ids[place + 1]
        return SimpleNamespace(logits=logits)


def runtime(blind: bool = False):
    return tiny.runtime(Memory(blind), tiny.tokenizer())


@pytest.fixture(scope="module")
def spaces(tmp_path_factory):
    """Text of one letter only, which has no answers."""
    path = tmp_path_factory.mktemp("text") / "spaces.txt"
    path.write_text("~" * 5000)
    return str(path)


def test_a_memory_answers_and_a_blind_model_guesses(spaces):
    recall = associative_recall(runtime(), spaces, pairs=(2, 8), length=256)
    assert [point.accuracy for point in recall.points] == [1, 1]
    assert [point.exact for point in recall.points] == [1, 1]
    assert recall.mean == 1
    guesses = associative_recall(runtime(blind=True), spaces, pairs=(8,), length=256, sequences=64)
    point = guesses.points[0]
    assert abs(point.accuracy - 1 / recall.candidates) < 5 * (1 / 64 / point.questions) ** 0.5
    assert point.questions == 64 * 8


@pytest.mark.parametrize("pairs", [1, 5, 20])
def test_every_answer_is_in_the_text(pairs, spaces):
    tokenizer, generator = tiny.tokenizer(), torch.Generator().manual_seed(3)
    keys, values = draw_vocabulary(tokenizer, pairs, generator)
    assert not set(keys.tolist()) & set(values.tolist())
    probe = SequenceBuilder.read(tokenizer, Reading(spaces), keys, values, 400).probe(pairs, 3, generator)
    assert probe.tokens.shape == (3, 400)
    assert probe.positions.shape == probe.answers.shape == (3, min(pairs, MAX_QUESTIONS))
    for tokens, positions, answers in zip(probe.tokens, probe.positions, probe.answers, strict=True):
        for position, answer in zip(positions.tolist(), answers.tolist(), strict=True):
            assert int(tokens[position + 1]) == answer
            earlier = (tokens[:position] == tokens[position]).nonzero().flatten()
            assert len(earlier) == 1  # once, long before
            assert int(tokens[earlier[0] + 1]) == answer


def test_the_same_seed_gives_the_same_questions(spaces):
    recalls = (associative_recall(runtime(), spaces, pairs=(2,), length=128, seed=seed) for seed in (0, 0, 1))
    first, second, other = (recall.digest for recall in recalls)
    assert first == second != other


@pytest.mark.parametrize(
    ("space", "divide", "join"),
    [
        ("Ġ", pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()),
        ("▁", pre_tokenizers.Metaspace(), decoders.Metaspace()),  # as of Llama: drops the space of a first token
    ],
)
def test_words_are_names_if_the_tokenizer_has_enough(space, divide, join):
    names = [f"{space}N{a}{b}" for a in ascii_lowercase for b in "aeiou"]
    others = [word for name in names for word in (name[1:], name.lower(), f"{name}1")]
    vocabulary = {word: number for number, word in enumerate(("?", "<end>", f"{space}.", *others, *names))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer, tokenizer.decoder = divide, join
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", eos_token="<end>")
    keys, values = draw_vocabulary(fast, 32, torch.Generator().manual_seed(0))
    assert len(values) == CANDIDATES
    assert sorted([*keys.tolist(), *values.tolist()]) == sorted(vocabulary[name] for name in names)


def test_too_many_pairs_or_too_little_text_is_refused(spaces, tmp_path):
    with pytest.raises(DataError, match="30 pairs need"):
        associative_recall(runtime(), spaces, pairs=(30,), length=128)
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(DataError, match="associative recall needs at least 256"):
        associative_recall(runtime(), str(tmp_path / "short.txt"), pairs=(2,), length=256)


def test_tokens_are_a_text_too(spaces):
    tokens = torch.cat(list(windows(runtime().tokenizer, Reading.of(spaces), 256, max_windows=64)))
    texts = (spaces, tokens.view(1, -1))
    first, second = (associative_recall(runtime(), text, pairs=(2,), length=256) for text in texts)
    assert first == second
