"""The commands and the Python of README.md run as they are written."""

from __future__ import annotations

import re
import shlex
import shutil

import pytest

from command import run
from places import ROOT
from slimstate.system.bundled import bundled, recipes

PAGE = (ROOT / "README.md").read_text(encoding="utf-8")


def commands() -> list[list[str]]:
    """Return the commands between the marks that the check of the wheel reads, without comments."""
    quickstart = PAGE[PAGE.index("<!-- quickstart -->") : PAGE.index("<!-- end of quickstart -->")]
    lines = (line.split("  #")[0].strip() for line in quickstart.splitlines())
    return [shlex.split(line) for line in lines if line.startswith("slimstate ")]


@pytest.mark.slow
def test_commands_and_python_of_the_readme_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert commands()
    for words in commands():
        code, _, err = run(capsys, monkeypatch, *words[1:])
        assert code == 0, err
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        exec(compile(block, "README.md", "exec"), {})
    assert "slim-again" in capsys.readouterr().out


def test_recipes_are_listed_and_found_by_name(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, monkeypatch, "run", "--list")
    assert code == 0
    assert [line.split(":")[0] for line in out.splitlines()] == list(recipes())
    code, out, _ = run(capsys, monkeypatch, "run", "kq-ablation", "--small", "--dry-run")
    assert code == 0
    assert str(bundled("demo") / "model") in out
    code, _, err = run(capsys, monkeypatch, "run", "kq-ablatio")
    assert code == 2
    assert ", ".join(recipes()) in err
    code, _, err = run(capsys, monkeypatch, "run")
    assert code == 2
    assert ", ".join(recipes()) in err


def test_the_demo_is_written_once_and_replaces_nothing(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run(capsys, monkeypatch, "demo")[0] == 0
    assert (tmp_path / "demo" / "model" / "model.safetensors").is_file()
    code, out, _ = run(capsys, monkeypatch, "demo")
    assert (code, "already" in out) == (0, True)
    shutil.rmtree(tmp_path / "demo" / "model")
    code, _, err = run(capsys, monkeypatch, "demo")
    assert code == 2
    assert "choose another --out" in err
