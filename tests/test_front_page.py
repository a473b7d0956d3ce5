"""README.md is short, and every command of it runs as it stands."""

from __future__ import annotations

import re
import shlex
import shutil

import pytest

from command import run
from places import ROOT
from slimstate.system.bundled import bundled, recipes

PAGE = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_WORDS = 900


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    """Every line of a block that calls slimstate, less its remark."""
    lines = (line.split("  #")[0].strip() for block in blocks("") for line in block.splitlines())
    return [shlex.split(line) for line in lines if line.startswith("slimstate ")]


def test_it_is_read_in_a_few_minutes():
    assert len(PAGE.split()) <= MOST_WORDS
    fenced = re.sub(r"^```.*?^```", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    long = [line for line in fenced.splitlines() if len(line) > 100 and not line.startswith(("|", "!", "["))]
    assert not long


def test_files_that_it_names_are_there():
    for name in re.findall(r"\]\((?!https?:)([^)#]+)\)", PAGE):
        assert (ROOT / name).exists(), name


def test_every_command_is_between_the_marks_that_the_check_of_the_wheel_reads():
    quickstart = PAGE[PAGE.index("<!-- quickstart -->") : PAGE.index("<!-- end of quickstart -->")]
    assert len(commands()) == quickstart.count("\nslimstate ")


@pytest.mark.slow
def test_its_commands_and_its_python_run_as_they_stand(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words in commands():
        code, _, err = run(capsys, monkeypatch, *words[1:])
        assert code == 0, err
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), {})
    assert "slim-again" in capsys.readouterr().out


def test_recipes_are_found_by_name_and_listed(capsys, monkeypatch, tmp_path):
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
    assert "give a recipe: filters" in err


def test_the_demo_is_written_once_and_never_over_something_else(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run(capsys, monkeypatch, "demo")[0] == 0
    assert (tmp_path / "demo" / "model" / "model.safetensors").is_file()
    code, out, _ = run(capsys, monkeypatch, "demo")
    assert (code, "already" in out) == (0, True)
    shutil.rmtree(tmp_path / "demo" / "model")
    code, _, err = run(capsys, monkeypatch, "demo")
    assert code == 2
    assert "choose another --out" in err
