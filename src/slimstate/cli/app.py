"""The commands of `slimstate`, each loaded when it is used, and the help that lists them."""

from __future__ import annotations

import os
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slimstate.system.version import __version__

if TYPE_CHECKING:
    from slimstate.cli.commands import Command

# the commands by name: the module of `cli.printing` that has them, and the function of `workflows` that they call
COMMANDS = {
    "inspect": ("cut", "inspect"),
    "prune": ("cut", "prune"),
    "reconstruct": ("cut", "reconstruct"),
    "recover": ("training", "recover"),
    "train": ("training", "train"),
    "eval": ("evaluation", "evaluate"),
    "analyze": ("evaluation", "analyze"),
    "sweep": ("evaluation", "sweep"),
    "report": ("evaluation", "report"),
    "verify": ("evaluation", "verify"),
    "bench mixer": ("benchmark", "bench_mixer"),
    "bench model": ("benchmark", "bench_model"),
    "bench decode": ("benchmark", "bench_decode"),
    "bench calibrate": ("benchmark", "bench_calibrate"),
}
OTHERS = ("run", "demo")  # click commands of cli.running
GROUPS = {"bench": "Time mixers, models, decoding and calibration at several key dims."}
WORKFLOWS = Path(__file__).parents[1] / "workflows"


def find_command(name: str) -> Command | None:
    """Return a command by its name, such as `bench mixer`, or None."""
    if name not in COMMANDS:
        return None
    module = import_module(f"slimstate.cli.printing.{COMMANDS[name][0]}")
    return next(command for command in module.COMMANDS if command.name == name)


class Commands(click.Group):
    """The commands whose names begin with a prefix; each is loaded when it is used."""

    def __init__(self, name: str, prefix: str = "", **settings: Any) -> None:
        super().__init__(name, no_args_is_help=True, **settings)
        self.prefix, self.context_settings = prefix, {"help_option_names": ["-h", "--help"]}

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = [name.removeprefix(self.prefix) for name in COMMANDS if name.startswith(self.prefix)]
        return list(dict.fromkeys(name.partition(" ")[0] for name in (*names, *OTHERS * (not self.prefix))))

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in GROUPS and not self.prefix:
            return Commands(name, f"{name} ", help=GROUPS[name])
        if name in OTHERS and not self.prefix:
            from slimstate.cli import running

            return running.demo if name == "demo" else running.run_command(find_command)
        command = find_command(self.prefix + name)
        if command is None:
            return None
        from slimstate.cli.commands import WorkflowCommand

        return WorkflowCommand(command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._summary(ctx, name)) for name in self.list_commands(ctx)])

    def _summary(self, ctx: click.Context, name: str) -> str:
        """Return the first paragraph of a command's help, from the source of its workflow, which is not imported."""
        if self.prefix + name not in COMMANDS:
            command = self.get_command(ctx, name)
            text = "" if command is None else str(command.help)
        else:
            function = COMMANDS[self.prefix + name][1]
            source = (WORKFLOWS / f"{function.partition('_')[0]}.py").read_text(encoding="utf-8")
            text = re.split(rf"^def {function}\(", source, flags=re.MULTILINE)[1].split('"""')[1]
        return " ".join(text.partition("\n\n")[0].split())


@cache
def app() -> Commands:
    """Return the command `slimstate`."""
    return Commands(
        "slimstate", invoke_without_command=True, callback=_start,
        help="Make the recurrent state of trained linear-attention language models smaller.",
        params=[
            click.Option(["--version"], is_flag=True, help="Show the version and the packages it runs on."),
            click.Option(["--max-line-mb"], type=click.FloatRange(min=0),
                         help="MiB that a line of a text may have; default: 64."),
        ],
    )  # fmt: skip


def _start(version: bool, max_line_mb: float | None) -> None:
    if max_line_mb is not None:
        os.environ["SLIMSTATE_MAX_LINE_MB"] = str(max_line_mb)
    if version:
        print(f"slimstate {__version__}", _environment(), sep="\n")
        click.get_current_context().exit()


def _environment() -> str:
    """Return the versions of the packages that decide a result, and the device that would be used."""
    import torch

    from slimstate.records.base import versions

    installed = {"flash-linear-attention": "not installed", **versions()}
    packages = ", ".join(f"{name} {version}" for name, version in installed.items() if name != "slimstate")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU: kernels of PyTorch on the CPU"
    return f"{packages}\n{device}"
