"""The command, run in this process."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest

from slimstate import cli


def run(capsys, monkeypatch, *words: object) -> tuple[int, str, str]:
    """Run the command; return its exit code, standard output and standard error."""
    monkeypatch.setattr(sys, "argv", ["slimstate", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    captured = capsys.readouterr()
    return stop.value.code or 0, captured.out, captured.err


def quiet(*words: object) -> None:
    """Run the command without output; it must succeed."""
    sys.argv, errors = ["slimstate", *map(str, words)], io.StringIO()
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(errors):
            cli.main()
    except SystemExit as stop:
        if stop.code:
            raise RuntimeError(f"{sys.argv}: exit code {stop.code}: {errors.getvalue()}") from stop
