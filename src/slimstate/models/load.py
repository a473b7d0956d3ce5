"""Load a model so that it runs on this device: kernels of fla on a GPU, functions of PyTorch on a CPU."""

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
    """A model and its tokenizer, ready to run; `kernels` describes what computes."""

    model: Any
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    kernels: str
    offloaded: int = 0  # weights that are fetched while their layer runs
    scratch: Any = None  # the folder that they are fetched from, removed with this object


def load(folder: Path, *, device: str | None = None, dtype: str | None = None) -> Runtime:
    """Load the stock model on the device, in evaluation mode, with its tokenizer."""
    where = pick_device(device)
    precision = pick_dtype(dtype, where)
    checkpoint = Checkpoint.open(folder)
    family = checkpoint.family
    _check_vocabulary_size(checkpoint)
    warn_about_untested()
    prepare(family.model_type)
    config_class, model_class = stock_class(family)
    quiet_transformers()
    with warnings.catch_warnings(), refusals(f"{quoted(folder)} cannot be loaded"):
        warnings.simplefilter("ignore")
        settings = config_class.from_pretrained(folder, trust_remote_code=False)
        config = settings if family.library == "fla" else text_settings(family, settings)
        model, report = model_class.from_pretrained(folder, config=config, dtype=precision, output_loading_info=True)
    wrong = [*report["missing_keys"], *report["mismatched_keys"]]
    if family.library == "fla":  # files of transformers may have more, such as a vision tower
        wrong += report["unexpected_keys"]
    if wrong:
        raise _not_loaded(folder, wrong)
    tokenizer = load_tokenizer(folder)
    guard_vocabulary(model, tokenizer, where)
    kernels = describe_kernels(where, precision, family.library)
    return Runtime(model=model.to(where).eval(), tokenizer=tokenizer, device=where, dtype=precision, kernels=kernels)


def _not_loaded(folder: Path, names: Sequence[str]) -> ModelError:
    tensors = f"{len(names)} of its tensors, such as {quoted(names[0])}"
    return ModelError(f"{quoted(folder)}: the stock class does not load {tensors}")


def check_known(checkpoint: Checkpoint) -> None:
    """Check that the stock class knows all tensors of the files, as `load` does, without loading the model."""
    if checkpoint.family.library != "fla":
        return
    if unknown := sorted(checkpoint.tensors.keys() - stock_model(checkpoint.config).state_dict().keys()):
        raise _not_loaded(checkpoint.folder, unknown)


def _check_vocabulary_size(checkpoint: Checkpoint) -> None:
    """Refuse a vocabulary larger than the files, for which a library would allocate random embeddings."""
    hidden, vocabulary = checkpoint.mixers[0].input_size, checkpoint.config.get("vocab_size", 0)
    if isinstance(vocabulary, int) and vocabulary * hidden > checkpoint.parameters:
        size = f"{checkpoint.parameters:,} parameters in the files"
        raise ModelError(f"config.json: embeddings of {vocabulary:,} tokens are more than the {size}")


def states_before_head(model: Any, ids: Tensor) -> Tensor:
    """Return the hidden states of tokens `ids` [B, T] that give the logits when multiplied by the head's weight."""
    hidden: Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    factor = logit_factor({"model_type": model.config.model_type, **vars(model.config)})
    return hidden if factor == 1 else hidden * factor


def guard_vocabulary(model: Any, tokenizer: Any, device: torch.device) -> None:
    """Refuse tokens without an embedding when the model is called.

    Reading the tokens would make a GPU wait, so it is done there only if the tokenizer has more tokens than the model.
    """
    embeddings = model.get_input_embeddings()
    rows = embeddings.weight.shape[0]

    def check(_: Any, args: tuple[Any, ...]) -> None:
        if args and args[0].numel():
            check_embedded(args[0], rows)

    if device.type == "cpu" or max(tokenizer.get_vocab().values(), default=0) >= rows:
        embeddings.register_forward_pre_hook(check)


def check_embedded(tokens: Tensor, rows: int) -> None:
    """Refuse tokens beyond the rows of an embedding."""
    if int(tokens.max()) >= rows:
        has = f"the text has token {int(tokens.max())}, and the model embeddings of {rows}"
        raise ModelError(f"{has}: the tokenizer belongs to another model")


def load_tokenizer(folder: Path | str) -> Any:
    """Load the tokenizer of a folder, or of a hub repository by its name."""
    from transformers import AutoTokenizer

    quiet_transformers()
    if Path(folder).is_dir():
        for _ in files_inside(Path(folder), ModelError):
            pass
        check_tokenizer_config(Path(folder))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if len(tokenizer) < 1 or not isinstance(tokenizer.eos_token_id, int | None):
            raise ValueError("it has no tokens, or its end-of-text token is not one of them")
        return tokenizer
    except Exception as error:
        raise ModelError(f"{quoted(folder)} has no usable tokenizer: {reason_of(error)}") from error


def check_tokenizer_config(folder: Path) -> None:
    """Refuse a config of a tokenizer that names files outside of its folder."""
    path = folder / TOKENIZER_CONFIG
    if not path.exists():
        return
    settings = read_json(path)
    for name, value in settings.items():
        if name.endswith(("_file", "_files")) and value is not None:
            for file in value if isinstance(value, list) else [value]:
                check_name(folder, file, ModelError)
