"""vLLM's own Triton kernels: `vllm/third_party/flash_linear_attention` and `vllm/model_executor/layers/mamba/ops`."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimstate.benchmark.engine_kernels import EngineKernels, Given, Package, StandIns

DELTA, MAMBA = "third_party/flash_linear_attention/ops", "model_executor/layers/mamba/ops"


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


def _stand_ins() -> StandIns:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    return {
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


@dataclass(frozen=True, kw_only=True)
class VllmKernels(EngineKernels):
    PACKAGE = Package(
        name="vllm",
        title="vLLM",
        modules={
            "decode": f"{DELTA}/fused_recurrent",
            "prefill": f"{DELTA}/chunk",
            "update": f"{MAMBA}/mamba_ssm",
            "scan": f"{MAMBA}/ssd_combined",
        },
        stand_ins=_stand_ins,
    )

    def gated_prefill(self, given: Given) -> tuple[Tensor, Tensor]:
        o, last = self.prefill.chunk_gated_delta_rule(
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

    def mamba_prefill(self, given: Given, chunk: int) -> tuple[Tensor, Tensor]:
        out = given["out"]
        last: Any = self.scan.mamba_chunk_scan_combined_varlen(
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
