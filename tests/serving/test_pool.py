"""Counts of sequences match the pages and blocks that engines report, and a pool that is filled block by block."""

import json
import math
from pathlib import Path

import pytest

from places import ROOT
from slimstate.families import FAMILIES, family_of
from slimstate.serving.options import PoolOptions
from slimstate.serving.pool import count_sequences, group_size
from slimstate.system.errors import ModelError, PlanError

CONFIGS = Path(__file__).parent / "configs"
QWEN3_NEXT, QWEN3_5 = CONFIGS / "qwen3-next-80b-a3b.json", CONFIGS / "qwen3.5-27b.json"
GIB = 2**30
BOOTS = json.loads((ROOT / "docs" / "records" / "vllm-boot.json").read_text())
BLOCKS = [
    (QWEN3_NEXT, {}, 544),
    (QWEN3_5, {}, 784),
    # from a report of a pool that was full too early, with fp8 keys and values and five drafted tokens
    (QWEN3_5, {"kv_dtype": "fp8", "speculative_tokens": 5}, 1616),
]
STATE_DTYPES = [(QWEN3_NEXT, "sglang", "float32"), (QWEN3_NEXT, "vllm", "bfloat16"), (QWEN3_5, "vllm", "float32")]


def count(model: Path, engine: str = "vllm", key_dims: tuple[int, ...] = (), memory_gb: float = 40, **pool):
    options = PoolOptions(**{"context": 32768, **pool})
    return count_sequences(str(model), engine, options, key_dims, memory_gb=memory_gb)


@pytest.mark.parametrize(("model", "options", "block"), BLOCKS)
def test_blocks_are_those_of_boot_logs(model, options, block):
    """vLLM logs `Setting attention block size to ... tokens` when it starts."""
    assert count(model, **options).rows[0].pages.block == block


@pytest.mark.parametrize(
    "boot", BOOTS["rows"], ids=lambda boot: f"{boot['model']}-{boot['key_dim']}-{boot['prefix_caching']}"
)
def test_a_pool_is_that_of_a_boot_log_to_the_last_digit(boot, tmp_path, monkeypatch):
    monkeypatch.setattr("slimstate.serving.pool.BLOCK_MULTIPLE", 128)  # on a CPU; 16 on a GPU
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BOOTS["configs"][boot["model"]]))
    options = {"memory_gb": 1, "context": 4096, "prefix_caching": boot["prefix_caching"]}
    row = count(path, key_dims=(64,), **options).rows[boot["key_dim"] == 64]
    state = row.pages.state + row.pages.convolution
    assert row.pages.block == boot["block_tokens"]
    assert f"{100 * (row.pages.page / state - 1):.2f}" == f"{boot['padding_percent']:.2f}"
    assert f"{row.sequences:.2f}" == f"{boot['sequences']:.2f}"


def fill(linear: int, softmax: int, states: int, context: int, block: int, blocks: int) -> int:
    """Fill a pool with one sequence after the other, each group of layers with its own blocks; return how many fit."""
    group = group_size(linear, softmax)
    tables = [states] * math.ceil(linear / group) + [math.ceil(context / block)] * math.ceil(softmax / group)
    sequences = 0
    while sum(tables) * (sequences + 1) <= blocks:
        sequences += 1
    return sequences


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("key_dim", [128, 64, 32])
def test_a_pool_of_vllm_fits_what_its_blocks_fit(key_dim, prefix_caching):
    record = count(QWEN3_NEXT, key_dims=(64, 32), prefix_caching=prefix_caching)
    row = next(row for row in record.rows if row.key_dim == key_dim)
    pages, group = row.pages, 12
    assert pages.state == 32 * 128 * key_dim * 2
    assert pages.convolution == (2 * 16 * key_dim + 32 * 128) * 3 * 2
    assert pages.page == pages.block * 2 * 2 * 256 * 2
    assert 0 <= pages.page - pages.state - pages.convolution < 16 * pages.token
    blocks = 40 * GIB // (group * pages.page)
    assert int(row.sequences) == fill(36, 12, 1 + prefix_caching, 32768, pages.block, blocks)
    assert row.share.states == 3 * (1 + prefix_caching) * group * pages.page
    assert (row.share.states + row.share.attention) * int(row.sequences) <= 40 * GIB
    if prefix_caching:  # four groups, each with a block at every block boundary
        assert row.cached == pytest.approx(blocks / (4 * math.ceil(32768 / pages.block)))


