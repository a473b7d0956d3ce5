"""Kernels of an engine: found without it, refused in words, and checked against our recurrences."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from places import ROOT
from slimstate.benchmark import kernels
from slimstate.benchmark.bench import BenchOptions
from slimstate.benchmark.tables import as_markdown
from slimstate.kernels import delta_rule
from slimstate.kernels.fla_calls import unit
from slimstate.models.options import RunOptions
from slimstate.records.benchmark import KernelRecord, KernelSettings, KernelShape
from slimstate.system.errors import PlanError

WHEELS = {"vllm": os.environ.get("SLIMSTATE_VLLM_KERNELS"), "sglang": os.environ.get("SLIMSTATE_SGLANG_KERNELS")}
SMALL = KernelShape(name="small", rule="gated_delta", key_heads=1, value_heads=2, value_dim=8, width=32)
# wheels whose kernels are PyTorch: each file imports what those of the engine import
DECODE = """
import torch
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
    initial_state[slots] = last.mT * OF_STATES
    out.copy_(o * OF_OUTPUTS)


OF_STATES = 1.0
OF_OUTPUTS = 1.0
"""
PREFILL = """
import torch
from slimstate.kernels.delta_rule import chunked


def prefilled(q, k, v, g, beta, starts):
    found = [chunked(*(x[:, start:end] for x in (q, k, v, beta, g)), scale=q.shape[-1] ** -0.5)
             for start, end in zip(starts[:-1], starts[1:])]
    return torch.cat([o for o, _ in found], 1), torch.cat([last for _, last in found]).mT
"""
VLLM = {
    "decode": f"""
from vllm.triton_utils import tl, triton
from vllm.utils.torch_utils import async_tensor_h2d
{DECODE}""",
    "prefill": f"""
from vllm.platforms import current_platform
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
{PREFILL}
assert not current_platform.is_rocm()


def chunk_gated_delta_rule(q, k, v, g, beta, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel):
    return prefilled(q, k, v, g, beta, cu_seqlens)
""",
    "update": """
import vllm.envs as envs
from vllm import _custom_ops as ops
from vllm.logger import init_logger
from vllm.utils.platform_utils import get_device_name_as_file_name
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

init_logger(__name__).warning_once("%s", get_device_name_as_file_name())
assert envs.VLLM_TUNED_CONFIG_FOLDER is None and NULL_BLOCK_ID == 0
""",
    "scan": "from einops import rearrange\n",
}
SGLANG = {
    "decode": DECODE,
    "prefill": f"""
from sglang.srt.utils.common import torch_release
{PREFILL}
assert torch_release >= (2, 4)


def chunk_gated_delta_rule(
    q, k, v, g, beta, initial_state, initial_state_indices, cu_seqlens, head_first, use_qk_l2norm_in_kernel
):
    o, last = prefilled(q, k, v, g, beta, cu_seqlens)
    initial_state[initial_state_indices.long()] = last
    return o, None, None
""",
    "update": "from sglang.kernels.jit.utils import is_arch_support_pdl\n",
    "scan": "from einops import rearrange\nfrom .mamba_ssm import is_arch_support_pdl\n",
    "projection": """
from sglang.srt.environ import envs
from sglang.srt.utils import is_hip

