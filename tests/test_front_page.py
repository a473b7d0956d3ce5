"""The commands and the Python of README.md run, on less text; `make wheel` runs the commands as they are written."""

import re
import shlex
import shutil

import pytest

from places import ROOT
from slimstate.system.bundled import bundled_folder, recipes

PAGE = (ROOT / "README.md").read_text(encoding="utf-8")
for name, written, here in (("samples", 32, 2), ("length", 512, 64), ("max.tokens", 8192, 512)):
    PAGE, count = re.subn(rf"({name}[ =]){written}\b", rf"\g<1>{here}", PAGE)
    assert count == 2, f"{name} stands once in the commands and once in the Python"


def commands() -> list[list[str]]:
    """Return the commands between the marks that the check of the wheel reads, without comments."""
    quickstart = PAGE[PAGE.index("<!-- quickstart -->") : PAGE.index("<!-- end of quickstart -->")]
    lines = (line.split("  #")[0].strip() for line in quickstart.splitlines())
    return [shlex.split(line) for line in lines if line.startswith("slimstate ")]


@pytest.mark.slow
def test_commands_and_python_of_the_readme_run(tmp_path, monkeypatch, capsys, succeed):
    monkeypatch.chdir(tmp_path)
    assert commands()
    for words in commands():
        succeed(*words[1:])
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        exec(compile(block, "README.md", "exec"), {})
    assert "slim-again" in capsys.readouterr().out


def test_recipes_are_listed_and_found_by_name(monkeypatch, tmp_path, succeed, refusal):
    monkeypatch.chdir(tmp_path)
    assert [line.split(":")[0] for line in succeed("run", "--list").splitlines()] == list(recipes())
    assert str(bundled_folder("demo") / "model") in succeed("run", "kq-ablation", "--small", "--dry-run")
    assert ", ".join(recipes()) in refusal("run", "kq-ablatio")
    assert ", ".join(recipes()) in refusal("run")


def test_the_demo_is_written_once_and_replaces_nothing(monkeypatch, tmp_path, succeed, refusal):
    monkeypatch.chdir(tmp_path)
    succeed("demo")
    assert (tmp_path / "demo" / "model" / "model.safetensors").is_file()
    assert "already" in succeed("demo")
    shutil.rmtree(tmp_path / "demo" / "model")
    assert "choose another --out" in refusal("demo")
