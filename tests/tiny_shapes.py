"""Configs of models that train in a second."""

import json
from pathlib import Path

SHAPES = {
    "delta_net": {"model_type": "delta_net", "expand_k": 0.75},
    "gated_deltanet": {"model_type": "gated_deltanet", "head_dim": 24, "expand_v": 1.5},
}

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": 300}


def write_shape(path: Path, name: str) -> Path:
    path.write_text(json.dumps({**SIZES, **SHAPES[name]}))
    return path
