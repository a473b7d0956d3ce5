"""The command, run in this process."""

from __future__ import annotations

import sys

import pytest

from slimstate import cli


def run(capsys, monkeypatch, *arguments: object) -> tuple[int, str, str]:
    """The command in this process: exit code, standard output, standard error."""
    monkeypatch.setattr(sys, "argv", ["slimstate", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    captured = capsys.readouterr()
    return stop.value.code or 0, captured.out, captured.err


def quiet(*arguments: object) -> None:
    """The command in this process, where it must end well."""
    sys.argv = ["slimstate", *map(str, arguments)]
    try:
        cli.main()
    except SystemExit as stop:
        if stop.code:
            raise RuntimeError(f"{sys.argv}: exit code {stop.code}") from stop
