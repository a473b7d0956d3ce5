"""Imports point one way: a module knows only those of lower ranks; selectors and families are of one rank."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import slimstate

ROOT = Path(slimstate.__file__).parent
RANKS = [
    {"errors", "reporter", "hub", "staging", "recall_tasks", "processes", "threads", "configs", "loading"},
    {"record", "rank", "distillation_kernel", "serving", "speed", "tuning"},
    {"axes", "delta_rule", "substitutes"},
    {"torch_rules"},
    {"families", "selectors", "surgery", "data", "tensor_files", "distillation", "sharing", "recipes"},
    {"budget", "support", "card"},
    {"torch_kernels", "taps", "checkpoint", "evidence", "corpus"},
    {"runtime", "overview", "draft"},
    {"calibration", "adapters", "teacher", "placement"},
    {"planning", "perplexity", "recall", "tasks", "traces", "training", "workplace", "untrained"},
    {"comparison", "tables", "plots", "swept", "healing", "estimate"},
    {"prune", "evaluate", "analyze", "sweep", "report", "recover", "train", "benchmark"},
    {"__init__", "cli"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(RANKS) for name in names}


def imports(path: Path) -> set[str]:
    """The slimstate modules a file imports, by their first name under the package."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module == "slimstate":
            modules += [f"slimstate.{alias.name}" for alias in node.names]
        names |= {module.split(".")[1] for module in modules if module.startswith("slimstate.")}
    return names


def test_imports_point_one_way():
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).parts[0].removesuffix(".py")
        upward = {other for other in imports(path) - {name} if RANK.get(other, 0) >= RANK[name] > 0}
        assert not upward, f"{path.name} imports {upward} from its own rank or above"


def test_every_module_has_a_rank_and_states_its_idea():
    for path in ROOT.rglob("*.py"):
        assert path.relative_to(ROOT).parts[0].removesuffix(".py") in RANK
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_extras_are_imported_only_where_they_are_used():
    """The package and its command work without matplotlib and lm-eval."""
    code = "import sys, slimstate, slimstate.cli; print({'matplotlib', 'lm_eval', 'peft'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
