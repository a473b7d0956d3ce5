"""The command `slimstate`: parse, call one workflow, print its result.

Results go to standard output; everything else goes to standard error. Bad input is one line and exit code 2.
"""

import re
import sys
import warnings
from contextlib import suppress

import click

from slimstate.cli.app import COMMANDS, find_command, root_command
from slimstate.cli.terminal import check_arguments, secure_streams
from slimstate.system import distributed, shortages
from slimstate.system.errors import MAX_LINE, SlimstateError, quoted
from slimstate.system.interruption import STOP
from slimstate.system.options import options_of


def main() -> None:
    secure_streams()
    warnings.formatwarning = _format_warning
    STOP.translate, STOP.shows_message = name_flags, distributed.is_main
    with STOP.listening():
        code = _run()
    sys.exit(code)


def _run() -> int:
    """Run the command line and return the exit code."""
    try:
        check_arguments(sys.argv)
        shortages.check_limits()
        code = root_command(standalone_mode=False)
        sys.stdout.flush()
        return code or 0
    except SlimstateError as error:
        return _fail(name_flags(str(error)), error.code)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return 2
    except click.ClickException as error:
        return _fail(error.format_message())
    except (click.Abort, KeyboardInterrupt):
        return _fail("stopped; nothing is half-written, and the same command starts again", 130)
    except Exception as error:
        if (line := shortages.describe_shortage(error)) is None:
            raise
        return _fail(line)


def name_flags(message: str) -> str:
    """Return a message of the library, which names options as `key_dim`, with flags of the command, --key-dim."""
    if "`" not in message:
        return message
    from slimstate.cli.commands import flag_of

    names: set[str] = set()
    for command in map(find_command, COMMANDS):
        names |= {name for name in command.inputs if name != command.argument}
        names |= {option.name for cls in (command.config, command.flags) for option in options_of(cls)}
    return re.sub(r"`(\w+)`", lambda match: flag_of(match[1]) if match[1] in names else match[0], message)


def _format_warning(message: Warning | str, category: type[Warning], *place: object, **line: object) -> str:
    """Return a warning as one line of the command; one for programmers starts with its category."""
    source = "slimstate" if issubclass(category, UserWarning) else category.__name__
    return f"{source}: {quoted(message, MAX_LINE)}\n"


def _fail(message: str, code: int = 2) -> int:
    with suppress(OSError):  # standard error is closed
        print(f"slimstate: {quoted(message, MAX_LINE)}", file=sys.stderr, flush=True)
    return code
