"""Make a library's models run on the machine at hand: PyTorch functions on a CPU, tuned kernels on a GPU."""

from __future__ import annotations

import logging
import os
import warnings
from importlib.util import find_spec

import torch

from slimstate.families import FAMILIES, family_of
from slimstate.families.contract import Library
from slimstate.kernels.autotune import compile_side_by_side, leave_out_faulty, tune_briefly
from slimstate.kernels.patches import gated_backward_refused, install, use_reference
from slimstate.system import distributed
from slimstate.system.errors import ModelError


def describe_kernels(device: torch.device, dtype: torch.dtype, library: Library = "fla") -> str:
    precision = str(dtype).removeprefix("torch.")
    if device.type == "cpu":
        return f"PyTorch {torch.__version__} on the CPU, {precision}"
    gated = "; the gated backward in PyTorch, which fla refuses here" if gated_backward_refused() else ""
    card = torch.cuda.get_device_name(device)
    if library == "transformers":
        import transformers

        return f"what transformers {transformers.__version__} chooses on {card}, {precision}{gated}"
    import fla
    import triton

    return f"fla {fla.__version__} (Triton {triton.__version__}) on {card}, {precision}{gated}"


def has_library(library: str) -> bool:
    """Whether the library of a family is installed; transformers always is."""
    return library != "fla" or find_spec("fla") is not None


def prepare_fla() -> None:
    """Import flash-linear-attention and make its models run on this machine: on a CPU, on kernels in PyTorch.

    Examples:
        >>> slimstate.prepare_fla()
        >>> AutoModelForCausalLM.from_pretrained("slim")
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fla remarks on missing GPUs and flash-attn, which the PyTorch kernels cover
        logging.getLogger("fla").setLevel(logging.ERROR)
        try:
            import fla  # noqa: F401
        except ImportError as error:
            cure = "pip install 'slimstate[fla]'" if isinstance(error, ModuleNotFoundError) else str(error)
            raise ModelError(
                f"flash-linear-attention cannot be imported, and this model is one of its: {cure}"
            ) from error
        from fla.utils import IS_NVIDIA_HOPPER

        install()
        if torch.cuda.is_available():
            _tune_quickly()
            if IS_NVIDIA_HOPPER:
                leave_out_faulty()


def prepare(model_type: str) -> None:
    """Make the models of a family run on this machine, whatever their library would choose by itself.

    Parameters:
        model_type: as the model's config names it.

    Examples:
        >>> slimstate.prepare("qwen3_next")
        >>> AutoModelForCausalLM.from_pretrained("slim")
    """
    family = FAMILIES.get(model_type) or family_of({"model_type": model_type})
    if family.library == "fla":
        prepare_fla()
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        use_reference(family.hook)
        if torch.cuda.is_available():
            _tune_quickly()


def _tune_quickly() -> None:
    tune_briefly()
    mine = len(os.sched_getaffinity(0)) // distributed.count_here()
    compile_side_by_side(int(os.environ.get("SLIMSTATE_COMPILING", mine)))
