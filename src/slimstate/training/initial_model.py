"""A model before its first step, as a checkpoint like any other: a config, a tokenizer, and weights drawn by a seed.

Training it is then what training any model is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from slimstate.checkpoints.reader import described_mixers
from slimstate.checkpoints.reader import read_config as read_model_config
from slimstate.data.documents import Reading
from slimstate.data.rows import Texts
from slimstate.families import family_of
from slimstate.families.contract import Config
from slimstate.families.fla_layout import SHARED_FILTERS, SHARINGS
from slimstate.models.devices import DTYPES
from slimstate.models.load import load_tokenizer
from slimstate.models.prepare import prepare
from slimstate.models.stock import quiet_transformers, stock_class, stock_model
from slimstate.system import hub
from slimstate.system.atomic import staged
from slimstate.system.errors import DataError, ModelError, PlanError, quoted
from slimstate.system.json_files import JsonObject
from slimstate.system.paths import expand_home
from slimstate.training.shared_filters import expand, share

END_OF_TEXT = "<|endoftext|>"
ENOUGH_TEXT = 2**27  # characters that a tokenizer is learnt from
CONFIGS = "configs"


def shipped_configs() -> list[str]:
    """The names of the shapes that come with slimstate."""
    return sorted(entry.name.removesuffix(".json") for entry in (files("slimstate.models") / CONFIGS).iterdir())


def read_config(name: str) -> JsonObject:
    """A config by the name of a shipped shape, or from a file."""
    if name in shipped_configs():
        return dict(json.loads((files("slimstate.models") / CONFIGS / f"{name}.json").read_text(encoding="utf-8")))
    path = expand_home(name)
    if not path.is_file():
        raise ModelError(
            f"no config {quoted(name)}: give a file, a model folder, or one of {', '.join(shipped_configs())}"
        )
    return dict(read_model_config(path))


@dataclass(frozen=True, kw_only=True)
class InitialModel:
    """A config that a language model can be trained from, the tokenizer it gets, and which filters it shares.

    Without a tokenizer, one is learnt from the text.
    """

    config: Config
    tokenizer: str | None = None
    shared_filters: str | None = None

    def __post_init__(self) -> None:
        if self.shared_filters is not None and self.shared_filters not in SHARINGS:
            raise PlanError(f"`shared_filters` {self.shared_filters}; there are {', '.join(SHARINGS)}")
        family = family_of(self.config)
        size = self.config.get("vocab_size")
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ModelError(f"config.json: vocab_size {quoted(str(size))} is no number of tokens")
        prepare(family.model_type)
        if stock_class(family) != stock_class(family, whole=True):
            raise ModelError(
                f"{family.model_type} is more than a language model: train what its text_config describes, as a config"
                " of its own with its own model_type"
            )
        if self.shared_filters is not None and described_mixers(self._sharing(self.config))[0].sharing is None:
            raise ModelError(
                f"{family.model_type} with this config has no filters to share: leave out `shared_filters`"
            )

    def _sharing(self, config: Config) -> Config:
        if self.shared_filters is None:
            return config
        return {**config, "slimstate": {SHARED_FILTERS: self.shared_filters}}

    def write(self, folder: Path, *, data: str | Texts, seed: int, dtype: str) -> None:
        """A folder with the tokenizer, and with weights drawn by `seed`."""
        quiet_transformers()
        with staged(folder, force=False) as place:
            words = _tokenizer(self.tokenizer, data, self.config.get("vocab_size") or 8192)
            size = self.config.get("vocab_size") or len(words)
            if len(words) > size:
                raise ModelError(f"the tokenizer has {len(words):,} tokens, the config says vocab_size {size:,}")
            special = {
                "bos_token_id": words.bos_token_id,
                "eos_token_id": words.eos_token_id,
                "pad_token_id": words.eos_token_id if words.pad_token_id is None else words.pad_token_id,
            }
            whole = self._sharing({**self.config, "vocab_size": size, **special})
            _check_memory(whole)
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                model = stock_model(whole, torch.device("cpu"))
            share(model, described_mixers(whole), initial=True)
            expand(model)
            model.to(DTYPES[dtype]).save_pretrained(place)
            words.save_pretrained(place)


def _check_memory(config: Config) -> None:
    """Refuse a model that the machine could not hold, before it is drawn."""
    needed = sum(4 * tensor.numel() for tensor in stock_model(config).parameters())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        sizes = f"{needed / 2**30:,.0f} GiB, and this machine has {memory / 2**30:,.0f}"
        raise ModelError(f"a model of this config takes {sizes}")


def _tokenizer(name: str | None, data: str | Texts, vocab_size: int) -> Any:
    if name is None:
        return learnt_tokenizer(data, vocab_size)
    if not expand_home(name).exists() and not hub.reachable():
        raise ModelError(f"no tokenizer at {name}, and the hub cannot be reached from here")
    return load_tokenizer(expand_home(name) if expand_home(name).exists() else name)


def learnt_tokenizer(data: str | Texts, vocab_size: int) -> Any:
    """A byte-level BPE of the beginning of a text, with one special token between documents."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise DataError(f"vocab_size {vocab_size}: a tokenizer of bytes has {len(alphabet) + 1} tokens at least")
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(_beginning(data), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def _beginning(data: str | Texts) -> Iterator[str]:
    """The text without the marks between its documents, as far as it is needed."""
    seen = 0
    for piece in Reading(data).pieces():
        yield from piece.text.split(END_OF_TEXT)
        seen += len(piece.text)
        if seen >= ENOUGH_TEXT:
            return
