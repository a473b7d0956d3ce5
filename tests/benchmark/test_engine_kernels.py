"""Kernels of an engine are loaded without the engine, refused with a reason, and checked against our recurrences."""

import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch

from places import ROOT
from slimstate.benchmark.bench import Bench
from slimstate.benchmark.options import BenchConfig
from slimstate.benchmark.tables import as_markdown
from slimstate.models.options import RunOptions
from slimstate.records.benchmark import KernelRecord
from slimstate.system.errors import PlanError

sys.path.insert(0, str(ROOT / "benchmarks"))
sys.modules.pop("kernels", None)  # transformers may have taken tests/kernels for the package that it looks for
from engine_kernels.inputs import GatedDelta, KernelShape  # noqa: E402

import kernels  # noqa: E402

WHEELS = {"vllm": os.environ.get("SLIMSTATE_VLLM_KERNELS"), "sglang": os.environ.get("SLIMSTATE_SGLANG_KERNELS")}
SMALL = KernelShape(name="small", rule="gated_delta", key_heads=1, value_heads=2, value_dim=8, width=32)
# wheels with kernels in PyTorch: each file imports what the engine's file imports
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
    initial_state[slots] = last.mT * STATE_FACTOR
    out.copy_(o * OUTPUT_FACTOR)


STATE_FACTOR = 1.0
OUTPUT_FACTOR = 1.0
"""
PREFILL = """
import torch
from slimstate.kernels.delta_rule import chunked


def run_prefill(q, k, v, g, beta, starts):
    parts = [chunked(*(x[:, start:end] for x in (q, k, v, beta, g)), scale=q.shape[-1] ** -0.5)
             for start, end in zip(starts[:-1], starts[1:])]
    return torch.cat([o for o, _ in parts], 1), torch.cat([state for _, state in parts]).mT
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
    return run_prefill(q, k, v, g, beta, cu_seqlens)
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
    o, last = run_prefill(q, k, v, g, beta, cu_seqlens)
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
NO_KERNELS = [
    ("vllm={}", "contains no kernels of vLLM; unpack vllm/third_party"),
    ("sglang={}", "contains no kernels of SGLang; unpack sglang/kernels/ops/attention/fla, "),
    ("onnx={}", "`kernels` must be vllm=PATH or sglang=PATH"),
]


@pytest.fixture
def wheels(tmp_path):
    """A folder that looks like unpacked wheels; the modules loaded from it are removed afterwards."""
    for engine, texts in (("vllm", VLLM), ("sglang", SGLANG)):
        for role, text in texts.items():
            path = file_of(tmp_path, engine, role)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / engine / "__init__.py").write_text("raise RuntimeError('the engine itself')")
        (tmp_path / f"{engine}-1.2.3.dist-info").mkdir()
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in kernels.ENGINES:
            del sys.modules[name]


def file_of(wheels, engine: str, role: str):
    package = kernels.ENGINES[engine].PACKAGE
    return wheels / package.name / f"{package.modules[role]}.py"


def time_small(source: str, **more) -> KernelRecord:
    settings = kernels.KernelSettings(kernels=source, shapes=(SMALL,), sequences=5, prompts=2, length=16, **more)
    engine = kernels.load_kernels(source)
    config = BenchConfig(rounds=2, run=RunOptions(device="cpu", dtype="float32"))
    bench = Bench.prepare("kernels", config, kernels=engine.title)
    return kernels.time_kernels(settings, engine, bench)


@pytest.mark.parametrize(("engine", "title"), [("vllm", "vLLM"), ("sglang", "SGLang")])
def test_kernels_are_timed_at_every_multiple_of_16_and_checked(engine, title, wheels, tmp_path):
    record = time_small(f"{engine}={wheels}")
    timed = [(mode, key_dim) for mode in ("decode", "prefill") for key_dim in (32, 16)]
    assert [(row.mode, row.key_dim) for row in record.rows] == timed
    assert record.kernels == f"{title} 1.2.3"
    for row in record.rows:
        assert row.difference < 1e-4
        assert row.state_bytes == 4 * 2 * 8 * row.key_dim
        assert (row.share_of_copy_bandwidth is None) == (row.mode == "prefill")
    record.write(tmp_path / "record.json")
    assert KernelRecord.read(tmp_path / "record.json") == record
    assert "of copying" in as_markdown(record)


