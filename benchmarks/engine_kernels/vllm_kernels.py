"""vLLM's own Triton kernels: `vllm/third_party/flash_linear_attention` and `vllm/model_executor/layers/mamba/ops`."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from engine_kernels.loading import EngineKernels, Inputs, Package, StandIns

DELTA, MAMBA = "third_party/flash_linear_attention/ops", "model_executor/layers/mamba/ops"


def _stand_ins() -> StandIns:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    has_cuda = torch.cuda.is_available()
    platform = SimpleNamespace(
        is_cuda=lambda: has_cuda,
        is_cuda_alike=lambda: has_cuda,
        is_device_capability=lambda number: has_cuda and torch.cuda.get_device_capability() == divmod(number, 10),
        **dict.fromkeys(("is_rocm", "is_xpu", "is_cpu"), lambda: False),  # the interpreter runs the kernels for CUDA
    )
    logger = SimpleNamespace(**dict.fromkeys(("info_once", "warning_once"), lambda *_, **__: None))
    device_name = torch.cuda.get_device_name().replace(" ", "_") if has_cuda else "cpu"
    return {
        "vllm.triton_utils": {"triton": triton, "tl": tl, "tldevice": libdevice, "HAS_TRITON": True},
        "vllm.platforms": {"current_platform": platform},
        "vllm.logger": {"init_logger": lambda name: logger},
        "vllm.envs": {"VLLM_TUNED_CONFIG_FOLDER": None},
        "vllm._custom_ops": {},
        "vllm.utils.gpu_sync_debug": {"gpu_sync_allowed": contextlib.nullcontext},
        "vllm.utils.torch_utils": {
            "async_tensor_h2d": lambda tensor, device, dtype: tensor.to(device=device, dtype=dtype)
        },
        "vllm.utils.platform_utils": {"get_device_name_as_file_name": lambda: device_name},
        "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": 0},
    }


@dataclass(frozen=True, kw_only=True)
class VllmKernels(EngineKernels):
    PACKAGE = Package(
        name="vllm",
        title="vLLM",
        modules={
            "decode": f"{DELTA}/fused_recurrent", "prefill": f"{DELTA}/chunk",
            "update": f"{MAMBA}/mamba_ssm", "scan": f"{MAMBA}/ssd_combined",
        },
        stand_ins=_stand_ins,
    )  # fmt: skip

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
