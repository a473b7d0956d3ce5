"""What the command prints where nobody can hear it, names it cannot say, and errors of the machine: one line each."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from command import run
from places import ROOT, TESTS
from slimstate import cli
from slimstate.cli.streams import Output, secure
from slimstate.system.errors import OutputError


def test_a_full_standard_output_is_an_error_and_one_that_nobody_reads_is_none():
    with Path("/dev/full").open("wb") as full:
        stream = Output(full)
        stream.write("x")
        with pytest.raises(OutputError, match="cannot write to standard output: No space left on device"):
            stream.flush()
        stream.flush()  # from now on it goes nowhere, so that the process can end
        stream.detach()
    heard, told = os.pipe()
    os.close(heard)
    with os.fdopen(told, "wb") as file:
        stream = Output(file)
        stream.write("x")
        stream.flush()
        stream.detach()


def test_closed_streams_lead_nowhere_and_no_file_takes_their_number(tmp_path):
    child = os.fork()
    if child == 0:
        os.closerange(0, 3)
        sys.stdin = sys.stdout = sys.stderr = None
        secure()
        print("x", flush=True)
        with (tmp_path / "file").open("w") as file:
            os._exit(0 if file.fileno() > 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("words", [("inspect", "caf\udce9"), ("prune", "m", "--out", "caf\udce9", "--key-dim", "8")])
def test_a_name_that_is_not_utf8_is_refused(words, capsys, monkeypatch):
    assert run(capsys, monkeypatch, *words) == (2, "", "slimstate: caf\\udce9 is not UTF-8: rename it\n")


@pytest.mark.parametrize("verb", ["inspect", "eval", "train"])
def test_the_home_of_nobody_is_no_place(verb, text_file, tmp_path, capsys, monkeypatch):
    words = {"eval": ("--text", text_file), "train": ("--data", text_file, "--out", tmp_path / "out")}
    code, _, err = run(capsys, monkeypatch, verb, "~nobody-at-all/x", *words.get(verb, ()))
    assert code == 2
    assert err.startswith("slimstate: no ")
    assert len(err.splitlines()) == 1


ERRORS = {
    "no memory": (MemoryError(), "out of memory"),
    "no memory for a tensor": (None, "out of memory"),
    "no disk": (OSError(errno.ENOSPC, "No space left on device"), "no space left on the disk"),
    "a library's words for it": (RuntimeError("I/O error: No space left on device (os error 28)"), "no space left"),
    "no permission": (PermissionError(errno.EACCES, "Permission denied", "/x"), "/x: Permission denied"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_the_machine_refuses_is_one_line(name, capsys, monkeypatch):
    error, line = ERRORS[name]

    def fails(*_: object, **__: object) -> None:
        if error is None:
            torch.empty(10**15)
        raise error

    monkeypatch.setattr("slimstate.pruning.inspect.inspect", fails)
    code, out, err = run(capsys, monkeypatch, "inspect", "model")
    assert (code, out) == (2, "")
    assert err.startswith(f"slimstate: {line}")
    assert len(err.splitlines()) == 1


def test_a_limit_under_which_libraries_hang_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (2**31, 2**31))
    code, _, err = run(capsys, monkeypatch, "inspect", "model")
    line = "out of memory: its limit (ulimit -v) must be at least 2,816 MiB, got 2,048 MiB"
    assert (code, err) == (2, f"slimstate: {line}\n")


def test_a_bug_keeps_its_traceback(monkeypatch):
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("slimstate.pruning.inspect.inspect", fails)
    monkeypatch.setattr(sys, "argv", ["slimstate", "inspect", "model"])
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_everything_is_still_imported_is_one_line(number, code):
    before = signal.signal(number, lambda *_: None)  # a job in the background ignores SIGINT, and so would its child
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "slimstate", "inspect", str(ROOT / "demo" / "model")],
            stderr=subprocess.PIPE,
            text=True,
            cwd=TESTS,
        )
    finally:
        signal.signal(number, before)
    time.sleep(0.6)  # torch is being imported, which takes seconds
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (
        code, "slimstate: stopped; nothing was written; the same command starts again\n",
    )  # fmt: skip


@pytest.mark.slow
def test_verbs_that_are_stopped_leave_nothing_and_go_on():
    """A few trials of the crash suite; `make crash` has hundreds."""
    words = ["--trials", "3", "--classes", "kills,races", "--verbs", "prune"]
    done = subprocess.run(
        [sys.executable, TESTS / "crash_suite.py", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
