"""Gated linear attention and RetNet of fla: tiny models with every option, and keys that cannot be cut."""

import slimstate
from slimstate.checkpoints.reader import Checkpoint
from tiny_model import GROUPED, variants

VARIANTS = [
    *variants(
        "gla",
        {"expand_k": 0.75},
        {
            "plain": {},
            "grouped-keys": GROUPED,
            "conv": {"use_short_conv": True},
            "relu": {"feature_map": "relu", "use_output_gate": False},
            "sigmoid": {"feature_map": "sigmoid", "fuse_norm": False},
        },
    ),
    *variants(
        "retnet",
        {"expand_k": 0.75, "expand_v": 1.5},
        {
            "plain": {},
            "grouped-keys": GROUPED,
            "relu": {"feature_map": "relu", "fuse_norm": False},
            "no-gate": {"use_output_gate": False},
        },
    ),
]


def test_keys_are_refused_and_values_are_cut(folders, refusal, tmp_path):
    model = folders["retnet-plain"]
    for options in (("--state-dim", 8), ("--compression", 0.5), ("--key-dim", 8)):
        line = refusal("prune", model, "--out", tmp_path / "cut", "--method", "l1", *options)
        assert "the keys of retnet cannot be cut: it rotates keys" in line
    slimstate.prune(model, tmp_path / "cut", value_dim=12, value_method="l1")
    assert Checkpoint.open(tmp_path / "cut").mixers[0].value_dim == 12
