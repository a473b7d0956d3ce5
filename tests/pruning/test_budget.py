"""A budget chooses the largest dims worth choosing that fit, and says why; `inspect` says what a cut would save."""

import json
import shutil

import pytest

import slimstate
import tiny
from places import ROOT
from slimstate.checkpoints.reader import Checkpoint, described_mixers
from slimstate.cli import name_flags
from slimstate.families import FAMILIES
from slimstate.pruning import sizes
from slimstate.pruning.options import GIB, MIB, Budget
from slimstate.pruning.sizes import dims_worth_choosing, fit_budget, key_dims_worth_choosing, predicted_loss
from slimstate.serving.widths import Curve
from slimstate.system.errors import PlanError

# published sizes: mebibytes of state per sequence in fp32, from the configs alone
PUBLISHED = {"qwen3_next": 72.0, "qwen3_5_text": 48.0, "qwen3_5_moe_text": 60.0, "olmo_hybrid": 50.625, "mamba2": 256.0}
QWEN = {"model_type": "qwen3_next"}
MIXERS, KEYS = FAMILIES["qwen3_next"].mixers(QWEN), dims_worth_choosing(QWEN)
QWEN3_NEXT_80B = {
    "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "full_attention_interval": 4,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "vocab_size": 151936, "rms_norm_eps": 1e-6, "moe_intermediate_size": 512, "num_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.parametrize("model_type", sorted(PUBLISHED))
def test_the_state_of_a_published_model_is_as_large_as_it_is_known_to_be(model_type):
    mixers = FAMILIES[model_type].mixers({"model_type": model_type})
    assert sizes.state_bytes(mixers, mixers[0].axis.width)["fp32"] == PUBLISHED[model_type] * MIB


@pytest.mark.parametrize("megabytes", [9.0, 20.0, 36.0, 40.0, 71.9])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_largest_key_dim_that_fits_is_chosen(megabytes, dtype):
    (chosen, values), line = fit_budget(Budget(state_mb=megabytes, state_dtype=dtype), MIXERS, KEYS)
    every = [128, *key_dims_worth_choosing(128)]
    fitting = [key_dim for key_dim in every if sizes.state_bytes(MIXERS, key_dim)[dtype] <= megabytes * MIB]
    assert (chosen, values) == (max(fitting), None)
    assert dtype in line


@pytest.mark.parametrize("megabytes", [40.0, 37.0, 18.0, 9.0, 4.0])
def test_of_all_pairs_that_fit_the_one_with_the_least_predicted_loss_is_chosen(megabytes):
    """By brute force; half of the state is cut from the keys alone, more from both."""
    pairs = dims_worth_choosing(QWEN, "both")
    assert len(pairs) == 8 * 8 - 1
    best, line = fit_budget(Budget(state_mb=megabytes), MIXERS, pairs)
    losses = {
        (keys, values): predicted_loss(MIXERS[0], keys, values)
        for keys in range(16, 129, 16)
        for values in range(16, 129, 16)
        if 36 * 32 * keys * values * 4 <= megabytes * MIB
    }
    assert losses[best[0], best[1] or 128] == min(losses.values())
    assert (best[1] is None) is (megabytes == 37)
    assert "least predicted loss" in line or megabytes == 37


def test_losses_of_both_sides_are_predicted_as_they_were_measured():
    """Of models without softmax layers, after a reconstruction, in nats per token."""
    rows = json.loads((ROOT / "docs" / "records" / "dims-30m.json").read_text())["rows"]
    uncut = {row["model"]: row for row in rows if row["what"] == "uncut"}
    measured = [row for row in rows if row["what"] == "reconstructed, heads kept" and "delta" in row["model"]]
    assert len(measured) == 12
    for row in measured:
        before = uncut[row["model"]]
        sizes = {"hidden_size": before["key_dim"], "num_heads": 1, "expand_v": before["value_dim"] / before["key_dim"]}
        mixer = FAMILIES["delta_net"].mixers({"model_type": "delta_net", **sizes})[0]
        loss = row["nats_per_token"] - before["nats_per_token"]
        assert predicted_loss(mixer, row["key_dim"], row["value_dim"]) == pytest.approx(loss, abs=0.04)


def test_a_budget_keeps_to_what_model_and_engine_can_express(folders):
    """Values of RetNet, one width of MesaNet, integer ratios of Mamba-2, and equal dims for llama.cpp."""
    for name, options, dims in (
        ("retnet-plain", {}, (24, 16)), ("mesa_net-plain", {}, (16, None)),
        ("qwen3_next-plain", {"axes": "values"}, (24, 6)), ("qwen3_next-plain", {"engine": "llama.cpp"}, (6, 6)),
    ):  # fmt: skip
        folder = folders[name]
        mixers = Checkpoint.open(folder).mixers
        share = 0.5 if "engine" not in options else 0.3
        state_mb = sizes.state_bytes(mixers, mixers[0].axis.width)["fp32"] / MIB * share
        budget = slimstate.inspect(folder, state_mb=state_mb, **options).budget
        assert (budget.key_dim, budget.value_dim) == dims, name
        cut = slimstate.prune(folder, method="l1", state_mb=state_mb, **options)
        assert (cut.key_dim, cut.value_dim) == (dims[0], dims[1] or cut.value_dim)
        assert cut.state_bytes["after"]["fp32"] <= state_mb * MIB
    mamba = {"model_type": "mamba2", "num_heads": 128, "head_dim": 64, "expand": 2, "hidden_size": 4096}
    assert [values for _, values in dims_worth_choosing(mamba, "values")] == [32]


@pytest.mark.parametrize(("name", "words"), [
    ("delta_net-plain", "values can be cut to"), ("retnet-plain", "keys cannot be cut: it rotates"),
    ("mesa_net-plain", "one width"), ("rwkv6-plain", "values cannot be cut: its norm"),
])  # fmt: skip
def test_inspect_says_which_sides_can_be_cut(name, words, folders, succeed):
    record = slimstate.inspect(folders[name])
    assert words in record.sides
    assert name_flags(record.sides) in " ".join(succeed("inspect", folders[name]).split())
    assert (record.options == ()) is (name in tiny.VALUES_ONLY)


def test_sequences_share_the_memory_equally():
    shared = Budget(sequences=512, memory_gb=20)
    assert shared.bytes == 20 * GIB / 512 == 40 * MIB
    dims, line = fit_budget(shared, MIXERS, KEYS)
    assert dims == fit_budget(Budget(state_mb=40), MIXERS, KEYS)[0] == (64, None)
    assert "64 of 128: 36 MiB fit 20 GiB for 512 sequences, 40 MiB per sequence in fp32" in line
    assert "80 would take 45" in line


def test_compressions_are_rounded_and_the_rounding_is_explained():
    compressions = {0.3: 96, 0.4: 80, 0.5: 64, 0.75: 32, 0.875: 16, 0.01: 112, 0.999: 16}
    assert {value: sizes.resolve_key_dim(128, value, None)[0] for value in compressions} == compressions
    assert sizes.resolve_key_dim(80, 0.8, None) == (16, "compression 0.8 of 80 channels keeps 16")
    assert sizes.resolve_key_dim(128, None, 77)[0] == 77
    assert sizes.resolve_key_dim(16, 0.5, None)[0] == 8
    assert "rounded to key dim 96" in sizes.resolve_key_dim(128, 0.3, None)[1]


def test_prune_and_inspect_choose_alike(folders):
    folder = folders["qwen3_next-plain"]
    whole = sizes.state_bytes(Checkpoint.open(folder).mixers, 24)["fp32"] / MIB
    assert slimstate.prune(folder, method="l1", state_mb=whole * 0.7).key_dim == 16
    for state_mb, key_dim in ((whole * 0.7, 16), (whole, 24)):
        assert slimstate.inspect(folder, state_mb=state_mb).budget.key_dim == key_dim
    assert json.dumps(slimstate.inspect(folder, budget=Budget(state_mb=whole)).to_json())
    assert slimstate.inspect(folder).budget is None
    with pytest.raises(PlanError, match=r"fits.*nothing to cut"):
        slimstate.prune(folder, method="l1", state_mb=whole)


@pytest.mark.parametrize(("options", "message"), [
    ({"state_mb": 1.0, "sequences": 4}, "one sequence, or `sequences` and `memory_gb`"),
    ({"sequences": 4}, "one sequence, or `sequences` and `memory_gb`"),
    ({"memory_gb": 4}, "one sequence, or `sequences` and `memory_gb`"),
    ({"state_mb": 0}, "`state_mb` must be more than 0, got 0"),
    ({"sequences": -1, "memory_gb": 4}, "`sequences` must be at least 1, got -1"),
    ({"state_mb": 1, "state_dtype": "fp8"}, "unknown `state_dtype`"),
    ({"state_mb": 1e-9}, "nothing fits"),
    ({"key_dim": 8, "axes": "both"}, "`axes` needs a budget"),
    ({"state_mb": 1, "key_dim": 8}, "leave out `compression`, `key_dim`"),
])  # fmt: skip
def test_contradictory_and_impossible_budgets_are_refused(options, message, folders):
    with pytest.raises(PlanError, match=message):
        slimstate.prune(folders["qwen3_next-plain"], method="l1", **options)


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


def test_attention_with_a_window_caches_no_more_than_that(tmp_path):
    attention = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "window_size": 16}
    config = {"model_type": "delta_net", "num_hidden_layers": 2, "hidden_size": 128, "attn": attention}
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = [slimstate.inspect(tmp_path / "config.json", context=context).kv_bytes for context in (8, 200)]
    assert sizes == [2 * 2 * 32 * 2 * tokens for tokens in (8, 16)]


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
