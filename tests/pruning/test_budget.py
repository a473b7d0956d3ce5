"""A budget chooses the largest key dim worth choosing that fits, and says why."""

from __future__ import annotations

import json

import pytest

import slimstate
from slimstate.checkpoints.reader import Checkpoint
from slimstate.families import FAMILIES
from slimstate.pruning.budget import GIB, MIB, Budget, key_dims_worth_choosing, state_bytes
from slimstate.system.errors import PlanError

# published sizes: mebibytes of state per sequence in fp32, from the configs alone
PUBLISHED = {"qwen3_next": 72.0, "qwen3_5_text": 48.0, "qwen3_5_moe_text": 60.0, "olmo_hybrid": 50.625, "mamba2": 256.0}
MIXERS = FAMILIES["qwen3_next"].mixers({"model_type": "qwen3_next"})


@pytest.mark.parametrize("model_type", sorted(PUBLISHED))
def test_the_state_of_a_published_model_is_as_large_as_it_is_known_to_be(model_type):
    mixers = FAMILIES[model_type].mixers({"model_type": model_type})
    assert state_bytes(mixers, mixers[0].axis.width)["fp32"] == PUBLISHED[model_type] * MIB


@pytest.mark.parametrize("megabytes", [9.0, 20.0, 36.0, 40.0, 71.9])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_choice_is_the_largest_that_fits(megabytes, dtype):
    chosen, line = Budget(state_mb=megabytes, state_dtype=dtype).choose(MIXERS)
    every = [128, *key_dims_worth_choosing(128)]
    fitting = [key_dim for key_dim in every if state_bytes(MIXERS, key_dim)[dtype] <= megabytes * MIB]
    assert chosen == max(fitting)
    assert dtype in line


def test_so_many_sequences_in_so_much_memory_is_so_much_for_each():
    shared = Budget(sequences=512, memory_gb=20)
    assert shared.bytes == 20 * GIB / 512 == 40 * MIB
    assert shared.choose(MIXERS)[0] == Budget(state_mb=40).choose(MIXERS)[0] == 64
    assert "64 of 128: 36 MiB fit 20 GiB for 512 sequences, 40 MiB per sequence in fp32" in shared.choose(MIXERS)[1]
    assert "80 would take 45" in shared.choose(MIXERS)[1]


def test_prune_and_inspect_choose_alike(folders, tmp_path, capsys):
    folder = folders["qwen3_next-plain"]
    whole = state_bytes(Checkpoint.open(folder).mixers, 24)["fp32"] / MIB
    record = slimstate.prune(folder, tmp_path / "cut", method="l1", state_mb=whole * 0.7)
    assert record.key_dim == 16
    found = slimstate.inspect(folder, budget=Budget(state_mb=whole * 0.7)).budget
    assert found.key_dim == 16
    assert json.dumps(slimstate.inspect(folder, budget=Budget(state_mb=whole * 0.7)).to_json())
    assert slimstate.inspect(folder).budget is None
    assert slimstate.inspect(folder, budget=Budget(state_mb=whole)).budget.key_dim == 24
    with pytest.raises(PlanError, match=r"fits.*nothing to cut"):
        slimstate.prune(folder, tmp_path / "again", method="l1", state_mb=whole)


@pytest.mark.parametrize(("wishes", "message"), [
    ({"state_mb": 1.0, "sequences": 4}, "one sequence, or `sequences` and `memory_gb`"),
    ({"sequences": 4}, "one sequence, or `sequences` and `memory_gb`"),
    ({"memory_gb": 4}, "one sequence, or `sequences` and `memory_gb`"),
    ({"state_mb": 0}, "more than nothing"),
    ({"sequences": -1, "memory_gb": 4}, "more than nothing"),
    ({"state_mb": 1, "state_dtype": "fp8"}, "unknown `state_dtype`"),
    ({"state_mb": 1e-9}, "nothing fits"),
    ({"state_mb": 1, "key_dim": 8}, "leave out `compression` and `key_dim`"),
])  # fmt: skip
def test_a_budget_that_makes_no_sense_is_refused(wishes, message, folders, tmp_path):
    with pytest.raises(PlanError, match=message):
        slimstate.prune(folders["qwen3_next-plain"], tmp_path / "cut", method="l1", **wishes)
