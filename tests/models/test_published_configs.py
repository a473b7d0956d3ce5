"""What published checkpoints say is written beside what transformers 5 says, and the stock class reads the same."""

import shutil

import pytest
import torch

import slimstate
import tiny
from slimstate.models.load import load
from slimstate.models.stock import as_published
from slimstate.system.json_files import read_json, write_json

KINDS = ["mamba", "attention", "mamba"]
ADDED = {
    "qwen3_next-plain": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "full_attention_interval": 2},
    "granitemoehybrid-plain": {"rope_theta": 10000.0, "layer_types": KINDS, "position_embedding_type": "nope"},
    "falcon_h1-plain": {"rope_theta": 10000.0},
    "mamba2-plain": {},
    "delta_net-plain": {},
}


@pytest.mark.parametrize("name", ADDED)
def test_a_config_of_transformers_gets_what_published_ones_have(name, folders):
    config = read_json(folders[name] / "config.json")
    found = as_published(config)
    assert {key: value for key, value in found.items() if config.get(key) != value} == ADDED[name]
    assert as_published(found) == found  # what is there already stays as it is


def test_what_is_added_lies_where_published_configs_have_it_and_only_where_it_holds(folders):
    names = ("qwen3_5-plain", "mamba2-plain", "qwen3_next-plain")
    nested, mamba, hybrid = (read_json(folders[name] / "config.json") for name in names)
    published = as_published(nested)
    assert published["text_config"].items() >= {"rope_theta": 10000.0, "full_attention_interval": 2}.items()
    assert "rope_theta" not in published
    del mamba["intermediate_size"]  # of the tiny models; the class knows no such field, and mlx asks for it
    assert as_published(mamba)["intermediate_size"] == 8 * 16
    odd = {**hybrid, "layer_types": ["full_attention", "linear_attention", "linear_attention"]}
    assert "full_attention_interval" not in as_published(odd)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next-plain", "granitemoehybrid-plain", "falcon_h1-plain"])
def test_the_stock_class_computes_the_same(name, folders, tmp_path):
    folder = tmp_path / "published"
    shutil.copytree(folders[name], folder)
    write_json(folder / "config.json", as_published(read_json(folder / "config.json")))
    ids = tiny.token_ids(1, 40)
    with torch.no_grad():
        before, after = (load(place, device="cpu").model(input_ids=ids).logits for place in (folders[name], folder))
    assert torch.equal(before, after)


def test_a_cut_has_it_and_is_the_same_where_the_model_had_it(folders, tmp_path):
    slimstate.prune(folders["qwen3_next-plain"], tmp_path / "cut", method="l1", key_dim=8)
    cut = read_json(tmp_path / "cut" / "config.json")
    assert ADDED["qwen3_next-plain"].items() <= cut.items()
    slimstate.prune(tmp_path / "cut", tmp_path / "again", method="l1", key_dim=4)
    again = read_json(tmp_path / "again" / "config.json")
    assert again.keys() == cut.keys()
