from __future__ import annotations

import os
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the oracles here are float32 on the CPU

import pytest
import torch

import tiny

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A saved tiny model of each family, in two or more shards."""
    root = tmp_path_factory.mktemp("models")
    return {name: tiny.save(tiny.build(tiny.VARIANTS[name]), root / name, "100KB") for name in tiny.PLAIN}


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(tiny.text())
    return path
