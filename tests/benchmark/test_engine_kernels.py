"""Kernels of an engine: found without it, refused in words, and checked against our recurrences."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from places import ROOT
from slimstate.benchmark import kernels, vllm_kernels
from slimstate.benchmark.bench import BenchOptions
from slimstate.benchmark.tables import as_markdown
from slimstate.kernels import delta_rule
from slimstate.kernels.fla_calls import unit
from slimstate.models.devices import RunOptions
from slimstate.records.benchmark import KernelRecord, KernelSettings, KernelShape
from slimstate.system.errors import PlanError

WHEEL = os.environ.get("SLIMSTATE_VLLM_KERNELS")
SMALL = KernelShape(name="small", rule="gated_delta", key_heads=1, value_heads=2, value_dim=8, width=32)
# a wheel whose kernels are PyTorch: each file imports what those of vLLM import
DECODE = """
import torch
from vllm.triton_utils import tl, triton
from vllm.utils.torch_utils import async_tensor_h2d
from slimstate.kernels.delta_rule import recurrence
from slimstate.kernels.fla_calls import unit


def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel
):
    heads, values, keys = initial_state.shape[1:]
    per = (mixed_qkv.shape[1] - heads * values) // 2 // keys
    q, k, v = mixed_qkv.split([per * keys, per * keys, heads * values], -1)
    q, k = (unit(x.unflatten(-1, (per, keys))).unsqueeze(1) for x in (q, k))
    g = -A_log.exp() * torch.nn.functional.softplus(a + dt_bias)
    slots = ssm_state_indices.long()
    o, last = recurrence(
        q, k, v.unflatten(-1, (heads, values)).unsqueeze(1), b.sigmoid().unsqueeze(1), g.unsqueeze(1), scale=scale,
        state=initial_state[slots].mT,
    )
    initial_state[slots] = last.mT
    out.copy_(o * FACTOR)


FACTOR = 1.0
"""
PREFILL = """
from vllm.platforms import current_platform
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from slimstate.kernels.delta_rule import chunked

assert not current_platform.is_rocm()


def chunk_gated_delta_rule(q, k, v, g, beta, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel):
    found = [chunked(*(x[:, start:end] for x in (q, k, v, beta, g)), scale=q.shape[-1] ** -0.5)
             for start, end in zip(cu_seqlens[:-1], cu_seqlens[1:])]
    import torch
    return torch.cat([o for o, _ in found], 1), torch.cat([last for _, last in found])
"""
UPDATE = """
import vllm.envs as envs
from vllm import _custom_ops as ops
from vllm.logger import init_logger
from vllm.utils.platform_utils import get_device_name_as_file_name
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

init_logger(__name__).warning_once("%s", get_device_name_as_file_name())
assert envs.VLLM_TUNED_CONFIG_FOLDER is None and NULL_BLOCK_ID == 0
"""


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A folder that looks as an unpacked wheel does; what loading it leaves behind is taken away again."""
    for place, files in (
        (vllm_kernels.DELTA, {"fused_recurrent.py": DECODE, "chunk.py": PREFILL}),
        (vllm_kernels.MAMBA, {"mamba_ssm.py": UPDATE, "ssd_combined.py": "from einops import rearrange\n"}),
    ):
        folder = tmp_path / "vllm" / place
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(text)
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('vLLM itself')")
    (tmp_path / "vllm-1.2.3.dist-info").mkdir()
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name == "vllm" or name.startswith("vllm."):
            del sys.modules[name]


def bench(wheel: Path, **more) -> KernelRecord:
    settings = KernelSettings(kernels=f"vllm={wheel}", sequences=5, prompts=2, length=16)
    run = RunOptions(device="cpu", dtype="float32")
    return kernels.bench_kernels(wheel, (SMALL,), settings=settings, run=run, options=BenchOptions(rounds=2), **more)


def test_kernels_are_timed_at_every_multiple_of_16_and_checked(wheel, tmp_path):
    record = bench(wheel)
    assert [(row.mode, row.key_dim) for row in record.rows] == [
        ("decode", 32), ("decode", 16), ("prefill", 32), ("prefill", 16),
    ]  # fmt: skip
    assert record.kernels == "vLLM 1.2.3, Triton"
    for row in record.rows:
        assert row.difference < 1e-4
        assert row.state_bytes == 4 * 2 * 8 * row.key_dim
    assert record.command.startswith("slimstate bench decode --models small --batches 5 --kernels vllm=")
    record.write(tmp_path / "record.json")
    assert KernelRecord.read(tmp_path / "record.json") == record
    assert "of copying" in as_markdown(record)


def test_a_kernel_that_computes_something_else_is_told(wheel):
    path = wheel / "vllm" / vllm_kernels.DELTA / "fused_recurrent.py"
    path.write_text(path.read_text().replace("FACTOR = 1.0", "FACTOR = 1.1"))
    wrong, right = bench(wheel, key_dims=(16,)).rows
    assert wrong.difference > 0.1 > right.difference


def test_a_step_leaves_the_state_that_the_rule_leaves(wheel):
    drawn = kernels.GatedDelta(shape=SMALL, key_dim=16, device=torch.device("cpu"), dtype=torch.float32)
    given = drawn.decoding(3)
    state = given["state"].clone()
    drawn.decode(vllm_kernels.vllm_kernels(wheel), given, state)
    assert torch.equal(state[0], given["state"][0])  # a slot that is never used
    mixed = given["mixed"]
    q, k, v = mixed[:, :16], mixed[:, 16:32], mixed[:, 32:].unflatten(-1, (2, 8))
    g = -given["A_log"].exp() * torch.nn.functional.softplus(given["a"] + given["dt_bias"])
    _, last = delta_rule.recurrence(
        unit(q).view(3, 1, 1, 16), unit(k).view(3, 1, 1, 16), v.unsqueeze(1), given["b"].sigmoid().unsqueeze(1),
        g.unsqueeze(1), scale=0.25, state=given["state"][1:].mT,
    )  # fmt: skip
    torch.testing.assert_close(state[1:].mT, last)


def test_a_folder_without_kernels_says_how_to_get_one(tmp_path):
    with pytest.raises(PlanError, match="holds none of vLLM's: unpack vllm/third_party"):
        vllm_kernels.vllm_kernels(tmp_path)
    with pytest.raises(PlanError, match="unknown shape 'gla'; there are qwen3_next, qwen3_5, mamba2"):
        kernels.named(["gla"])


@pytest.mark.slow
@pytest.mark.skipif(WHEEL is None, reason="SLIMSTATE_VLLM_KERNELS names no unpacked wheel")
def test_vllms_kernels_agree_with_our_recurrences_at_cut_widths():
    """In Triton's interpreter, on a CPU."""
    script = ROOT / "tests" / "interpret_vllm.py"
    done = subprocess.run([sys.executable, "-O", script, WHEEL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 20
    assert max(found.values()) < 1e-4
