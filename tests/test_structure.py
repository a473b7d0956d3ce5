"""The house: imports go down the folders, at any depth of the code, and what was agreed on sizes and words holds."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import slimstate
from slimstate.families import FAMILIES

ROOT = Path(slimstate.__file__).parent
# a folder, and the folders it may import from
BELOW_MODELS = ("system", "core", "families", "records", "checkpoints")
BELOW_PRUNING = (*BELOW_MODELS, "selectors", "kernels", "data", "models", "serving")
ALLOWED = {
    "system": (),
    "core": ("system",),
    "families": ("system", "core"),
    "selectors": ("system", "core"),
    "kernels": ("system", "core"),
    "data": ("system",),
    "records": ("system", "core"),
    "report": ("system", "core", "records"),
    "checkpoints": ("system", "core", "families", "records"),
    "models": (*BELOW_MODELS, "kernels"),
    "serving": (*BELOW_MODELS, "data", "models"),
    "reconstruction": BELOW_PRUNING,
    "pruning": (*BELOW_PRUNING, "reconstruction"),
    "evaluation": (*BELOW_PRUNING, "reconstruction", "pruning", "report"),
    "training": (*BELOW_PRUNING, "reconstruction", "pruning", "report", "evaluation"),
    "benchmark": (*BELOW_PRUNING, "reconstruction", "pruning", "report", "evaluation", "training"),
}
ALLOWED["workflows"] = tuple(ALLOWED)
ALLOWED["cli"] = tuple(ALLOWED)
MODULES = {path: path.relative_to(ROOT.parent) for path in sorted(ROOT.rglob("*.py"))}
BELOW_CLI = [path for path in MODULES if "cli" not in path.relative_to(ROOT).parts]
PUBLIC_VERBS = 12  # parameters that a function of api/ may take: it is called by people, with keywords


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def dotted(path: Path) -> str:
    """The name of a module."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {dotted(path) for path in MODULES}


def imported(found: ast.Module) -> Iterator[str]:
    """Every module of slimstate that a file imports, in whatever place: at the top, in a function, for types alone."""
    for node in ast.walk(found):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "slimstate")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if (node.module or "").split(".")[0] == "slimstate":
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    yield inner if inner in NAMES else str(node.module)


def violations(folder: str, found: ast.Module) -> list[str]:
    """The imports that a file in a folder must not have."""
    allowed = {folder, *ALLOWED[folder]}
    return [name for name in imported(found) if name == "slimstate" or name.split(".")[1] not in allowed]


@pytest.mark.parametrize("folder", ALLOWED)
def test_a_folder_imports_only_from_those_below_it(folder):
    for path in (ROOT / folder).rglob("*.py"):
        assert not violations(folder, tree(path)), path


def test_modules_of_a_folder_import_each_other_one_way():
    """Also inside functions: no cycle anywhere, deferred or not."""
    graph = {dotted(path): set(imported(tree(path))) - {dotted(path)} for path in MODULES if path.parent != ROOT}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize(
    ("folder", "line"),
    [(folder, "from slimstate.cli import main") for folder in ALLOWED if folder != "cli"]
    + [("families", "from slimstate.kernels.delta_rule import chunked"), ("core", "import slimstate")],
)
def test_an_import_that_points_up_is_found_inside_a_function(folder, line):
    found = ast.parse(f"def f():\n    if True:\n        {line}\n")
    assert violations(folder, found)


def for_types_alone(found: ast.Module) -> set[str]:
    """Names that are not there when the code runs."""
    blocks = (
        node for node in ast.walk(found) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    imports = (node for block in blocks for node in block.body if isinstance(node, (ast.Import, ast.ImportFrom)))
    return {alias.asname or alias.name.split(".")[0] for node in imports for alias in node.names}


def used_when_running(found: ast.AST) -> Iterator[str]:
    """Names that are looked up outside annotations, in functions that do not import them themselves."""
    imported_here = {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(found)
        if isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)) and isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    for field, value in ast.iter_fields(found):
        if field not in ("annotation", "returns"):
            for node in value if isinstance(value, list) else [value]:
                if isinstance(node, ast.Name):
                    yield node.id
                elif isinstance(node, ast.AST):
                    yield from (name for name in used_when_running(node) if name not in imported_here)


