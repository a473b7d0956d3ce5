"""The commands of `slimstate`, each loaded when it is used, the help that lists them, and `run` and `demo`."""

import ast
import os
import sys
from contextlib import nullcontext, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slimstate.cli.declarations import declaration
from slimstate.cli.terminal import print_all, print_json
from slimstate.records.numbers import plural
from slimstate.system.errors import DataError, PlanError
from slimstate.system.version import __version__

if TYPE_CHECKING:
    from slimstate.cli.commands import Command

BENCHMARKS = ("bench mixer", "bench model", "bench decode", "bench calibrate")
MODULES = {  # of `cli.printing`, with their commands
    "cut": ("inspect", "prune", "reconstruct"),
    "training": ("recover", "train"),
    "evaluation": ("eval", "analyze", "sweep", "report", "verify", *BENCHMARKS),
}
COMMANDS = {name: module for module, names in MODULES.items() for name in names}
GROUPS = {"bench": "Time mixers, models, decoding and calibration at several key dims."}


def find_command(name: str) -> "Command":
    """Return a command by its name, such as `bench mixer`."""
    if name not in COMMANDS:
        raise DataError(f"unknown command {name}; there are {', '.join(COMMANDS)}")
    module = import_module(f"slimstate.cli.printing.{COMMANDS[name]}")
    return next(command for command in module.COMMANDS if command.name == name)


class Commands(click.Group):
    """The commands whose names begin with a prefix; each is loaded when it is used."""

    def __init__(self, name: str, prefix: str = "", **settings: Any) -> None:
        super().__init__(name, no_args_is_help=True, **settings)
        self.prefix, self.context_settings = prefix, {"help_option_names": ["-h", "--help"]}

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = [name.removeprefix(self.prefix) for name in COMMANDS if name.startswith(self.prefix)]
        return list(dict.fromkeys(name.partition(" ")[0] for name in (*names, *(() if self.prefix else OTHERS))))

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in GROUPS and not self.prefix:
            return Commands(name, f"{name} ", help=GROUPS[name])
        if name in OTHERS and not self.prefix:
            return OTHERS[name]
        if self.prefix + name not in COMMANDS:
            return None
        from slimstate.cli.commands import WorkflowCommand

        return WorkflowCommand(find_command(self.prefix + name))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._summary(ctx, name)) for name in self.list_commands(ctx)])

    def _summary(self, ctx: click.Context, name: str) -> str:
        """Return the first paragraph of a command's help."""
        if self.prefix + name in COMMANDS:
            text = ast.get_docstring(declaration(self.prefix + name)) or ""
        else:
            command = self.get_command(ctx, name)
            text = "" if command is None else str(command.help)
        return " ".join(text.partition("\n\n")[0].split())


@click.command()
@click.argument("file", required=False)
@click.option("--small", is_flag=True, help="Run a recipe at a small scale, instead of the paper's.")
@click.option("--out", help="Folder for the result; default: what the config says, or build/recipes/RECIPE.")
@click.option("--set", "changes", multiple=True, metavar="NAME=VALUE", help="Set a value of a recipe.")
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
        print_all(f"{name}: {Recipe.read(path).title}" for name, path in recipes().items())
        return None
    if file is None:
        raise PlanError(f"give a config or a recipe: a file, or one of {', '.join(recipes())}")
    path = recipe_path(file)
    if (config := read_config(path)) is not None:
        if small or changes:
            raise PlanError(f"--{'small' if small else 'set'} is for recipes, and {file} is not one")
        config |= {"out": out} if out is not None else {}
        if dry_run:
            print_all([command_line(config)])
            return None
        return find_command(config["command"]).execute(config | {"json": as_json} | ({"force": True} if force else {}))
    if force:
        raise PlanError("--force is for a config: a recipe replaces only what it wrote")
    recipe, scale, values = Recipe.read(path), "small" if small else "paper", dict(map(_parse_pair, changes))
    if dry_run:
        steps = recipe.configs(scale, default_results(path) if out is None else Path(out), values)
        print_all(map(command_line, steps))
        return None
    reporter = TerminalReporter()
    reporter.say(f"{recipe.title} ({scale} scale)")
    with redirect_stdout(sys.stderr) if as_json else nullcontext():  # the results of the steps
        record = run_recipe(
            recipe,
            lambda step: find_command(step["command"]).execute(step),
            check=lambda step: find_command(step["command"]).parse(step),
            scale=scale, out=None if out is None else Path(out), changes=values, reporter=reporter,
        )  # fmt: skip
    if as_json:
        print_json(record.to_json())
    else:
        print_all([f"{plural(len(record.steps), 'step')} in {record.seconds:,.0f} s; results are in {record.out}"])
    return None


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
    print_all([f"a DeltaNet of 4.6M parameters and two texts: {status}"])


OTHERS = {"run": run, "demo": demo}  # commands that are not one workflow


@click.group(cls=Commands, invoke_without_command=True)
@click.option("--version", is_flag=True, help="Show the version and the packages it runs on.")
@click.option("--max-line-mb", type=click.FloatRange(min=0), help="Maximum MiB of a line of text; default: 64.")
def root_command(version: bool, max_line_mb: float | None) -> None:
    """Make the recurrent state of trained linear-attention language models smaller."""
    if max_line_mb is not None:
        os.environ["SLIMSTATE_MAX_LINE_MB"] = str(max_line_mb)
    if version:
        import torch

        from slimstate.records.base import versions

        installed = {"flash-linear-attention": "not installed", **versions()}
        packages = ", ".join(f"{name} {number}" for name, number in installed.items() if name != "slimstate")
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU: kernels of PyTorch on the CPU"
        print(f"slimstate {__version__}", packages, device, sep="\n")
        click.get_current_context().exit()
