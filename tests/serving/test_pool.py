"""How many sequences fit: pages and blocks that engines report, and a pool filled block by block."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from places import ROOT
from slimstate.cli import app
from slimstate.families import FAMILIES, family_of
from slimstate.serving.pool import PoolOptions, group_size, pool
from slimstate.system.errors import ModelError, PlanError

CONFIGS = Path(__file__).parent / "configs"
QWEN3_NEXT, QWEN3_5 = CONFIGS / "qwen3-next-80b-a3b.json", CONFIGS / "qwen3.5-27b.json"
GIB = 2**30


def options(**more) -> PoolOptions:
    return PoolOptions(**{"memory_gb": 40, "context": 32768, **more})


@pytest.mark.parametrize(
    ("model", "more", "block"),
    [
        (QWEN3_NEXT, {}, 544),
        (QWEN3_5, {}, 784),
        # a report of a pool that was full too early; fp8 keys and values and five drafted tokens give its block
        (QWEN3_5, {"kv_dtype": "fp8", "speculative_tokens": 5}, 1616),
    ],
)
def test_blocks_are_those_of_boot_logs(model, more, block):
    """vLLM says `Setting attention block size to ... tokens` when it starts."""
    assert pool(model, "vllm", options(**more)).rows[0].pages.block == block


BOOTS = json.loads((ROOT / "docs" / "records" / "vllm-boot.json").read_text())


@pytest.mark.parametrize(
    "boot", BOOTS["rows"], ids=lambda boot: f"{boot['model']}-{boot['key_dim']}-{boot['prefix_caching']}"
)
def test_a_pool_is_that_of_a_boot_log_to_the_last_digit(boot, tmp_path, monkeypatch):
    monkeypatch.setattr("slimstate.serving.pool.ALIGNED", 128)  # on a CPU; on a GPU blocks are multiples of 16
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BOOTS["configs"][boot["model"]]))
    given = options(memory_gb=1, context=4096, prefix_caching=boot["prefix_caching"])
    row = pool(path, "vllm", given, (64,)).rows[boot["key_dim"] == 64]
    own = row.pages.state + row.pages.convolution
    assert row.pages.block == boot["block_tokens"]
    assert f"{100 * (row.pages.page / own - 1):.2f}" == f"{boot['padding_percent']:.2f}"
    assert f"{row.sequences:.2f}" == f"{boot['sequences']:.2f}"


def filled(linear: int, softmax: int, states: int, context: int, block: int, blocks: int) -> int:
    """Sequences that a pool takes, one after the other, each group of layers its own blocks."""
    group = group_size(linear, softmax)
    tables = [states] * math.ceil(linear / group) + [math.ceil(context / block)] * math.ceil(softmax / group)
    sequences = 0
    while sum(tables) * (sequences + 1) <= blocks:
        sequences += 1
    return sequences


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("key_dim", [128, 64, 32])
def test_a_pool_of_vllm_takes_what_its_blocks_take(key_dim, prefix_caching):
    record = pool(QWEN3_NEXT, "vllm", options(prefix_caching=prefix_caching), (64, 32))
    row = next(each for each in record.rows if each.key_dim == key_dim)
    pages, group = row.pages, 12
    assert pages.state == 32 * 128 * key_dim * 2
    assert pages.convolution == (2 * 16 * key_dim + 32 * 128) * 3 * 2
    assert pages.page == pages.block * 2 * 2 * 256 * 2
    assert 0 <= pages.padding < 16 * pages.token
    blocks = 40 * GIB // (group * pages.page)
    assert int(row.sequences) == filled(36, 12, 1 + prefix_caching, 32768, pages.block, blocks)
    assert row.share.states == 3 * (1 + prefix_caching) * group * pages.page
    assert row.share.total * int(row.sequences) <= 40 * GIB
    if prefix_caching:  # four groups, each a block at every block boundary
        assert row.cached == pytest.approx(blocks / (4 * math.ceil(32768 / pages.block)))


def test_a_cut_gains_in_short_sequences_and_nothing_where_a_state_is_kept_at_every_block():
    """Blocks shrink with the state, so that there are as many more of them."""
    whole, half, quarter = pool(QWEN3_5, "vllm", options(prefix_caching=True), (64, 32)).rows
    assert whole.gain == 1
    assert 1 < half.gain < quarter.gain < 1.2  # keys and values are most of a long sequence
    assert quarter.cached == pytest.approx(whole.cached, rel=0.02)
    short = pool(QWEN3_5, "vllm", options(context=512), (64,)).rows
    assert short[1].gain > 1.5


def test_gpus_share_heads_and_copy_what_they_cannot_share():
    one, four = (pool(QWEN3_NEXT, "vllm", options(tensor_parallel=shards)).rows[0].pages for shards in (1, 4))
    assert four.state * 4 == one.state
    assert four.convolution * 4 == one.convolution
    assert four.token * 2 == one.token  # two key and value heads: one on each GPU, twice
    with pytest.raises(PlanError, match="`tensor_parallel` 3 does not divide 16 key heads and 32 value heads"):
        pool(QWEN3_NEXT, "vllm", options(tensor_parallel=3))


def test_sglang_divides_its_memory_before_it_knows_a_sequence():
    for prefix_caching, each in ((False, 1), (True, 5)):
        row = pool(QWEN3_NEXT, "sglang", options(prefix_caching=prefix_caching)).rows[0]
        slot = 36 * (32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 3 * 2)
        slots = int(40 * GIB * 0.9 / 1.9) // slot - 1
        tokens = (40 * GIB - (slots + 1) * slot) // (12 * 2 * 2 * 256 * 2)
        assert row.sequences == min(slots // each, tokens // 32768)
        assert row.limit == ("tokens" if slots // each >= tokens // 32768 else "states")
    assert pool(QWEN3_NEXT, "sglang", options()).state_dtype == "float32"
    assert pool(QWEN3_NEXT, "vllm", options()).state_dtype == "bfloat16"
    assert pool(QWEN3_5, "vllm", options()).state_dtype == "float32"


def test_groups_of_layers_are_as_large_as_the_rarer_kind():
    assert (group_size(36, 12), group_size(12, 13), group_size(10, 15), group_size(4, 4)) == (12, 13, 10, 4)


def test_a_model_without_softmax_has_states_alone():
    config = FAMILIES["mamba2"].stock_config
    caches = family_of(config).caches(config)
    assert (caches.linear_layers, caches.softmax_layers, caches.taps) == (64, 0, 4)


def test_a_bare_config_is_enough_and_the_folder_may_hold_nothing_else(tmp_path):
    (tmp_path / "config.json").write_text(QWEN3_NEXT.read_text())
    asked = ["--engine", "vllm", "--memory-gb", "40", "--context", "32768", "--prefix-caching"]
    found = CliRunner().invoke(app, ["inspect", str(tmp_path), *asked, "--json"])
    record = json.loads(found.stdout)
    assert [row["key_dim"] for row in record["rows"]] == list(range(128, 0, -16))
    shown = CliRunner().invoke(app, ["inspect", str(QWEN3_NEXT), *asked])
    assert "kept prefixes" in shown.stdout
    assert f"{record['rows'][0]['sequences']:.2f}" in shown.stdout


def test_what_cannot_be_counted_is_refused(tmp_path):
    with pytest.raises(PlanError, match="there are vllm, sglang"):
        pool(QWEN3_NEXT, "mlx", options())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "delta_net", "num_hidden_layers": 2}))
    with pytest.raises(ModelError, match="neither vLLM nor SGLang"):
        pool(tmp_path, "vllm", options())
    with pytest.raises(PlanError, match="must be more than nothing"):
        options(context=0)
