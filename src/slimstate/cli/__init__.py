"""The command `slimstate`: parse, call one function, print where the result is.

Results go to standard output; everything else goes to standard error. Bad input is one line and exit code 2.
"""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import suppress
from typing import Annotated

import typer

from slimstate.cli.benchmarking import bench
from slimstate.cli.cutting import inspect, prune
from slimstate.cli.flags import as_flags, flags_of
from slimstate.cli.late_help import LateHelp
from slimstate.cli.measuring import analyze, evaluate, report, sweep
from slimstate.cli.reconstructing import reconstruct
from slimstate.cli.running import demo, run
from slimstate.cli.serving import verify
from slimstate.cli.streams import readable, secure
from slimstate.cli.terminal import USAGE_ERROR
from slimstate.cli.training import recover, train
from slimstate.system import distributed, shortages
from slimstate.system.errors import MAX_LINE, SlimstateError, quoted
from slimstate.system.interruption import STOP
from slimstate.system.version import __version__

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(inspect)
app.command(cls=LateHelp)(prune)
app.command(name="eval")(evaluate)
app.command()(analyze)
app.command(cls=LateHelp)(sweep)
app.command()(reconstruct)
app.command()(recover)
app.command()(train)
app.command()(report)
app.command()(verify)
app.add_typer(bench, name="bench")
app.command()(run)
app.command()(demo)


@app.callback(invoke_without_command=True)
def about(
    version: Annotated[bool, typer.Option("--version", help="Show the version, and what it runs on.")] = False,
    max_line_mb: Annotated[
        float | None, typer.Option(min=0, help="MiB that a line of a text may have, 64 unless said otherwise.")
    ] = None,
) -> None:
    """Make the recurrent state of trained linear-attention language models smaller."""
    if max_line_mb is not None:
        os.environ["SLIMSTATE_MAX_LINE_MB"] = str(max_line_mb)
    if version:
        print(f"slimstate {__version__}", _surroundings(), sep="\n")
        raise typer.Exit


def _surroundings() -> str:
    """The packages that decide a result, and the device that would be used."""
    import torch

    from slimstate.records.base import versions

    found = versions() | ({} if "flash-linear-attention" in versions() else {"flash-linear-attention": "not installed"})
    packages = ", ".join(f"{name} {found[name]}" for name in found if name != "slimstate")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU: kernels of PyTorch on the CPU"
    return f"{packages}\n{device}"


def main() -> None:
    secure()
    warnings.formatwarning = _in_a_line
    STOP.translate, STOP.speaks = _in_flags, distributed.is_main
    with STOP.listening():
        code = _outcome()
    sys.exit(code)


def _outcome() -> int:
    """Do what the command line asks for; returns the exit code."""
    try:
        readable(sys.argv)
        shortages.check_limits()
        code = app(standalone_mode=False)
        sys.stdout.flush()
        return code or 0
    except SlimstateError as error:
        return _complain(_in_flags(str(error)), error.code)
    except USAGE_ERROR as error:
        message = error.format_message()
        if message.startswith("Usage:"):  # nothing was asked for: the help, as it is
            print(message, file=sys.stderr)
            return 2
        return _complain(message)
    except (typer.Abort, KeyboardInterrupt):
        return _complain("stopped; nothing is half-written, and the same command starts again", 130)
    except Exception as error:
        if (line := shortages.describe_shortage(error)) is None:
            raise
        return _complain(line)


def _in_a_line(message: Warning | str, category: type[Warning], *place: object, **line: object) -> str:
    """A warning as everything else that the command says; one that is for programmers is named by its kind."""
    speaker = "slimstate" if issubclass(category, UserWarning) else category.__name__
    return f"{speaker}: {quoted(message, MAX_LINE)}\n"


def _in_flags(message: str) -> str:
    return as_flags(message, flags_of(typer.main.get_command(app)))


def _complain(message: str, code: int = 2) -> int:
    with suppress(OSError):  # nobody can be told
        print(f"slimstate: {quoted(message, MAX_LINE)}", file=sys.stderr, flush=True)
    return code
