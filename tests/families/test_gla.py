"""Gated linear attention of fla: tiny models with every option."""

from __future__ import annotations

from tiny_model import GROUPED, variants

VARIANTS = variants(
    "gla",
    {"expand_k": 0.75},
    {
        "plain": {},
        "grouped-keys": GROUPED,
        "conv": {"use_short_conv": True},
        "relu": {"feature_map": "relu", "use_output_gate": False},
        "sigmoid": {"feature_map": "sigmoid", "fuse_norm": False},
    },
)
