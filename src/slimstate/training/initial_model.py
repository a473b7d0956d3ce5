"""A new model as a checkpoint like any other: a config, a tokenizer, and random weights.

Training it is then like training any model.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from slimstate.checkpoints.formats import quantisation_of
from slimstate.checkpoints.reader import Checkpoint, described_mixers
from slimstate.data.documents import Reading
from slimstate.data.rows import Texts
from slimstate.families import Config, family_of
from slimstate.families.fla_layout import SHARED_FILTERS
from slimstate.models.devices import DTYPES
from slimstate.models.load import load_tokenizer
from slimstate.models.prepare import prepare
from slimstate.models.stock import quiet_transformers, stock_class, stock_model
from slimstate.system import hub
from slimstate.system.atomic import staged_folder
from slimstate.system.errors import DataError, ModelError, quoted
from slimstate.system.input_files import expand_home
from slimstate.system.value import Value
from slimstate.training.shared_filters import expand, share

END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 8192  # tokens, where the config does not say
MAX_CHARACTERS = 2**27  # that a tokenizer is trained on


class InitialModel(Value):
    """The config of a language model, its tokenizer, and which convolution filters it shares.

    Without a tokenizer, one is trained on the text.
    """

    config: Config
    tokenizer: str | None = None
    shared_filters: str | None = None

    def __post_init__(self) -> None:
        family, size = family_of(self.config), self.config.get("vocab_size")
        if (quantisation := quantisation_of(self.config)) is not None:
            model = f"a quantised model ({quoted(quantisation.method)})"
            raise ModelError(f"config.json is that of {model}; train a plain one")
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ModelError(f"config.json: vocab_size must be a positive number, got {quoted(str(size))}")
        prepare(family.model_type)
        if family.tower is not None or stock_class(family) != stock_class(family, whole=True):
            raise ModelError(
                f"{family.model_type} is more than a language model: train its text_config, as a config of its own with"
                " its own model_type"
            )
        if self.shared_filters is not None and described_mixers(self._with_sharing(self.config))[0].sharing is None:
            raise ModelError(
                f"{family.model_type} with this config has no filters to share: leave out `shared_filters`"
            )

    def _with_sharing(self, config: Config) -> Config:
        if self.shared_filters is None:
            return config
        return {**config, "slimstate": {SHARED_FILTERS: self.shared_filters}}

    def create(self, folder: Path, data: str | Texts, *, seed: int, dtype: str) -> Checkpoint:
        """Write a folder with the config, the tokenizer and random weights, unless it exists, and open it."""
        if folder.is_dir():
            return Checkpoint.open(folder)
        quiet_transformers()
        with staged_folder(folder, force=False) as place:
            tokenizer = _tokenizer(self.tokenizer, data, self.config.get("vocab_size") or VOCABULARY)
            size = self.config.get("vocab_size") or len(tokenizer)
            if len(tokenizer) > size:
                raise ModelError(f"the tokenizer has {len(tokenizer):,} tokens, the config says vocab_size {size:,}")
            padding = tokenizer.pad_token_id
            special = {
                "bos_token_id": tokenizer.bos_token_id,
                "eos_token_id": tokenizer.eos_token_id,
                "pad_token_id": tokenizer.eos_token_id if padding is None else padding,
            }
            config = self._with_sharing({**self.config, "vocab_size": size, **special})
            size = sum(4 * tensor.numel() for tensor in stock_model(config).parameters())
            if size > (memory := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")):
                sizes = f"{size / 2**30:,.0f} GiB, and this machine has {memory / 2**30:,.0f}"
                raise ModelError(f"a model of this config takes {sizes}")
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                model = stock_model(config, torch.device("cpu"))
            share(model, described_mixers(config), initial=True)
            expand(model)
            model.to(DTYPES[dtype]).save_pretrained(place)
            tokenizer.save_pretrained(place)
        return Checkpoint.open(folder)


def _tokenizer(name: str | None, data: str | Texts, vocab_size: int) -> Any:
    if name is None:
        return train_tokenizer(data, vocab_size)
    path = expand_home(name)
    if not path.exists() and not hub.is_reachable():
        raise ModelError(f"no tokenizer at {name}, and the hub cannot be reached from here")
    return load_tokenizer(path if path.exists() else name)


def train_tokenizer(data: str | Texts, vocab_size: int) -> Any:
    """Return a byte-level BPE of the beginning of a text, with one special token between documents."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        least = len(alphabet) + 1
        raise DataError(f"vocab_size must be at least {least} for a tokenizer of bytes, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_beginning(data), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def _beginning(data: str | Texts) -> Iterator[str]:
    """Yield the beginning of a text, without the special tokens between its documents."""
    count = 0
    for piece in Reading(data).pieces():
        yield from piece.text.split(END_OF_TEXT)
        count += len(piece.text)
        if count >= MAX_CHARACTERS:
            return
