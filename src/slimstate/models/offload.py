"""Models larger than the device: layers on GPUs, in host memory and on disk, by accelerate; all run on the device.

accelerate fetches weights when the module that holds them is called. Some layers use the weights of a submodule without
calling it, and would silently compute with whatever memory holds: so a layer is fetched whole when it is entered.
"""

from __future__ import annotations

import io
import logging
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch

from slimstate.checkpoints.reader import Checkpoint
from slimstate.models.devices import free_bytes
from slimstate.models.load import Runtime, guard_vocabulary, load, load_tokenizer
from slimstate.models.options import LoadOptions, parse_limits
from slimstate.models.prepare import describe_kernels
from slimstate.models.stock import refusals, stock_model, tied_weights
from slimstate.system.errors import ModelError, PlanError, quoted

SHARE_FOR_WEIGHTS = 0.8  # of what is free on a device; the rest is for activations


def load_with(options: LoadOptions, folder: Path) -> Runtime:
    """Load the model where and how the options say."""
    if options.device_map is None:
        return load(folder, device=options.device, dtype=options.dtype)
    return load_spread(folder, options)


def load_spread(folder: Path, options: LoadOptions) -> Runtime:
    """The stock model with its layers wherever there is room, GPUs first, disk last.

    What goes to disk is copied to a scratch folder in the temporary directory.
    """
    where, precision, limits = options.place, options.precision, parse_limits(options.max_memory)
    try:
        from accelerate import infer_auto_device_map, load_checkpoint_and_dispatch
    except ImportError as error:
        raise ModelError("`device_map` needs accelerate: pip install 'slimstate[recover]'") from error
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    checkpoint = Checkpoint.open(folder)
    model = stock_model(checkpoint.config).to(precision).eval()
    renamed = model.state_dict().keys() - checkpoint.tensors.keys() - tied_weights(model)
    if renamed:
        raise PlanError(f"`device_map` cannot be used here: {folder} has no {min(renamed)}, which the model calls it")
    blocks = sorted(model._no_split_modules or ())
    try:
        places = infer_auto_device_map(model, _room(where, limits), no_split_module_classes=blocks, dtype=precision)
    except ValueError as error:
        raise PlanError(f"`max_memory`: {error}") from error
    if set(places.values()) == {"disk"}:
        raise PlanError("not even the embeddings fit into what `device_map` may take: give more with `max_memory`")
    scratch = tempfile.TemporaryDirectory(prefix="slimstate-")
    with redirect_stderr(io.StringIO()), refusals(f"{quoted(folder)} cannot be loaded"):  # a progress bar
        model = load_checkpoint_and_dispatch(
            model, str(folder), device_map=places, offload_folder=scratch.name, dtype=precision,
            preload_module_classes=blocks,
        )  # fmt: skip
    model.requires_grad_(False)
    tokenizer = load_tokenizer(folder)
    guard_vocabulary(model, tokenizer, where)
    placed = Counter(str(place) for place in places.values())
    return Runtime(
        model=model,
        tokenizer=tokenizer,
        device=where,
        dtype=precision,
        kernels=f"{describe_kernels(where, precision, checkpoint.family.library)}; {_in_words(placed)}",
        offloaded=sum(weight.is_meta for weight in model.parameters()),
        scratch=scratch,
    )


def _room(where: torch.device, limits: Mapping[str, int] | None) -> dict[int | str, Any]:
    """What weights may take up on every device; without limits, most of what is free."""
    if limits is not None:
        return {int(place) if place.isdigit() else place: size for place, size in limits.items()}
    room: dict[int | str, Any] = {}
    if where.type == "cuda":
        for card in range(torch.cuda.device_count()):
            room[card] = int(SHARE_FOR_WEIGHTS * free_bytes(torch.device("cuda", card)))
    room["cpu"] = int(SHARE_FOR_WEIGHTS * free_bytes(torch.device("cpu")))
    return room


def _in_words(placed: Counter[str]) -> str:
    names = {place: f"cuda:{place}" if place.isdigit() else place for place in placed}
    parts = ", ".join(f"{count} on {names[place]}" for place, count in placed.items())
    return f"parts of the model: {parts}"
