"""The notebooks run from their first cell to their last."""

from __future__ import annotations

import json

import pytest

from places import ROOT

NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "examples").glob("*.ipynb"))}


def cells(name: str) -> list[str]:
    page = json.loads(NOTEBOOKS[name].read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in page["cells"] if cell["cell_type"] == "code"]


def test_there_are_two():
    assert set(NOTEBOOKS) == {"first-cut", "own-selector"}


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for number, text in enumerate(cells(name)):
        exec(compile(text, f"{name}, cell {number}", "exec"), namespace)
    assert "loudest: perplexity" in capsys.readouterr().out if name == "own-selector" else (tmp_path / "slim").is_dir()