@pytest.mark.slow
def test_the_script_writes_a_record(wheels, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "SHAPES", (SMALL,))
    words = [f"vllm={wheels}", "--shapes", "small", "--key-dims", "16", "--sequences", "5", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["kernels.py", *words, "--out", str(tmp_path / "out")])
    kernels.main()
    record = KernelRecord.read(tmp_path / "out" / "bench-kernels.json")
    assert [(row.mode, row.key_dim) for row in record.rows] == [("decode", 16), ("prefill", 16)]
    assert (record.settings["sequences"], record.kernels) == (5, "vLLM 1.2.3, Triton")


@pytest.mark.parametrize("factor", ["OUTPUT_FACTOR", "STATE_FACTOR"])
def test_a_kernel_that_computes_something_else_differs(factor, wheels):
    path = file_of(wheels, "vllm", "decode")
    path.write_text(path.read_text().replace(f"{factor} = 1.0", f"{factor} = 1.1"))
    wrong, right = time_small(f"vllm={wheels}", key_dims=(16,)).rows
    assert wrong.difference > 0.1 > right.difference


def test_a_decoding_step_updates_all_states_but_the_first_which_stays_unused(wheels):
    random = GatedDelta(shape=SMALL, key_dim=16, device=torch.device("cpu"), dtype=torch.float32)
    inputs = random.for_decode(3)
    before = inputs["initial_state"].clone()
    random.decode(kernels.load_kernels(f"vllm={wheels}"), inputs)
    assert (inputs["initial_state"] != before).flatten(1).any(1).tolist() == [False, True, True, True]


@pytest.mark.parametrize(("source", "complaint"), NO_KERNELS)
def test_a_folder_without_kernels_is_refused_with_advice(source, complaint, tmp_path):
    with pytest.raises(PlanError, match=complaint):
        kernels.load_kernels(source.format(tmp_path))


def test_an_unknown_shape_is_refused():
    with pytest.raises(PlanError, match="unknown shape 'gla'; choose from qwen3_next, qwen3_5, mamba2"):
        kernels.shapes_named(["gla"])


def interpret(engine: str) -> dict[tuple[str, int], dict[str, object]]:
    """Run an engine's kernels in Triton's interpreter on a CPU; return the rows by kernel and key dim."""
    script = ROOT / "benchmarks" / "engine_kernels" / "interpret.py"
    words = [sys.executable, script, f"{engine}={WHEELS[engine]}"]
    process = subprocess.run(words, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return {(row["kernel"], row["key_dim"]): row for row in json.loads(process.stdout)["rows"]}


@pytest.mark.slow
@pytest.mark.skipif(WHEELS["vllm"] is None, reason="SLIMSTATE_VLLM_KERNELS names no unpacked wheel")
def test_vllms_kernels_agree_with_our_recurrences_at_cut_widths():
    rows = interpret("vllm")
    assert len(rows) == 28
    assert max(row["difference"] for row in rows.values()) < 1e-4


@pytest.mark.slow
@pytest.mark.skipif(WHEELS["sglang"] is None, reason="SLIMSTATE_SGLANG_KERNELS names no unpacked wheel")
def test_sglangs_kernels_agree_at_cut_widths_and_two_need_a_power_of_two():
    """SGLang 0.5.23 is for Triton 3.8; its prefill needs block pointers, which Triton 3.9 has removed."""
    rows = interpret("sglang")
    newer = tuple(map(int, version("triton").split(".")[:2])) >= (3, 9)
    removed = {key for key in rows if key[0] == "gated_delta prefill"} if newer else set()
    power_of_two = ("Qwen3-Next projections", "Qwen3.5 projections, elsewhere")
    odd = {(kernel, key_dim) for kernel in power_of_two for key_dim in (96, 77, 48)}
    errors = {key: row["error"] for key, row in rows.items() if "error" in row}
    assert errors.keys() == removed | odd
    assert {errors[key] for key in odd} == {"arange's range must be a power of 2"}
    assert all("Block pointers have been removed" in errors[key] for key in removed)
    assert len(rows) == 56
    assert max(row["difference"] for key, row in rows.items() if key not in errors) < 1e-4
