"""The commands that run others, and the one that writes the demo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from slimstate.cli.commands import Command
from slimstate.cli.terminal import print_json, printer
from slimstate.system.errors import DataError, PlanError

FindCommand = Callable[[str], Command | None]


def run_command(find: FindCommand) -> click.Command:
    """Return the command `run`; `find` returns the command of a config by its name."""

    @click.command("run")
    @click.argument("file", required=False)
    @click.option("--small", is_flag=True, help="Run a recipe at a small scale, instead of the paper's.")
    @click.option("--out", help="Folder for the result; default: what the config says, or build/recipes/RECIPE.")
    @click.option("--set", "changes", multiple=True, metavar="NAME=VALUE", help="Another value for a name in a recipe.")
    @click.option("--force", is_flag=True, help="Replace the result of a config, once the new one is complete.")
    @click.option("--dry-run", is_flag=True, help="Print the commands and run none of them.")
    @click.option("--list", "list_all", is_flag=True, help="List the recipes that come with slimstate.")
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON record instead of a table.")
    def run(
        file: str | None, small: bool, out: str | None, changes: tuple[str, ...], force: bool, dry_run: bool,
        list_all: bool, as_json: bool,
    ) -> int | None:  # fmt: skip
        """Repeat the work of a config or of a result, or run a recipe, which reproduces a table or figure.

        FILE: A config in TOML or JSON, a folder or record that slimstate wrote, a recipe, or the name of a recipe that
        comes with slimstate. A recipe that was interrupted continues where it was.
        """
        from slimstate.records.provenance import command_line
        from slimstate.system.bundled import recipes
        from slimstate.system.console import TerminalReporter
        from slimstate.workflows.run import Recipe, default_results, read_config, recipe_path, run_recipe

        if list_all:
            for name, path in recipes().items():
                printer().print(f"{name}: {Recipe.read(path).title}")
            return None
        if file is None:
            raise PlanError(f"give a config or a recipe: a file, or one of {', '.join(recipes())}")
        path = recipe_path(file)
        config = read_config(path)
        if config is not None:
            config |= {"out": out} if out is not None else {}
            if dry_run:
                printer().print(command_line(config))
                return None
            more = {"json": as_json} | ({"force": True} if force else {})
            return _command(find, config).execute({**config, **more})
        recipe, scale = Recipe.read(path), "small" if small else "paper"
        values = dict(map(_parse_pair, changes))
        if dry_run:
            for step in recipe.configs(scale, default_results(path) if out is None else Path(out), values):
                printer().print(command_line(step))
            return None
        reporter = TerminalReporter()
        reporter.say(f"{recipe.title} ({scale} scale)")
        record = run_recipe(
            recipe,
            lambda step: _command(find, step).execute(step),
            check=lambda step: _command(find, step).parse(step),
            scale=scale, out=None if out is None else Path(out), changes=values, reporter=reporter,
        )  # fmt: skip
        if as_json:
            print_json(record.to_json())
        else:
            printer().print(f"{len(record.steps)} steps in {record.seconds:,.0f} s; results are in {record.out}")
        return None

    return run


def _command(find: FindCommand, config: dict[str, Any]) -> Command:
    command = find(config["command"])
    if command is None:
        raise DataError(f"there is no command {config['command']}")
    return command


def _parse_pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise PlanError(f"--set needs NAME=VALUE, got {text}")
    return name.strip(), value


@click.command("demo")
@click.option("--out", default="demo", help="Folder for the model and its texts. [default: demo]")
def demo(out: str) -> None:
    """Write a small model and two texts to try things on: OUT/model, OUT/calibration.txt, OUT/evaluation.txt."""
    from slimstate.system.bundled import write_demo

    status = f"written to {out}" if write_demo(Path(out)) else f"{out} has them already"
    printer().print(f"a DeltaNet of 4.6M parameters and two texts: {status}")
