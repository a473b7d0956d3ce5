"""Random inputs for an engine's kernels, and what our own recurrences compute from them.

B sequences, T tokens, H key heads, G value heads, K key dim, V value dim. Inputs are named as the kernels name them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_kernels.loading import EngineKernels, Inputs
from slimstate.kernels import delta_rule
from slimstate.kernels.fla_calls import unit
from slimstate.kernels.state_space import state_space_scan
from slimstate.system.errors import PlanError

CHUNK = 256  # tokens per chunk in published Mamba-2 models
Result = tuple[Tensor, Tensor]  # outputs and states


@dataclass(frozen=True, kw_only=True)
class KernelShape:
    """The heads of a layer in a published model; `width` is its key dim, `rule` gated_delta or state_space."""

    name: str
    rule: str
    key_heads: int
    value_heads: int
    value_dim: int
    width: int


@dataclass(frozen=True, kw_only=True)
class RandomInputs:
    """Random inputs of one shape at one key dim, the same on every call.

    Each rule has `for_decode` and `for_prefill`, which return the inputs of a kernel; `decode` and `prefill`, which run
    it; and `expected_decode` and `expected_prefill`. Decoding updates the states in its inputs.
    """

    shape: KernelShape
    key_dim: int
    device: torch.device
    dtype: torch.dtype

    def float32(self, *sizes: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(sum(sizes))
        return torch.randn(*sizes, device=self.device, generator=generator)

    def normal(self, *sizes: int) -> Tensor:
        return self.float32(*sizes).to(self.dtype)

    def empty(self, *sizes: int) -> Tensor:
        return torch.empty(*sizes, device=self.device, dtype=self.dtype)

    def steps(self, count: int, step: int = 1) -> Tensor:
        """Return 0, step, 2 * step, ... in int32."""
        return torch.arange(count, device=self.device, dtype=torch.int32) * step


class GatedDelta(RandomInputs):
    """Qwen3-Next and Qwen3.5. Decoding computes its gates from the projections; prefill takes them as inputs."""

    def for_decode(self, sequences: int) -> Inputs:
        h, g, v, k = self.shape.key_heads, self.shape.value_heads, self.shape.value_dim, self.key_dim
        return {
            "mixed_qkv": self.normal(sequences, 2 * h * k + g * v),
            "a": self.normal(sequences, g),
            "b": self.normal(sequences, g),
            "A_log": self.float32(g).abs().log(),
            "dt_bias": self.float32(g),
            "ssm_state_indices": self.steps(sequences) + 1,
            "out": self.empty(sequences, 1, g, v),
            "initial_state": self.float32(sequences + 1, g, v, k),
        }

    def decode(self, kernels: EngineKernels, inputs: Inputs) -> Result:
        """Run the kernel, which normalises queries and keys itself."""
        kernels.decode.fused_recurrent_gated_delta_rule_packed_decode(
            **inputs, scale=self.key_dim**-0.5, use_qk_l2norm_in_kernel=True
        )
        return inputs["out"], inputs["initial_state"][1:]

    def expected_decode(self, inputs: Inputs) -> Result:
        h, v, k = self.shape.key_heads, self.shape.value_dim, self.key_dim
        queries, keys, values = inputs["mixed_qkv"].float().unsqueeze(1).tensor_split((h * k, 2 * h * k), dim=-1)
        decay = -inputs["A_log"].exp() * F.softplus(inputs["a"].float() + inputs["dt_bias"])
        output, state = delta_rule.recurrence(
            unit(queries.unflatten(-1, (h, k))),
            unit(keys.unflatten(-1, (h, k))),
            values.unflatten(-1, (-1, v)),
            inputs["b"].float().sigmoid().to(self.dtype).float().unsqueeze(1),
            decay.unsqueeze(1),
            scale=k**-0.5,
            state=inputs["initial_state"][1:].mT.contiguous(),
        )
        return output, state.mT

    def for_prefill(self, prompts: int, length: int) -> Inputs:
        h, g, v, k = self.shape.key_heads, self.shape.value_heads, self.shape.value_dim, self.key_dim
        tokens = prompts * length
        return {
            "q": unit(self.float32(1, tokens, h, k)).to(self.dtype),
            "k": unit(self.float32(1, tokens, h, k + 1)[..., :k]).to(self.dtype),
            "v": self.normal(1, tokens, g, v),
            "g": -F.softplus(self.float32(1, tokens, g)),
            "beta": self.normal(1, tokens, g).sigmoid(),
            "initial_state": torch.zeros(prompts, g, v, k, device=self.device),
            "cu_seqlens": self.steps(prompts + 1, length),
        }

    def prefill(self, kernels: EngineKernels, inputs: Inputs) -> Result:
        return kernels.gated_prefill(inputs)

    def expected_prefill(self, inputs: Inputs) -> Result:
        q, k, v, beta, g = (inputs[name].float() for name in ("q", "k", "v", "beta", "g"))
        output, state = delta_rule.chunked(q, k, v, beta, g, scale=self.key_dim**-0.5)
        return output, state.mT


class Mamba2(RandomInputs):
    """Mamba-2 as in Nemotron-H and Codestral Mamba: heads of 64 channels in groups."""

    def for_decode(self, sequences: int) -> Inputs:
        g, v, k = self.shape.value_heads, self.shape.value_dim, self.key_dim
        per_head = {"dt_bias": self.float32(g), "D": self.normal(g), "dt": self.normal(sequences, g)}
        return {
            **self._tokens(sequences),
            **{name: values.unsqueeze(-1).expand(*values.shape, v) for name, values in per_head.items()},
            "A": self._decay().view(-1, 1, 1).expand(-1, v, k),
            "state_batch_indices": self.steps(sequences) + 1,
            "out": self.empty(sequences, g, v),
            "state": self.float32(sequences + 1, g, v, k),
        }

    def decode(self, kernels: EngineKernels, inputs: Inputs) -> Result:
        kernels.update.selective_state_update(**inputs, dt_softplus=True)
        return inputs["out"], inputs["state"][1:]

    def expected_decode(self, inputs: Inputs) -> Result:
        batched = {name: inputs[name].unsqueeze(1) for name in ("x", "B", "C")}
        per_head = {name: inputs[name][..., 0] for name in ("D", "dt_bias")}
        dt, decay = inputs["dt"][..., 0].unsqueeze(1), inputs["A"][:, 0, 0]
        output, state = _scan({**batched, **per_head, "dt": dt, "A": decay}, inputs["state"][1:])
        return output[:, 0], state

    def for_prefill(self, prompts: int, length: int) -> Inputs:
        g, tokens, chunk = self.shape.value_heads, prompts * length, min(CHUNK, length)
        if length % chunk:
            raise PlanError(f"`length` must be a multiple of {chunk} for Mamba-2, got {length}")
        chunks = length // chunk  # of each prompt
        return {
            **self._tokens(tokens),
            "dt": self.normal(tokens, g),
            "A": self._decay(),
            "D": self.normal(g),
            "dt_bias": self.float32(g),
            "out": self.empty(tokens, g, self.shape.value_dim),
            "cu_seqlens": self.steps(prompts + 1, length),
            "cu_chunk_seqlens": self.steps(prompts * chunks + 1, chunk),
            "last_chunk_indices": self.steps(prompts, chunks) + chunks - 1,
            "seq_idx": self.steps(prompts).repeat_interleave(chunks),
        }

    def prefill(self, kernels: EngineKernels, inputs: Inputs) -> Result:
        return kernels.mamba_prefill(inputs, len(inputs["x"]) // (len(inputs["cu_chunk_seqlens"]) - 1))

    def expected_prefill(self, inputs: Inputs) -> Result:
        output, state = _scan({**inputs, **{name: inputs[name].unsqueeze(0) for name in ("x", "B", "C", "dt")}})
        return output[0], state

    def _tokens(self, *leading: int) -> dict[str, Tensor]:
        groups, k = self.shape.key_heads, self.key_dim
        return {
            "x": self.normal(*leading, self.shape.value_heads, self.shape.value_dim),
            "B": self.normal(*leading, groups, k),
            "C": self.normal(*leading, groups, k + 1)[..., :k].contiguous(),
        }

    def _decay(self) -> Tensor:
        return -self.float32(self.shape.value_heads).abs()


def _scan(inputs: Inputs, state: Tensor | None = None) -> Result:
    x, dt, decay, b, c, skip = (inputs[name].float() for name in ("x", "dt", "A", "B", "C", "D"))
    result = state_space_scan(
        x, dt, decay, b, c, CHUNK, skip,
        dt_bias=inputs["dt_bias"], initial_states=state, dt_softplus=True, return_final_states=True,
    )  # fmt: skip
    assert isinstance(result, tuple)
    return result


KernelInputs = GatedDelta | Mamba2
