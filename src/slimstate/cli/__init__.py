"""The command `slimstate`: parse, call one function, print where the result is.

Results go to standard output; everything else goes to standard error. Bad input is one line and exit code 2.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from slimstate.cli.benchmarking import bench
from slimstate.cli.cutting import inspect, prune
from slimstate.cli.flags import as_flags, flags_of
from slimstate.cli.measuring import analyze, evaluate, report, sweep
from slimstate.cli.reconstructing import reconstruct
from slimstate.cli.running import run
from slimstate.cli.training import recover, train
from slimstate.system.errors import LONGEST_LINE, SlimstateError, quoted
from slimstate.system.version import __version__

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
# typer carries its own copy of click in some versions, so the class is taken from where typer raises it
USAGE_ERROR: Any = typer.BadParameter.__base__

app.command()(inspect)
app.command()(prune)
app.command(name="eval")(evaluate)
app.command()(analyze)
app.command()(sweep)
app.command()(reconstruct)
app.command()(recover)
app.command()(train)
app.command()(report)
app.add_typer(bench, name="bench")
app.command()(run)


@app.callback(invoke_without_command=True)
def about(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    """Make the recurrent state of trained linear-attention language models smaller."""
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    try:
        code = app(standalone_mode=False)
    except SlimstateError as error:
        code = _complain(as_flags(str(error), flags_of(typer.main.get_command(app))), error.code)
    except USAGE_ERROR as error:
        message = error.format_message()
        if message.startswith("Usage:"):  # nothing was asked for: the help, as it is
            print(message, file=sys.stderr)
            code = 2
        else:
            code = _complain(message)
    except (typer.Abort, KeyboardInterrupt):
        print(
            "slimstate: stopped; nothing is half-written, a sweep goes on with the same command, recover and train with"
            " --resume",
            file=sys.stderr,
        )
        code = 130
    sys.exit(code)


def _complain(message: str, code: int = 2) -> int:
    print(f"slimstate: {quoted(message, LONGEST_LINE)}", file=sys.stderr)
    return code
