"""SGLang's own Triton kernels: `sglang/kernels/ops/attention/fla` and `sglang/kernels/ops/mamba/triton_ops`.

Beside those of the rule there are those that take queries, keys and values out of what the projections give
(`projection`): which of them runs depends on the model, and not all take every key dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from slimstate.benchmark.engine_kernels import EngineKernels, Given, Package, StandIns

ATTENTION, MAMBA = "kernels/ops/attention", "kernels/ops/mamba/triton_ops"


def _launches_overlap() -> bool:
    """Whether a kernel may start before the last one has ended: from Hopper on."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


def _stand_ins() -> StandIns:
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    unset = SimpleNamespace(get=lambda: False)
    return {
        "sglang.kernels.jit.utils": {"is_arch_support_pdl": _launches_overlap},
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

    def gated_prefill(self, given: Given) -> tuple[Tensor, Tensor]:
        state = given["begun"].clone()  # goes on in place
        o, *_ = self.prefill.chunk_gated_delta_rule(
            q=given["q"],
            k=given["k"],
            v=given["v"],
            g=given["g"],
            beta=given["beta"],
            initial_state=state,
            initial_state_indices=torch.arange(len(state), device=state.device, dtype=torch.int32),
            cu_seqlens=given["starts"],
            head_first=False,
            use_qk_l2norm_in_kernel=True,
        )
        return o, state

    def mamba_prefill(self, given: Given, chunk: int) -> tuple[Tensor, Tensor]:
        out = given["out"]
        last: Any = self.scan.mamba_chunk_scan_combined(
            given["x"].unsqueeze(0),
            given["dt"].unsqueeze(0),
            given["A"],
            given["B"].unsqueeze(0),
            given["C"].unsqueeze(0),
            chunk_size=chunk,
            D=given["D"],
            dt_bias=given["dt_bias"],
            seq_idx=given["chunk_sequences"].repeat_interleave(chunk).unsqueeze(0),
            cu_seqlens=given["starts"],
            dt_softplus=True,
            out=out.unsqueeze(0),
            return_varlen_states=True,
            state_dtype=torch.float32,
        )
        return out, last
