"""Make the models of a library run on this machine: PyTorch functions on a CPU, tuned kernels on a GPU."""

import logging
import os
import warnings
from importlib.util import find_spec

import torch

from slimstate.families import FAMILIES, family_of
from slimstate.families.contract import Library
from slimstate.kernels.autotune import compile_in_threads, remove_faulty_variants, tune_briefly
from slimstate.kernels.experts import prepare_experts
from slimstate.kernels.patches import Backend, gated_backward_refused, has_fla, install, use_reference
from slimstate.system import distributed
from slimstate.system.errors import ModelError

HOPPER = 9  # the compute capability


def describe_kernels(device: torch.device, dtype: torch.dtype, library: Library = "fla") -> str:
    """Return the library, the versions and the device that compute, for records."""
    precision = str(dtype).removeprefix("torch.")
    if device.type == "cpu":
        return f"PyTorch {torch.__version__} on the CPU, {precision}"
    own = "; a kernel of slimstate for the step of gated backward passes that fla refuses here"
    gated = own if gated_backward_refused() else ""
    gpu = torch.cuda.get_device_name(device)
    if library == "transformers":
        import transformers

        return f"what slimstate and transformers {transformers.__version__} choose on {gpu}, {precision}{gated}"
    import fla
    import triton

    return f"fla {fla.__version__} (Triton {triton.__version__}) on {gpu}, {precision}{gated}"


def has_library(library: str) -> bool:
    """Return whether the library of a family is installed; transformers always is."""
    return library != "fla" or find_spec("fla") is not None


def prepare_fla() -> None:
    """Import flash-linear-attention and make its models run on this machine; on a CPU, with kernels in PyTorch.

    Examples:
        >>> slimstate.prepare_fla()
        >>> AutoModelForCausalLM.from_pretrained("slim")
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fla warns about a missing GPU and flash-attn, which are not needed here
        logging.getLogger("fla").setLevel(logging.ERROR)
        try:
            import fla  # noqa: F401
        except ImportError as error:
            advice = "pip install 'slimstate[fla]'" if isinstance(error, ModuleNotFoundError) else str(error)
            raise ModelError(f"this model needs flash-linear-attention, which cannot be imported: {advice}") from error
        install()
        if torch.cuda.is_available():
            _tune_quickly()


def prepare(model_type: str) -> None:
    """Make the models of a family run on this machine, whatever kernels their library would choose.

    Parameters:
        model_type: The `model_type` in the config of the model.

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
        prepare_experts()
        if torch.cuda.is_available():
            _tune_quickly()
            if has_fla():
                install(Backend)


def _tune_quickly() -> None:
    if has_fla() and torch.cuda.get_device_capability()[0] == HOPPER:
        remove_faulty_variants()
    tune_briefly()
    threads = len(os.sched_getaffinity(0)) // distributed.count_here()
    compile_in_threads(int(os.environ.get("SLIMSTATE_COMPILING", threads)))
