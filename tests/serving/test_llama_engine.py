"""What llama.cpp does with cut models. `make engines-llama` creates its environment and sets the variables below."""

import os

import engine_models
import pytest

import slimstate

PYTHON, pytestmark = engine_models.interpreter("llama")
CONVERTER = os.environ.get("SLIMSTATE_LLAMA_CONVERTER", "")
OPTIONS = {"engine": "llama.cpp", "python": PYTHON, "converter": CONVERTER, "samples": 2, "length": 48, "tokens": 8}


def verify(folder, against=None):
    return slimstate.verify(folder, **OPTIONS, against=against and str(against), progress=False)


@pytest.mark.parametrize("name", ["mamba2", "granitemoehybrid", "falcon_h1", *engine_models.SEVERAL_GROUPS])
@pytest.mark.parametrize("key_dim", [96, 64, 77])
def test_mamba_agrees(name, key_dim, tmp_path):
    record = verify(engine_models.cut(engine_models.uncut(name, tmp_path / name), key_dim))
    assert record.outcome.verdict == "agrees", record.verdict


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
@pytest.mark.parametrize("state_dim", [96, 64, 32])
def test_gated_delta_models_with_as_many_values_as_keys_agree(name, state_dim, tmp_path):
    record = verify(engine_models.cut(engine_models.uncut(name, tmp_path / name), state_dim, "state_dim"))
    assert record.outcome.verdict == "agrees", record.verdict
    assert record.outcome.differences.largest < 1e-4


@pytest.mark.parametrize("gguf_type", ["q8_0", "q4_k_m"])
def test_quantised_files_agree_within_the_tolerance_of_their_type(gguf_type, tmp_path):
    for name, dim in (("qwen3_next", "state_dim"), ("mamba2", "key_dim")):
        model = engine_models.uncut(name, tmp_path / name)
        cut = engine_models.cut(model, 64, dim)
        record = slimstate.verify(cut, **OPTIONS, gguf_type=gguf_type, progress=False)
        assert record.outcome.verdict == "agrees", record.verdict
        assert record.outcome.differences.largest > 1e-3  # it was quantised
    record = slimstate.verify(cut, **OPTIONS, gguf_type=gguf_type, against=str(model), masked=True, progress=False)
    assert record.outcome.differences.largest < 0.05, record.verdict


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_every_cut_of_keys_alone_of_a_gated_delta_model_is_refused_with_the_reason(name, tmp_path):
    model = engine_models.uncut(name, tmp_path / name)
    record = verify(engine_models.cut(model, 64), against=model)
    assert record.outcome.verdict == "refuses"
    assert record.outcome.words
    assert "ssm_d_state" in record.outcome.reason
    assert record.against.verdict == "agrees", record.verdict
    assert record.verdict.endswith("the cut breaks it there")
