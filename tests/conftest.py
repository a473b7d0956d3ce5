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
    """A saved tiny model of each variant, in two or more shards, made when it is asked for."""

    class Folders(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            self[name] = tiny.save(tiny.build(tiny.VARIANTS[name]), root / name, "100KB")
            return self[name]

    root = tmp_path_factory.mktemp("models")
    return Folders()


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(tiny.text())
    return path
