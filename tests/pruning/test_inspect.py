"""What a cut would save: states and KV caches, from a folder or from a config alone."""

from __future__ import annotations

import json
import shutil

import pytest

import slimstate
import tiny
from slimstate.checkpoints.reader import described_mixers
from slimstate.serving.widths import Curve
from slimstate.system.errors import PlanError

QWEN3_NEXT_80B = {
    "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "full_attention_interval": 4,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "vocab_size": 151936, "rms_norm_eps": 1e-6, "moe_intermediate_size": 512, "num_experts": 4,
}  # fmt: skip


@pytest.mark.slow
def test_a_hybrid_with_a_long_context_hardly_gains_sequences(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3_NEXT_80B))
    record = slimstate.inspect(path)
    assert (record.context, record.softmax_layers) == (32_768, 12)
    assert record.kv_bytes == 12 * 2 * 2 * 256 * 32_768 * 2
    assert record.state_bytes["fp32"] == 36 * 32 * 128 * 128 * 4
    half = next(option for option in record.options if option.key_dim == 64)
    assert half.sequences == pytest.approx((72 + 768) / (36 + 768))
    assert "768.00 MiB of KV cache at 32,768 tokens" in str(record)
    nothing = slimstate.inspect(path, context=0)
    assert next(option for option in nothing.options if option.key_dim == 64).sequences == 2
    with pytest.raises(PlanError, match="`context` must be at least 0, got -1"):
        slimstate.inspect(path, context=-1)


@pytest.mark.parametrize("name", ["delta_net-plain", "delta_net-hybrid", "qwen3_next-plain", "mamba2-plain"])
def test_a_config_alone_is_described_as_its_folder_is(name, folders, tmp_path):
    shutil.copyfile(folders[name] / "config.json", tmp_path / "config.json")
    alone, whole = slimstate.inspect(tmp_path / "config.json"), slimstate.inspect(folders[name])
    assert alone.to_dict() | {"model": None} == whole.to_dict() | {"model": None}


@pytest.mark.parametrize("name", sorted(tiny.OF_TRANSFORMERS))
def test_the_kv_cache_of_every_hybrid_is_known(name, folders):
    record = slimstate.inspect(folders[name])
    assert (record.kv_bytes == 0) is (record.softmax_layers == 0)
    assert record.kv_bytes is not None


def test_only_layers_of_similar_size_have_a_speed_curve(folders):
    mixer = described_mixers(json.loads((folders["delta_net-plain"] / "config.json").read_text()))[0]
    sizes = {"device": "", "kernels": "", "conditions": "", "seconds": {16: 1.0}}
    for factor, near in ((1, True), (2, True), (4, False)):
        curve = Curve(**sizes, heads=factor * mixer.value_heads, value_dim=mixer.value_dim)
        assert curve.is_similar(mixer) is near
