"""vLLM's own Triton kernels, from an unpacked wheel and without vLLM: what it runs where people serve.

The kernels are the folders `vllm/third_party/flash_linear_attention` and `vllm/model_executor/layers/mamba/ops` of the
wheel. What else of vLLM they import, a logger, a platform, a few lines about devices, is stood in for here.

B sequences, T tokens, H key heads, G value heads, K key dim, V value dim; states [slots, G, V, K] in float32. Slot 0 is
one that vLLM never uses.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from slimstate.system.errors import PlanError

DELTA, MAMBA = "third_party/flash_linear_attention/ops", "model_executor/layers/mamba/ops"
WAY = (
    "unpack vllm/third_party/flash_linear_attention and vllm/model_executor/layers/mamba of a vLLM wheel, and name the"
    " folder that holds vllm"
)


@dataclass(frozen=True, kw_only=True)
class VllmKernels:
    """The functions that vLLM's layers call, as modules of the wheel."""

    version: str
    decode: ModuleType
    prefill: ModuleType
    update: ModuleType
    scan: ModuleType


class _Platform:
    """The few questions that the kernels have about the device."""

    def is_cuda(self) -> bool:
        return torch.cuda.is_available()

    is_cuda_alike = is_cuda

    def is_device_capability(self, capability: int) -> bool:
        return self.is_cuda() and torch.cuda.get_device_capability() == divmod(capability, 10)

    def is_rocm(self) -> bool:
        return False

    is_xpu = is_cpu = is_rocm  # also in an interpreter the compiled kernels are meant


class _Logger:
    def info_once(self, *_: object, **__: object) -> None:
        """vLLM says which settings it found; records have those."""

    warning_once = info_once


def _on_device(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return tensor.to(device=device, dtype=dtype)


def _card() -> str:
    return torch.cuda.get_device_name().replace(" ", "_") if torch.cuda.is_available() else "cpu"


def _rearranged(x: Tensor, pattern: str, **sizes: int) -> Tensor:
    """The two patterns of einops that the scan uses, where einops is not installed."""
    known = {
        "... p n -> ... (p n)": lambda: x.flatten(-2),
        "... (p n) -> ... p n": lambda: x.unflatten(-1, (-1, sizes["n"])),
    }
    return known[pattern]()


def _stand_ins() -> Mapping[str, Mapping[str, object]]:
    """Modules of vLLM, and of what it depends on, by what the kernels take from them."""
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    found: dict[str, Mapping[str, object]] = {
        "vllm.triton_utils": {"triton": triton, "tl": tl, "tldevice": libdevice, "HAS_TRITON": True},
        "vllm.platforms": {"current_platform": _Platform()},
        "vllm.logger": {"init_logger": lambda name: _Logger()},
        "vllm.envs": {"VLLM_TUNED_CONFIG_FOLDER": None},
        "vllm._custom_ops": {},
        "vllm.utils.gpu_sync_debug": {"gpu_sync_allowed": contextlib.nullcontext},
        "vllm.utils.torch_utils": {"async_tensor_h2d": _on_device},
        "vllm.utils.platform_utils": {"get_device_name_as_file_name": _card},
        "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": 0},
    }
    if importlib.util.find_spec("einops") is None:
        found["einops"] = {"rearrange": _rearranged}
    return found


def vllm_kernels(path: str | Path) -> VllmKernels:
    """The kernels below a folder; once a process, in which vLLM itself cannot be imported any more."""
    folder = _package(Path(path))
    ours = sys.modules.get("vllm")
    if ours is not None and getattr(ours, "__path__", None) != [str(folder)]:
        raise PlanError("vLLM, or another folder of its kernels, is already imported in this process")
    if ours is None:
        _install(folder)
    names = {"decode": (DELTA, "fused_recurrent"), "prefill": (DELTA, "chunk")}
    names |= {"update": (MAMBA, "mamba_ssm"), "scan": (MAMBA, "ssd_combined")}
    modules = {
        role: importlib.import_module(f"vllm.{place.replace('/', '.')}.{name}") for role, (place, name) in names.items()
    }
    return VllmKernels(version=_version(folder), **modules)


