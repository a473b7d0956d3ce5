"""Read the declarations of workflows from their source: importing them would import torch and delay every help."""

import ast
from pathlib import Path

WORKFLOWS = Path(__file__).parents[1] / "workflows"


def function_of(command: str) -> str:
    """Return the name of the workflow of a command, such as bench_mixer of `bench mixer`."""
    return "evaluate" if command == "eval" else command.replace(" ", "_")


def declaration(command: str) -> ast.FunctionDef:
    """Return the workflow of a command as it is declared."""
    name = function_of(command)
    source = (WORKFLOWS / f"{name.partition('_')[0]}.py").read_text(encoding="utf-8")
    functions = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    return next(function for function in functions if function.name == name)