assert not is_hip() and not envs.SGLANG_USE_AITER.get()
""",
}


@pytest.fixture
def wheels(tmp_path):
    """A folder that looks as unpacked wheels do; what loading them leaves behind is taken away again."""
    for engine, texts in (("vllm", VLLM), ("sglang", SGLANG)):
        for role, text in texts.items():
            place = file_of(tmp_path, engine, role)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        (tmp_path / engine / "__init__.py").write_text("raise RuntimeError('the engine itself')")
        (tmp_path / f"{engine}-1.2.3.dist-info").mkdir()
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in kernels.ENGINES:
            del sys.modules[name]


def file_of(wheels: Path, engine: str, role: str) -> Path:
    package = kernels.ENGINES[engine].PACKAGE
    return wheels / package.name / f"{package.modules[role]}.py"


def bench(kernels_at: str, **more) -> KernelRecord:
    settings = KernelSettings(kernels=kernels_at, sequences=5, prompts=2, length=16)
    run, options = RunOptions(device="cpu", dtype="float32"), BenchOptions(rounds=2)
    return kernels.bench_kernels(kernels_at, (SMALL,), settings=settings, run=run, options=options, **more)


@pytest.mark.parametrize(("engine", "title"), [("vllm", "vLLM"), ("sglang", "SGLang")])
def test_kernels_are_timed_at_every_multiple_of_16_and_checked(engine, title, wheels, tmp_path):
    record = bench(f"{engine}={wheels}")
    assert [(row.mode, row.key_dim) for row in record.rows] == [
        ("decode", 32), ("decode", 16), ("prefill", 32), ("prefill", 16),
    ]  # fmt: skip
    assert record.kernels == f"{title} 1.2.3, Triton"
    for row in record.rows:
        assert row.difference < 1e-4
        assert row.state_bytes == 4 * 2 * 8 * row.key_dim
    assert record.command.startswith(f"slimstate bench decode --models small --batches 5 --kernels {engine}=")
    record.write(tmp_path / "record.json")
    assert KernelRecord.read(tmp_path / "record.json") == record
    assert "of copying" in as_markdown(record)


@pytest.mark.parametrize("what", ["OF_OUTPUTS", "OF_STATES"])
def test_a_kernel_that_computes_something_else_is_told(what, wheels):
    path = file_of(wheels, "vllm", "decode")
    path.write_text(path.read_text().replace(f"{what} = 1.0", f"{what} = 1.1"))
    wrong, right = bench(f"vllm={wheels}", key_dims=(16,)).rows
    assert wrong.difference > 0.1 > right.difference


def test_a_step_leaves_the_state_that_the_rule_leaves(wheels):
    drawn = kernels.GatedDelta(shape=SMALL, key_dim=16, device=torch.device("cpu"), dtype=torch.float32)
    given = drawn.decoding(3)
    state = given["state"].clone()
    drawn.decode(kernels.loaded(f"vllm={wheels}"), given, state)
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
        kernels.loaded(f"vllm={tmp_path}")
    with pytest.raises(PlanError, match="holds none of SGLang's: unpack sglang/kernels/ops/attention/fla, "):
        kernels.loaded(f"sglang={tmp_path}")
    with pytest.raises(PlanError, match=r"`kernels` onnx=.*: vllm=PATH or sglang=PATH"):
        kernels.loaded(f"onnx={tmp_path}")
    with pytest.raises(PlanError, match="unknown shape 'gla'; there are qwen3_next, qwen3_5, mamba2"):
        kernels.named(["gla"])


def interpreted(engine: str) -> dict[tuple[str, int], dict[str, object]]:
    """What an engine's kernels do in Triton's interpreter, on a CPU, by kernel and key dim."""
    script = ROOT / "tests" / "interpret_engine.py"
    asked = [sys.executable, script, f"{engine}={WHEELS[engine]}"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {(row["kernel"], row["key_dim"]): row for row in json.loads(done.stdout)["rows"]}


@pytest.mark.slow
@pytest.mark.skipif(WHEELS["vllm"] is None, reason="SLIMSTATE_VLLM_KERNELS names no unpacked wheel")
def test_vllms_kernels_agree_with_our_recurrences_at_cut_widths():
    found = interpreted("vllm")
    assert len(found) == 28
    assert max(row["difference"] for row in found.values()) < 1e-4


@pytest.mark.slow
@pytest.mark.skipif(WHEELS["sglang"] is None, reason="SLIMSTATE_SGLANG_KERNELS names no unpacked wheel")
def test_sglangs_kernels_agree_at_cut_widths_and_two_ask_for_a_power_of_two():
    """SGLang 0.5.23 is for Triton 3.8; its prefill needs block pointers, which Triton 3.9 no longer has."""
    found = interpreted("sglang")
    newer = tuple(map(int, version("triton").split(".")[:2])) >= (3, 9)
    gone = {key for key in found if key[0] == "gated_delta prefill"} if newer else set()
    asks = ("Qwen3-Next projections", "Qwen3.5 projections, elsewhere")
    odd = {(kernel, key_dim) for kernel in asks for key_dim in (96, 77, 48)}
    refused = {key: row["error"] for key, row in found.items() if "error" in row}
    assert refused.keys() == gone | odd
    assert {refused[key] for key in odd} == {"arange's range must be a power of 2"}
    assert all("Block pointers have been removed" in refused[key] for key in gone)
    assert len(found) == 56
    assert max(row["difference"] for key, row in found.items() if key not in refused) < 1e-4
