"""Load a model so that it runs on the device at hand: fla's kernels on a GPU, PyTorch ones on a CPU."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimstate.checkpoints.reader import Checkpoint
from slimstate.families import logit_factor
from slimstate.models.devices import pick_device, pick_dtype
from slimstate.models.prepare import describe_kernels, prepare
from slimstate.models.stock import quiet_transformers, refusals, stock_class, stock_model, text_settings
from slimstate.system.errors import ModelError, quoted, reason_of
from slimstate.system.input_files import check_name, files_inside
from slimstate.system.json_files import read_json
from slimstate.system.tested_versions import warn_about_untested

TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """A model and its tokenizer, ready to run; `kernels` says in words what runs."""

    model: Any
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    kernels: str
    offloaded: int = 0  # weights that are fetched only while their layer runs
    scratch: Any = None  # the folder they are fetched from, removed with this object


def load(folder: Path, *, device: str | None = None, dtype: str | None = None) -> Runtime:
    """The stock model class on the device, in evaluation mode, with its tokenizer."""
    where = pick_device(device)
    precision = pick_dtype(dtype, where)
    checkpoint = Checkpoint.open(folder)
    family = checkpoint.family
    check_described(checkpoint)
    warn_about_untested()
    prepare(family.model_type)
    config_class, model_class = stock_class(family)
    quiet_transformers()
    with warnings.catch_warnings(), refusals(f"{quoted(folder)} cannot be loaded"):
        warnings.simplefilter("ignore")
        settings = config_class.from_pretrained(folder, trust_remote_code=False)
        model, report = model_class.from_pretrained(
            folder,
            config=settings if family.library == "fla" else text_settings(family, settings),
            dtype=precision,
            output_loading_info=True,
        )
    wrong = [*report["missing_keys"], *report["mismatched_keys"]]
    if family.library == "fla":  # files of transformers may hold more, such as a vision tower
        wrong += report["unexpected_keys"]
    if wrong:
        raise _not_loaded(folder, wrong)
    tokenizer = load_tokenizer(folder)
    guard_vocabulary(model, tokenizer, where)
    return Runtime(
        model=model.to(where).eval(),
        tokenizer=tokenizer,
        device=where,
        dtype=precision,
        kernels=describe_kernels(where, precision, family.library),
    )


def _not_loaded(folder: Path, names: Sequence[str]) -> ModelError:
    return ModelError(
        f"{quoted(folder)}: the stock class does not load {len(names)} of its tensors, such as {quoted(names[0])}"
    )


def check_known(checkpoint: Checkpoint) -> None:
    """The stock class knows all tensors of the files, as `load` asks it to, where nothing is loaded at once."""
    if checkpoint.family.library != "fla":
        return
    if unknown := sorted(checkpoint.tensors.keys() - stock_model(checkpoint.config).state_dict().keys()):
        raise _not_loaded(checkpoint.folder, unknown)


def check_described(checkpoint: Checkpoint) -> None:
    """The files hold what the config describes, as far as headers tell: what they lack, a library would make up."""
    hidden, vocabulary = checkpoint.mixers[0].input_size, checkpoint.config.get("vocab_size", 0)
    if isinstance(vocabulary, int) and vocabulary * hidden > checkpoint.parameters:
        held = f"{checkpoint.parameters:,} numbers that the files hold"
        raise ModelError(f"config.json: embeddings of {vocabulary:,} tokens are more than the {held}")


def states_before_head(model: Any, ids: Tensor) -> Tensor:
    """What the output head makes the logits of tokens `ids` [B, T] from: logits are these times its weight alone."""
    hidden: Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    factor = logit_factor({"model_type": model.config.model_type, **vars(model.config)})
    return hidden if factor == 1 else hidden * factor


def guard_vocabulary(model: Any, tokenizer: Any, device: torch.device) -> None:
    """Refuse tokens that the model has no embedding of, before it is asked for it.

    A look at the tokens would hold up a GPU, so that it is taken there only where a tokenizer has more tokens.
    """
    embeddings = model.get_input_embeddings()
    rows = embeddings.weight.shape[0]

    def check(_: Any, given: tuple[Any, ...]) -> None:
        if given and given[0].numel():
            check_embedded(given[0], rows)

    if device.type == "cpu" or max(tokenizer.get_vocab().values(), default=0) >= rows:
        embeddings.register_forward_pre_hook(check)


def check_embedded(tokens: Tensor, rows: int) -> None:
    """Refuse tokens beyond the rows of an embedding."""
    if int(tokens.max()) >= rows:
        raise ModelError(
            f"the tokenizer gives token {int(tokens.max())}, and the model has embeddings of {rows}: it is the"
            " tokenizer of another model"
        )


def load_tokenizer(folder: Path | str) -> Any:
    """The tokenizer of a folder, or of a hub repository by its name."""
    from transformers import AutoTokenizer

    quiet_transformers()
    if Path(folder).is_dir():
        for _ in files_inside(Path(folder), ModelError):
            pass
        check_tokenizer_config(Path(folder))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if len(tokenizer) < 1 or not isinstance(tokenizer.eos_token_id, int | None):
            raise ValueError("it has no tokens, or an end-of-text token that is none")
        return tokenizer
    except Exception as error:
        raise ModelError(f"{quoted(folder)} has no usable tokenizer: {reason_of(error)}") from error


def check_tokenizer_config(folder: Path) -> None:
    """What a tokenizer is made from lies beside its config: that names no other files."""
    path = folder / TOKENIZER_CONFIG
    if not path.exists():
        return
    settings = read_json(path)
    for name, value in settings.items():
        if name.endswith(("_file", "_files")) and value is not None:
            for each in value if isinstance(value, list) else [value]:
                check_name(folder, each, ModelError)