def test_a_cut_gains_in_short_sequences_and_nothing_where_a_state_is_stored_at_every_block():
    """Blocks shrink with the state, so there are more of them."""
    whole, half, quarter = count(QWEN3_5, key_dims=(64, 32), prefix_caching=True).rows
    assert whole.gain == 1
    assert 1 < half.gain < quarter.gain < 1.2  # keys and values are most of a long sequence
    assert quarter.cached == pytest.approx(whole.cached, rel=0.02)
    assert count(QWEN3_5, key_dims=(64,), context=512).rows[1].gain > 1.5


def test_gpus_share_heads_and_copy_what_they_cannot_share():
    one, four = (count(QWEN3_NEXT, tensor_parallel=shards).rows[0].pages for shards in (1, 4))
    assert four.state * 4 == one.state
    assert four.convolution * 4 == one.convolution
    assert four.token * 2 == one.token  # two key and value heads: one on each GPU, twice


def test_sglang_divides_its_memory_in_advance():
    for prefix_caching, slots_each in ((False, 1), (True, 5)):
        row = count(QWEN3_NEXT, "sglang", prefix_caching=prefix_caching).rows[0]
        slot = 36 * (32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 3 * 2)
        slots = int(40 * GIB * 0.9 / 1.9) // slot - 1
        tokens = (40 * GIB - (slots + 1) * slot) // (12 * 2 * 2 * 256 * 2)
        assert row.sequences == min(slots // slots_each, tokens // 32768)
        assert row.limit == ("tokens" if slots // slots_each >= tokens // 32768 else "states")


@pytest.mark.parametrize(("model", "engine", "dtype"), STATE_DTYPES)
def test_the_default_state_dtype_is_that_of_the_config_or_of_the_engine(model, engine, dtype):
    assert count(model, engine).state_dtype == dtype


def test_groups_of_layers_are_as_large_as_the_rarer_kind_and_a_model_without_softmax_has_only_states():
    assert (group_size(36, 12), group_size(12, 13), group_size(10, 15), group_size(4, 4)) == (12, 13, 10, 4)
    config = FAMILIES["mamba2"].stock_config
    caches = family_of(config).caches(config)
    assert (caches.linear_layers, caches.softmax_layers, caches.taps) == (64, 0, 4)


def test_a_config_is_enough_and_the_folder_may_contain_nothing_else(tmp_path, succeed):
    (tmp_path / "config.json").write_text(QWEN3_NEXT.read_text())
    flags = ("--engine", "vllm", "--memory-gb", 40, "--context", 32768, "--prefix-caching")
    record = json.loads(succeed("inspect", tmp_path, *flags, "--json"))
    assert [row["key_dim"] for row in record["rows"]] == list(range(128, 0, -16))
    out = succeed("inspect", QWEN3_NEXT, *flags)
    assert "kept prefixes" in out
    assert f"{record['rows'][0]['sequences']:.2f}" in out


def test_memory_that_is_too_small_for_a_slot_has_no_sequence(tmp_path):
    assert count(QWEN3_5, "sglang", (64,), memory_gb=0.01).rows[0].sequences == 0
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba2"}))
    assert count(tmp_path, "sglang").rows[0].limit == "states"  # it has nothing else


def test_an_engine_that_does_not_serve_the_model_is_named(tmp_path, succeed):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bamba"}))
    assert "SGLang" in count(tmp_path, "sglang").warning
    assert count(QWEN3_NEXT, "sglang").warning is None
    out = succeed("inspect", tmp_path, "--engine", "sglang", "--memory-gb", 40, "--context", 4096)
    assert "warning: at key dim" in out


def test_impossible_counts_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "delta_net", "num_hidden_layers": 2}))
    for model, engine, options, message in (
        (QWEN3_NEXT, "mlx", {}, "must be vllm or sglang"),
        (tmp_path, "vllm", {}, "sequences of delta_net cannot be counted: what engines allocate is not known"),
        (QWEN3_NEXT, "vllm", {"context": 0}, "`context` must be at least 1, got 0"),
        (QWEN3_NEXT, "sglang", {"speculative_tokens": 2}, "`speculative_tokens` are not supported for sglang"),
        (QWEN3_NEXT, "vllm", {"tensor_parallel": 3}, "`tensor_parallel` must divide 16 .* 32 value heads, got 3"),
    ):
        with pytest.raises((PlanError, ModelError), match=message):
            count(model, engine, **options)
