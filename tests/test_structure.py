"""Sizes of functions, words of errors, and what an import loads; `make lint` checks the layers of imports."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import slimstate
from slimstate.families import FAMILIES

ROOT = Path(slimstate.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
BELOW_CLI = [path for path in MODULES if "cli" not in path.relative_to(ROOT).parts]


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def texts(part: ast.AST, path: Path):
    """Yield the strings in a part of a module and where they are."""
    for node in ast.walk(part):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, f"{path.relative_to(ROOT)}:{node.lineno}"


def test_the_package_has_folders_of_few_modules_and_nothing_else():
    files = {path.name for path in ROOT.iterdir() if path.is_file()}
    assert files == {"__init__.py", "__init__.pyi", "__main__.py", "py.typed"}
    for folder in (path for path in ROOT.iterdir() if path.is_dir()):
        assert len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) <= 20, folder


def test_functions_are_short():
    for path in BELOW_CLI:
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or 0) - node.lineno - len((ast.get_docstring(node) or "").splitlines())
                assert lines < 60, f"{path.relative_to(ROOT)}: {node.name}"
                assert not any(isinstance(inner, ast.Name) and inner.id == "locals" for inner in ast.walk(node))


def test_errors_of_the_library_name_no_flags():
    """Below the command they name parameters in backquotes, which it turns into flags, but for `--set` of `run`."""
    for path in BELOW_CLI:
        for error in (node for node in ast.walk(tree(path)) if isinstance(node, ast.Raise)):
            for text, place in texts(error, path):
                assert not re.search(r"(?<![\w-])--(?!set\b)[a-z]", text), place


def test_little_is_untyped():
    lines = [line for path in BELOW_CLI for line in path.read_text(encoding="utf-8").splitlines()]
    assert sum("dict[str, Any]" in line for line in lines) < 40


def test_nothing_above_families_knows_a_model_type_by_name():
    """What depends on the architecture is a method of its family. Benchmarks and the command have default models."""
    exempt = ("families", "kernels", "benchmark", "cli", "workflows")
    for path in MODULES:
        if path.relative_to(ROOT).parts[0] not in exempt:
            for text, place in texts(tree(path), path):
                assert text not in FAMILIES, place


STARTS = """
import sys
from slimstate.cli import main
for words in sys.argv[1:]:
    sys.argv = ["slimstate", *words.split()]
    try:
        main()
    except SystemExit as stop:
        assert (stop.code or 0) == (0 if "--help" in words else 2), words
print({"torch", "transformers", "safetensors", "numpy"} & sys.modules.keys())
import slimstate
assert all(hasattr(slimstate, name) for name in slimstate.__all__)
print({"torch"} & sys.modules.keys(), {"matplotlib", "lm_eval", "peft"} & sys.modules.keys())
"""


def test_help_and_bad_usage_do_not_wait_for_torch_and_extras_are_imported_only_where_they_are_used():
    """In a fresh process: after commands that do no work, and once every name of the package was used."""
    verbs = ("inspect", "eval", "analyze", "reconstruct", "recover", "train", "report", "run", "bench", "bench decode")
    words = ["--help", *(f"{verb} --help" for verb in verbs), "prune", "sweep x", "inspect x --no-such"]
    done = subprocess.run([sys.executable, "-c", STARTS, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["set()", "{'torch'} set()"]


def test_names_of_the_package_are_loaded_at_their_first_use():
    assert {"prune", "PruneConfig", "SlimstateError", "__version__"} <= {*slimstate.__all__} <= {*dir(slimstate)}
    with pytest.raises(AttributeError, match="prunes"):
        _ = slimstate.prunes
