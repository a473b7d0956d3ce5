"""The verb that runs others: a recipe's commands, one after another."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from slimstate.cli.terminal import USAGE_ERROR, Json, print_json, printer
from slimstate.system.bundled import recipes, write_demo
from slimstate.system.console import TerminalReporter
from slimstate.system.errors import PlanError


def run(
    context: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE", help="The name of a recipe that comes with slimstate, or a file of your own."),
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="At a small scale, instead of the paper's.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for all results; by default build/recipes/RECIPE.")] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Another value for a name in the recipe.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands, and run none of them.")] = False,
    list_all: Annotated[bool, typer.Option("--list", help="List the recipes that come with slimstate.")] = False,
    as_json: Json = False,
) -> None:
    """Reproduce a table or a figure: run a recipe's commands; one that was stopped goes on where it was."""
    from slimstate.cli.recipes import Recipe, recipe_named, results_of, run_recipe

    if list_all:
        for name, path in recipes().items():
            printer().print(f"{name}: {Recipe.read(path).title}")
        return
    if recipe is None:
        raise PlanError(f"give a recipe: {', '.join(recipes())}, or a file of your own")
    path, scale = recipe_named(recipe), "small" if small else "paper"
    found = Recipe.read(path)
    changes = dict(_pair(text) for text in change or ())
    if dry_run:
        for words in found.commands(scale, out or results_of(path), changes):
            printer().print(f"slimstate {shlex.join(words)}", markup=False)
        return
    reporter = TerminalReporter()
    reporter.say(f"{found.title} ({scale} scale)")
    commands = context.find_root().command
    record = run_recipe(
        found,
        lambda words: commands(words, standalone_mode=False),
        accept=lambda words: check_words(commands, words),
        scale=scale,
        out=out,
        changes=changes,
        reporter=reporter,
    )
    if as_json:
        print_json(record.to_json())
    else:
        told = f"{len(record.steps)} steps in {record.seconds:,.0f} s; results are in {record.out}"
        printer().print(told, markup=False)


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the model and its texts.")] = Path("demo"),
) -> None:
    """Write a small model and two texts to try things on: OUT/model, OUT/calibration.txt, OUT/evaluation.txt."""
    written = write_demo(out)
    told = f"written to {out}" if written else f"{out} has them already"
    printer().print(f"a DeltaNet of 4.6M parameters and two texts: {told}", markup=False)


def check_words(verb: Any, words: Sequence[str]) -> None:
    """Refuse a command that the parser refuses, before anything is run."""
    name, *rest = words
    while hasattr(verb, "commands"):
        if name not in verb.commands:
            raise PlanError(f"step {shlex.join(words)}: there is no command {name}")
        verb = verb.commands[name]
        if hasattr(verb, "commands"):
            name, *rest = rest or ("",)
    try:
        verb.make_context(name, list(rest)).close()
    except (USAGE_ERROR, typer.Exit) as error:
        why = error.format_message() if hasattr(error, "format_message") else "it only shows help"
        raise PlanError(f"step {shlex.join(words)}: {why}") from error


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise PlanError(f"--set {text}: give NAME=VALUE")
    return name.strip(), value
