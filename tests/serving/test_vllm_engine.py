"""What vLLM on a CPU makes of cut models, in its own environment: `make engines-vllm` makes it and names it here."""

from __future__ import annotations

import os
from pathlib import Path

import engine_models
import pytest

from slimstate.serving.verification.engine_call import EngineOptions
from slimstate.serving.verification.verify import VerifyOptions, verify

PYTHON = os.environ.get("SLIMSTATE_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="SLIMSTATE_VLLM_PYTHON names no interpreter with vLLM; make engines-vllm"),
]


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("mamba2", "agrees"),
        ("granitemoehybrid", "agrees"),
        ("falcon_h1", "agrees"),
        ("mamba2-groups", "differs"),
        ("qwen3_next", "refuses"),
    ],
)
def test_vllm_does_what_the_rules_say(name, verdict, tmp_path):
    cut = engine_models.cut(engine_models.uncut(name, tmp_path / name), 64)
    options = VerifyOptions(samples=2, length=48, tokens=8)
    engine = EngineOptions(engine="vllm", python=Path(PYTHON), settings={"gpu_memory_utilization": 0.2})
    record = verify(cut, engine, options=options)
    assert record.outcome.verdict == verdict, record.verdict
