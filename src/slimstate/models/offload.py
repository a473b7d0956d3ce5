"""Load models larger than the device by accelerate: layers on GPUs, in host memory and on disk, all run on the device.

accelerate fetches weights when the module that holds them is called. Some layers use the weights of a submodule without
calling it, and would silently compute with undefined memory: so all of a layer is fetched when it is entered.
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

SHARE_FOR_WEIGHTS = 0.8  # of the free memory of a device; the rest is for activations


def load_with(options: LoadOptions, folder: Path) -> Runtime:
    """Load the model where and how the options say."""
    if options.device_map is None:
        return load(folder, device=options.device, dtype=options.dtype)
    return load_spread(folder, options)


def load_spread(folder: Path, options: LoadOptions) -> Runtime:
    """Load the stock model with its layers where there is room: on GPUs first, on disk last.

    Layers on disk are copied to a scratch folder in the temporary directory.
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
        raise PlanError(f"`device_map` cannot load {folder}: its files do not have {min(renamed)} under this name")
    blocks = sorted(model._no_split_modules or ())
    try:
        places = infer_auto_device_map(
            model, _memory_limits(where, limits), no_split_module_classes=blocks, dtype=precision
        )
    except ValueError as error:
        raise PlanError(f"`max_memory`: {error}") from error
    if set(places.values()) == {"disk"}:
        raise PlanError("not even the embeddings fit into the memory for `device_map`: allow more with `max_memory`")
    scratch = tempfile.TemporaryDirectory(prefix="slimstate-")
    with redirect_stderr(io.StringIO()), refusals(f"{quoted(folder)} cannot be loaded"):  # a progress bar
        model = load_checkpoint_and_dispatch(
            model, str(folder), device_map=places, offload_folder=scratch.name, dtype=precision,
            preload_module_classes=blocks,
        )  # fmt: skip
    model.requires_grad_(False)
    tokenizer = load_tokenizer(folder)
    guard_vocabulary(model, tokenizer, where)
    counts = Counter(f"cuda:{place}" if isinstance(place, int) else str(place) for place in places.values())
    parts = ", ".join(f"{count} on {place}" for place, count in counts.items())
    kernels = f"{describe_kernels(where, precision, checkpoint.family.library)}; parts of the model: {parts}"
    return Runtime(
        model=model, tokenizer=tokenizer, device=where, dtype=precision, kernels=kernels, scratch=scratch,
        offloaded=sum(weight.is_meta for weight in model.parameters()),
    )  # fmt: skip


def _memory_limits(where: torch.device, limits: Mapping[str, int] | None) -> dict[int | str, Any]:
    """Return the bytes that weights may take on every device; without limits, most of the free memory."""
    if limits is not None:
        return {int(place) if place.isdigit() else place: size for place, size in limits.items()}
    gpus = range(torch.cuda.device_count() if where.type == "cuda" else 0)
    devices: dict[int | str, torch.device] = {gpu: torch.device("cuda", gpu) for gpu in gpus}
    devices["cpu"] = torch.device("cpu")
    return {place: int(SHARE_FOR_WEIGHTS * free_bytes(device)) for place, device in devices.items()}
