"""vLLM's own Triton kernels: `vllm/third_party/flash_linear_attention` and `vllm/model_executor/layers/mamba/ops`."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_kernels.loading import EngineKernels, Inputs, Package, StandIns

DELTA, MAMBA = "third_party/flash_linear_attention/ops", "model_executor/layers/mamba/ops"


class _Platform:
    """Answer what the kernels ask about the device."""

    def is_cuda(self) -> bool:
        return torch.cuda.is_available()

    is_cuda_alike = is_cuda

    def is_device_capability(self, capability: int) -> bool:
        return self.is_cuda() and torch.cuda.get_device_capability() == divmod(capability, 10)

    def is_rocm(self) -> bool:
        return False

    is_xpu = is_cpu = is_rocm  # in an interpreter, too, the kernels for CUDA are run


class _Logger:
    def info_once(self, *_: object, **__: object) -> None:
        """Drop what vLLM logs about its settings."""

    warning_once = info_once


def _copy_to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return tensor.to(device=device, dtype=dtype)


def _device_file_name() -> str:
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
        "vllm.utils.torch_utils": {"async_tensor_h2d": _copy_to_device},
        "vllm.utils.platform_utils": {"get_device_name_as_file_name": _device_file_name},
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

    def gated_prefill(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        output, state = self.prefill.chunk_gated_delta_rule(
            **inputs, output_final_state=True, use_qk_l2norm_in_kernel=False
        )
        return output, state

    def mamba_prefill(self, inputs: Inputs, chunk: int) -> tuple[Tensor, Tensor]:
        state: Tensor = self.scan.mamba_chunk_scan_combined_varlen(
            **inputs, chunk_size=chunk, dt_softplus=True, state_dtype=torch.float32
        )
        return inputs["out"], state