@pytest.mark.parametrize("path", [pytest.param(path, id=str(name)) for path, name in MODULES.items()])
def test_what_is_imported_for_types_alone_is_not_used_when_the_code_runs(path):
    assert not for_types_alone(tree(path)) & set(used_when_running(tree(path)))


def test_a_name_that_is_there_for_types_alone_is_found_where_it_is_used():
    found = ast.parse("if TYPE_CHECKING:\n    from a import B, C\ndef f(x: C) -> B:\n    return isinstance(x, B)")
    assert for_types_alone(found) == {"B", "C"}
    assert {*used_when_running(found)} & {"B", "C"} == {"B"}


def test_the_package_holds_folders_and_nothing_else():
    files = {path.name for path in ROOT.iterdir() if path.name != "__pycache__"}
    assert files == {"__init__.py", "__main__.py", "py.typed", *ALLOWED}
    for folder in ALLOWED:
        modules = [path for path in (ROOT / folder).glob("*.py") if path.name != "__init__.py"]
        assert len(modules) <= 20, folder


def test_every_module_states_its_idea():
    for path in MODULES:
        assert ast.get_docstring(tree(path)), path


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree(path)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def test_functions_are_short_and_take_few_parameters():
    for path in BELOW_CLI:
        for node in functions(path):
            where = f"{path.relative_to(ROOT)}: {node.name}"
            given = [a for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs) if a.arg != "self"]
            assert len(given) <= (PUBLIC_VERBS if path.parent.name == "api" else 10), where
            assert (node.end_lineno or 0) - node.lineno - len((ast.get_docstring(node) or "").splitlines()) < 60, where
            assert not any(isinstance(n, ast.Name) and n.id == "locals" for n in ast.walk(node)), where


def test_the_library_names_no_flags():
    """Below the command, errors and texts name parameters; the command says which flags those are."""
    for path in BELOW_CLI:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not re.search(r"(?<![\w-])--[a-z]", node.value), f"{path.relative_to(ROOT)}:{node.lineno}"


def test_little_is_untyped():
    lines = [line for path in BELOW_CLI for line in path.read_text(encoding="utf-8").splitlines()]
    assert sum("dict[str, Any]" in line for line in lines) < 30


def test_nothing_above_families_knows_a_model_type_by_name():
    """What depends on the architecture is asked of its family. Benchmarks and the command have default models."""
    exempt = ("families", "kernels", "benchmark", "cli", "workflows")
    for path in MODULES:
        if path.relative_to(ROOT).parts[0] not in exempt:
            for node in ast.walk(tree(path)):
                named = isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in FAMILIES
                assert not named, f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


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


@pytest.fixture(scope="module")
def loaded() -> list[str]:
    """What a fresh process has loaded: after commands that do no work, and once every name of the package was used."""
    verbs = ("inspect", "eval", "analyze", "reconstruct", "recover", "train", "report", "run", "bench", "bench decode")
    words = ["--help", *(f"{verb} --help" for verb in verbs), "prune", "sweep x", "inspect x --no-such"]
    done = subprocess.run([sys.executable, "-c", STARTS, *words], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-2:]


def test_help_and_bad_usage_do_not_wait_for_torch(loaded):
    assert loaded[0] == "set()"


def test_extras_are_imported_only_where_they_are_used(loaded):
    """The package and its command work without matplotlib and lm-eval."""
    assert loaded[1] == "{'torch'} set()"


def test_the_names_of_the_package_are_loaded_from_where_type_checkers_see_them():
    """Three lists in one file: what type checkers read, what is loaded on demand, what is public."""
    front = tree(ROOT / "__init__.py")
    (typed,) = (node.body for node in front.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node))
    homes = {node.module: tuple(alias.name for alias in node.names) for node in typed}
    assert homes == {f"slimstate.{home}": names for home, names in slimstate.HOMES.items()}
    assert {*slimstate.__all__} == {"__version__", "report", *(name for names in homes.values() for name in names)}
    importlib.import_module("slimstate.report.tables")
    assert slimstate.report is sys.modules["slimstate.workflows.report"].report, "and not the folder of that name"
    assert set(slimstate.__all__) <= set(dir(slimstate))
    with pytest.raises(AttributeError, match="no attribute 'prunes'"):
        _ = slimstate.prunes
