"""Make a library's models run on the machine at hand: PyTorch functions on a CPU, tuned kernels on a GPU."""

from __future__ import annotations

import logging
import os
import warnings

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


def prepare_fla() -> None:
    """Import fla and make its models run on this machine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fla remarks on missing GPUs and flash-attn, which the PyTorch kernels cover
        logging.getLogger("fla").setLevel(logging.ERROR)
        try:
            import fla  # noqa: F401
        except ImportError as error:
            raise ModelError(f"flash-linear-attention cannot be imported: {error}") from error
        from fla.utils import IS_NVIDIA_HOPPER

        install()
        if torch.cuda.is_available():
            _tune_quickly()
            if IS_NVIDIA_HOPPER:
                leave_out_faulty()


def prepare(model_type: str) -> None:
    """Make the models of a family run on this machine, whatever their library would choose by itself."""
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
