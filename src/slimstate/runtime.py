"""Load a model so that it runs on the device at hand: fla's kernels on a GPU, PyTorch ones on a CPU."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slimstate import processes
from slimstate.errors import ModelError, PlanError

TOKENS_AT_ONCE = {"cpu": 2048, "cuda": 16384}  # of a forward pass over many windows
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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


def pick_device(name: str | None) -> torch.device:
    """`cpu`, `cuda`, or by default the GPU where there is one; each of several processes has its own."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise PlanError(f"unknown device {name!r}; there are cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise PlanError("no CUDA device here; use --device cpu")
    if name == "cuda" and processes.count_here() > torch.cuda.device_count():
        here, cards = processes.count_here(), torch.cuda.device_count()
        raise PlanError(f"{here} processes for {cards} GPUs: start at most one for each GPU, or use --device cpu")
    return processes.local_device(name)


def pick_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU and float32 on a CPU unless said otherwise."""
    if name is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise PlanError(f"unknown dtype {name!r}; there are {', '.join(DTYPES)}")
    return DTYPES[name]


def describe_kernels(device: torch.device, dtype: torch.dtype) -> str:
    precision = str(dtype).removeprefix("torch.")
    if device.type == "cpu":
        return f"PyTorch {torch.__version__} on the CPU, {precision}"
    import fla
    import triton

    from slimstate.torch_kernels import gated_backward_refused

    gated = "; the gated backward in PyTorch, which fla refuses here" if gated_backward_refused() else ""
    card = torch.cuda.get_device_name(device)
    return f"fla {fla.__version__} (Triton {triton.__version__}) on {card}, {precision}{gated}"


def prepare_fla() -> None:
    """Import fla and make its models run on this machine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fla remarks on missing GPUs and flash-attn, which the PyTorch kernels cover
        logging.getLogger("fla").setLevel(logging.ERROR)
        try:
            import fla  # noqa: F401
        except ImportError as error:
            raise ModelError(f"flash-linear-attention cannot be imported: {error}") from error
        from slimstate.torch_kernels import install

        install()


def stock_shapes(config: Mapping[str, Any]) -> tuple[dict[str, list[int]], frozenset[str]]:
    """The parameters that the stock class makes of a config, and those it can do without; nothing is allocated."""
    model = stock_model(config)
    tied = frozenset(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else frozenset()
    return {name: list(tensor.shape) for name, tensor in model.state_dict().items()}, tied


def stock_model(config: Mapping[str, Any], device: torch.device | None = None) -> Any:
    """The stock model of a config with random weights on a device; without one nothing is allocated."""
    prepare_fla()
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type = str(config["model_type"])
    with warnings.catch_warnings(), torch.device("meta") if device is None else device:
        warnings.simplefilter("ignore")
        settings = AutoConfig.for_model(
            model_type, **{key: value for key, value in config.items() if key != "model_type"}
        )
        try:
            return AutoModelForCausalLM.from_config(settings, trust_remote_code=False)
        except (ValueError, AssertionError, TypeError, RuntimeError) as error:
            raise ModelError(f"the stock class refuses this config: {error}") from error


def load(folder: Path, *, device: str | None = None, dtype: str | None = None) -> Runtime:
    """The stock model class on the device, in evaluation mode, with its tokenizer."""
    where = pick_device(device)
    precision = pick_dtype(dtype, where)
    prepare_fla()
    from transformers import AutoModelForCausalLM

    _quiet_transformers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=precision, trust_remote_code=False, output_loading_info=True
        )
    wrong = [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]
    if wrong:
        raise ModelError(f"{folder}: the stock class does not load {len(wrong)} tensors, such as {wrong[0]}")
    return Runtime(
        model=model.to(where).eval(),
        tokenizer=load_tokenizer(folder),
        device=where,
        dtype=precision,
        kernels=describe_kernels(where, precision),
    )


def _quiet_transformers() -> None:
    """Its progress bars and remarks are about loading, of which the reporter speaks."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def load_tokenizer(folder: Path | str) -> Any:
    """The tokenizer of a folder, or of a hub repository by its name."""
    from transformers import AutoTokenizer

    _quiet_transformers()
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder} has no usable tokenizer: {str(error).splitlines()[0]}") from error