def _package(path: Path) -> Path:
    for folder in (path, path / "vllm"):
        if (folder / DELTA / "chunk.py").is_file() and (folder / MAMBA / "mamba_ssm.py").is_file():
            return folder.resolve()
    raise PlanError(f"`kernels`: {path} holds none of vLLM's: {WAY}")


def _version(folder: Path) -> str:
    found = sorted(folder.parent.glob("vllm-*.dist-info"))
    return found[0].name.removeprefix("vllm-").removesuffix(".dist-info") if found else "of an unknown version"


def _install(folder: Path) -> None:
    """Packages without what their files would import, and the stand-ins inside of them."""
    given = _stand_ins()
    places = [DELTA, MAMBA, *(name.removeprefix("vllm.").replace(".", "/") for name in given if name != "einops")]
    parents = {parent for place in places for parent in (Path(place), *Path(place).parents)}
    for parent in sorted(parents, key=lambda each: len(each.parts)):
        name = ".".join(("vllm", *parent.parts))
        module = ModuleType(name)
        module.__path__ = [str(folder / parent)]
        sys.modules[name] = module
    for name, members in given.items():
        module = sys.modules.setdefault(name, ModuleType(name))
        vars(module).update(members)


def gated_decode(kernels: VllmKernels, given: Mapping[str, Tensor], state: Tensor) -> Tensor:
    """One token of each sequence; `state` goes on in place. The gate is made in the kernel, and queries normalised."""
    out: Tensor = given["out"]
    kernels.decode.fused_recurrent_gated_delta_rule_packed_decode(
        mixed_qkv=given["mixed"],
        a=given["a"],
        b=given["b"],
        A_log=given["A_log"],
        dt_bias=given["dt_bias"],
        scale=state.shape[-1] ** -0.5,
        initial_state=state,
        out=out,
        ssm_state_indices=given["slots"],
        use_qk_l2norm_in_kernel=True,
    )
    return out


def gated_prefill(kernels: VllmKernels, given: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sequences end to end [1, T, ...], from states of zeros: outputs and last states."""
    o, last = kernels.prefill.chunk_gated_delta_rule(
        q=given["q"],
        k=given["k"],
        v=given["v"],
        g=given["g"],
        beta=given["beta"],
        initial_state=given["begun"],
        output_final_state=True,
        cu_seqlens=given["starts"],
        use_qk_l2norm_in_kernel=False,
    )
    return o, last


def mamba_decode(kernels: VllmKernels, given: Mapping[str, Tensor], state: Tensor) -> Tensor:
    """One token of each sequence; `state` goes on in place."""
    out: Tensor = given["out"]
    kernels.update.selective_state_update(
        state,
        given["x"],
        given["dt"],
        given["A"],
        given["B"],
        given["C"],
        D=given["D"],
        dt_bias=given["dt_bias"],
        dt_softplus=True,
        state_batch_indices=given["slots"],
        out=out,
    )
    return out


def mamba_prefill(kernels: VllmKernels, given: Mapping[str, Tensor], chunk: int) -> tuple[Tensor, Tensor]:
    """Sequences end to end [T, ...], each of whole chunks, from states of zeros: outputs and last states."""
    out: Tensor = given["out"]
    last: Any = kernels.scan.mamba_chunk_scan_combined_varlen(
        given["x"],
        given["dt"],
        given["A"],
        given["B"],
        given["C"],
        chunk_size=chunk,
        cu_seqlens=given["starts"],
        cu_chunk_seqlens=given["chunk_starts"],
        last_chunk_indices=given["last_chunks"],
        seq_idx=given["chunk_sequences"],
        out=out,
        D=given["D"],
        dt_bias=given["dt_bias"],
        dt_softplus=True,
        state_dtype=torch.float32,
    )
    return out, last
