"""The commands of `slimstate`, and the help that lists them."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import click

from slimstate.cli.commands import Command, HubFlags, WorkflowCommand
from slimstate.cli.printing.benchmark import show_bench
from slimstate.cli.printing.cut import PruneFlags, run_prune, show_inspection, show_prune, show_reconstruction
from slimstate.cli.printing.evaluation import show_analysis, show_evaluation, show_report, show_sweep
from slimstate.cli.printing.training import RecoverFlags, run_recover, show_recovery, show_training
from slimstate.cli.printing.verification import exit_code, show_verification
from slimstate.cli.running import demo, run_command
from slimstate.system.version import __version__
from slimstate.workflows.analyze import AnalyzeConfig, analyze
from slimstate.workflows.bench import (
    CalibrateBenchConfig,
    DecodeBenchConfig,
    MixerBenchConfig,
    ModelBenchConfig,
    bench_calibrate,
    bench_decode,
    bench_mixer,
    bench_model,
)
from slimstate.workflows.evaluate import EvalConfig, evaluate
from slimstate.workflows.inspect import InspectConfig, inspect
from slimstate.workflows.prune import PruneConfig, prune
from slimstate.workflows.reconstruct import ReconstructConfig, reconstruct
from slimstate.workflows.recover import RecoverConfig, recover
from slimstate.workflows.report import report
from slimstate.workflows.sweep import SweepConfig, sweep
from slimstate.workflows.train import TrainConfig, train
from slimstate.workflows.verify import VerifyConfig, verify

COMMANDS = (
    Command(name="inspect", workflow=inspect, config=InspectConfig, show=show_inspection),
    Command(name="prune", workflow=prune, config=PruneConfig, show=show_prune, flags=PruneFlags, run=run_prune),
    Command(
        name="reconstruct", workflow=reconstruct, config=ReconstructConfig, show=show_reconstruction, flags=HubFlags
    ),
    Command(
        name="recover", workflow=recover, config=RecoverConfig, show=show_recovery, flags=RecoverFlags, run=run_recover
    ),
    Command(name="train", workflow=train, config=TrainConfig, show=show_training, metavar="CONFIG"),
    Command(name="eval", workflow=evaluate, config=EvalConfig, show=show_evaluation),
    Command(name="analyze", workflow=analyze, config=AnalyzeConfig, show=show_analysis),
    Command(name="sweep", workflow=sweep, config=SweepConfig, show=show_sweep),
    Command(name="report", workflow=report, show=show_report),
    Command(name="verify", workflow=verify, config=VerifyConfig, show=show_verification, exit_code=exit_code),
    Command(name="bench mixer", workflow=bench_mixer, config=MixerBenchConfig, show=show_bench),
    Command(name="bench model", workflow=bench_model, config=ModelBenchConfig, show=show_bench),
    Command(name="bench decode", workflow=bench_decode, config=DecodeBenchConfig, show=show_bench),
    Command(name="bench calibrate", workflow=bench_calibrate, config=CalibrateBenchConfig, show=show_bench),
)

GROUPS = {"bench": "Time mixers, models, decoding and calibration at several key dims."}


class Commands(click.Group):
    """A group of commands, each built when it is used; the help shows their whole first sentences."""

    def __init__(self, name: str, members: dict[str, Command | click.Command], **settings: Any) -> None:
        super().__init__(name, no_args_is_help=True, **settings)
        self.members = members
        self.context_settings = {"help_option_names": ["-h", "--help"]}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.members)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        member = self.members.get(name)
        return WorkflowCommand(member) if isinstance(member, Command) else member

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        help_texts = {name: str(member.help).partition("\n\n")[0] for name, member in self.members.items()}
        with formatter.section("Commands"):
            formatter.write_dl([(name, text.replace("\n", " ")) for name, text in help_texts.items()])


@cache
def app() -> Commands:
    """Return the command `slimstate`."""
    members: dict[str, Command | click.Command] = {}
    for command in COMMANDS:
        group, _, name = command.name.rpartition(" ")
        if group:
            parent = members.setdefault(group, Commands(group, {}, help=GROUPS[group]))
            assert isinstance(parent, Commands)
            parent.members[name] = command
        else:
            members[name] = command
    members |= {"run": run_command({command.name: command for command in COMMANDS}.get), "demo": demo}
    return Commands(
        "slimstate", members, invoke_without_command=True,
        callback=_start, help="Make the recurrent state of trained linear-attention language models smaller.",
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
