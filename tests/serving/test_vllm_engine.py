"""What vLLM on a CPU does with cut models. `make engines-vllm` creates its environment and sets the variable below."""

import os
import re
import subprocess

import engine_models
import pytest

import slimstate
from slimstate.serving import pool
from slimstate.serving.options import PoolOptions

PYTHON, pytestmark = engine_models.interpreter("vllm")
AGREEING = ("mamba2", "granitemoehybrid", "falcon_h1", *engine_models.SEVERAL_GROUPS)
VERDICTS = [*((name, "agrees") for name in AGREEING), ("qwen3_next", "refuses")]
BOOT = """
import sys
from vllm import LLM
if __name__ == "__main__":
    prefixes = len(sys.argv) > 2
    LLM(model=sys.argv[1], dtype="bfloat16", max_model_len=256, enforce_eager=True, enable_prefix_caching=prefixes)
"""
BOOTS = [("granitemoehybrid", 128, False), ("granitemoehybrid", 64, True), ("falcon_h1", 64, False)]


@pytest.mark.parametrize(("name", "verdict"), VERDICTS)
def test_vllm_does_what_the_rules_say(name, verdict, tmp_path):
    cut = engine_models.cut(engine_models.uncut(name, tmp_path / name), 64)
    engine = {"engine": "vllm", "python": PYTHON, "engine_settings": '{"gpu_memory_utilization": 0.2}'}
    record = slimstate.verify(cut, **engine, samples=2, length=48, tokens=8, progress=False)
    assert record.outcome.verdict == verdict, record.verdict


@pytest.mark.parametrize(("name", "key_dim", "prefix_caching"), BOOTS)
def test_the_pool_is_that_of_vllms_boot_log(name, key_dim, prefix_caching, tmp_path, monkeypatch):
    uncut = engine_models.uncut(name, tmp_path / name)
    folder = uncut if key_dim == 128 else engine_models.cut(uncut, key_dim)
    (tmp_path / "boot.py").write_text(BOOT)
    command = [PYTHON, tmp_path / "boot.py", folder, *["prefixes"] * prefix_caching]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    log = process.stdout + process.stderr
    block = re.search(r"Setting attention block size to (\d+) tokens", log)
    fits = re.search(r"Maximum concurrency for 256 tokens per request: ([\d.]+)x", log)
    assert fits, log[-2000:]
    multiple = 128  # on a CPU, where a block of this size is not logged; 16 on a GPU
    monkeypatch.setattr(pool, "BLOCK_MULTIPLE", multiple)
    options = PoolOptions(context=256, prefix_caching=prefix_caching)
    row = pool.count_sequences(str(uncut), "vllm", options, (64,), memory_gb=1).rows[key_dim == 64]
    assert (row.pages.block, f"{row.sequences:.2f}") == (int(block[1]) if block else multiple, fits[1])
