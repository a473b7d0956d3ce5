"""Load a model so that it runs on the device at hand: fla's kernels on a GPU, PyTorch ones on a CPU."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimstate.families import family_of, logit_factor
from slimstate.models.devices import pick_device, pick_dtype
from slimstate.models.prepare import describe_kernels, prepare
from slimstate.models.stock import quiet_transformers, stock_class, text_settings
from slimstate.system.errors import ModelError
from slimstate.system.json_files import read_json


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
    family = family_of(read_json(folder / "config.json"))
    prepare(family.model_type)
    config_class, model_class = stock_class(family)
    quiet_transformers()
    with warnings.catch_warnings():
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
        raise ModelError(f"{folder}: the stock class does not load {len(wrong)} tensors, such as {wrong[0]}")
    return Runtime(
        model=model.to(where).eval(),
        tokenizer=load_tokenizer(folder),
        device=where,
        dtype=precision,
        kernels=describe_kernels(where, precision, family.library),
    )


def states_before_head(model: Any, ids: Tensor) -> Tensor:
    """What the output head makes the logits of tokens `ids` [B, T] from: logits are these times its weight alone."""
    hidden: Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    factor = logit_factor({"model_type": model.config.model_type, **vars(model.config)})
    return hidden if factor == 1 else hidden * factor


def load_tokenizer(folder: Path | str) -> Any:
    """The tokenizer of a folder, or of a hub repository by its name."""
    from transformers import AutoTokenizer

    quiet_transformers()
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder} has no usable tokenizer: {str(error).splitlines()[0]}") from error
