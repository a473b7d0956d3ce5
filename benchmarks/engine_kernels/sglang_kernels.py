"""SGLang's own Triton kernels: `sglang/kernels/ops/attention/fla` and `sglang/kernels/ops/mamba/triton_ops`.

The module `projection` splits the output of the projections into queries, keys and values. Which of its kernels runs
depends on the model, and some accept only certain key dims.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

from engine_kernels.loading import EngineKernels, Inputs, Package, StandIns

ATTENTION, MAMBA = "kernels/ops/attention", "kernels/ops/mamba/triton_ops"


def _supports_dependent_launch() -> bool:
    """Return whether a kernel may start before the previous one has ended, as from Hopper on."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


def _stand_ins() -> StandIns:
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    unset = SimpleNamespace(get=lambda: False)
    return {
        "sglang.kernels.jit.utils": {"is_arch_support_pdl": _supports_dependent_launch},
        "sglang.srt.environ": {"envs": SimpleNamespace(SGLANG_USE_AITER=unset)},
        "sglang.srt.utils": {"is_hip": lambda: False},
        "sglang.srt.utils.common": {"torch_release": release},
    }


@dataclass(frozen=True, kw_only=True)
class SglangKernels(EngineKernels):
    PACKAGE = Package(
        name="sglang",
        title="SGLang",
        modules={
            "decode": f"{ATTENTION}/fla/fused_recurrent",
            "prefill": f"{ATTENTION}/fla/chunk",
            "update": f"{MAMBA}/mamba_ssm",
            "scan": f"{MAMBA}/ssd_combined",
            "projection": f"{ATTENTION}/triton_gdn_fused_proj",
        },
        stand_ins=_stand_ins,
    )

    projection: ModuleType

    def gated_prefill(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        state = inputs["initial_state"].clone()  # updated in place
        output, *_ = self.prefill.chunk_gated_delta_rule(
            **{**inputs, "initial_state": state},
            initial_state_indices=torch.arange(len(state), device=state.device, dtype=torch.int32),
            head_first=False,
            use_qk_l2norm_in_kernel=True,
        )
        return output, state

    def mamba_prefill(self, inputs: Inputs, chunk: int) -> tuple[Tensor, Tensor]:
        batched = {name: inputs[name].unsqueeze(0) for name in ("x", "dt", "B", "C", "out")}
        state: Tensor = self.scan.mamba_chunk_scan_combined(
            **batched,
            **{name: inputs[name] for name in ("A", "D", "dt_bias", "cu_seqlens")},
            seq_idx=inputs["seq_idx"].repeat_interleave(chunk).unsqueeze(0),
            chunk_size=chunk,
            dt_softplus=True,
            return_varlen_states=True,
            state_dtype=torch.float32,
        )
        return inputs["out"], state
