"""Streams that are closed or full, names that are not UTF-8, errors of the machine and signals: one line each."""

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

from places import ROOT, TESTS
from slimstate import cli
from slimstate.cli.terminal import Output, secure
from slimstate.system.errors import OutputError


def test_a_full_standard_output_is_an_error_and_a_closed_pipe_is_not():
    with Path("/dev/full").open("wb") as full:
        stream = Output(full)
        stream.write("x")
        with pytest.raises(OutputError, match="cannot write to standard output: No space left on device"):
            stream.flush()
        stream.flush()  # from now on output is discarded, so that the process can end
        stream.detach()
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as file:
        stream = Output(file)
        stream.write("x")
        stream.flush()
        stream.detach()


def test_no_file_takes_the_number_of_a_closed_stream(tmp_path):
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
def test_a_name_that_is_not_utf8_is_refused(words, refusal):
    assert refusal(*words) == "caf\\udce9 is not UTF-8: rename it"


@pytest.mark.parametrize("command", ["inspect", "eval", "train"])
def test_the_home_of_an_unknown_user_does_not_exist(command, text_file, tmp_path, refusal):
    words = {"eval": ("--text", text_file), "train": ("--data", text_file, "--out", tmp_path / "out")}
    assert refusal(command, "~nobody-at-all/x", *words.get(command, ())).startswith("no ")


ERRORS = {
    "memory": (MemoryError(), "out of memory"),
    "memory for a tensor": (None, "out of memory"),
    "disk": (OSError(errno.ENOSPC, "No space left on device"), "no space left on the disk"),
    "disk, as a library says it": (RuntimeError("I/O error: No space left on device (os error 28)"), "no space left"),
    "permission": (PermissionError(errno.EACCES, "Permission denied", "/x"), "/x: Permission denied"),
    "a bug": (RuntimeError("a bug"), None),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_the_machine_are_one_line_and_a_bug_keeps_its_traceback(name, monkeypatch, refusal):
    error, line = ERRORS[name]

    def fail(*_: object, **__: object) -> None:
        if error is None:
            torch.empty(10**15)
        raise error

    monkeypatch.setattr("slimstate.workflows.inspect.read_headers", fail)
    if line is None:
        monkeypatch.setattr(sys, "argv", ["slimstate", "inspect", "model"])
        with pytest.raises(RuntimeError, match="a bug"):
            cli.main()
    else:
        assert refusal("inspect", "model").startswith(line)


def test_a_memory_limit_under_which_libraries_hang_is_refused(monkeypatch, refusal):
    monkeypatch.setattr("resource.getrlimit", lambda _: (2**31, 2**31))
    line = "out of memory: its limit (ulimit -v) must be at least 2,816 MiB, got 2,048 MiB"
    assert refusal("inspect", "model") == line


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_the_imports_is_one_line(number, code):
    before = signal.signal(number, lambda *_: None)  # a background job ignores SIGINT, and so would its child
    try:
        words = [sys.executable, "-m", "slimstate", "inspect", str(ROOT / "demo" / "model")]
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=TESTS)
    finally:
        signal.signal(number, before)
    time.sleep(0.6)  # torch is being imported, which takes seconds
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    line = "slimstate: stopped; nothing was written; the same command starts again\n"
    assert (process.returncode, err) == (code, line)


@pytest.mark.slow
def test_commands_that_are_stopped_leave_nothing_and_can_be_repeated():
    """A few trials of the crash suite; `make crash` has hundreds."""
    words = ["--trials", "3", "--classes", "kills,races", "--commands", "prune"]
    suite = [sys.executable, TESTS / "crash_suite.py", *words]
    process = subprocess.run(suite, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout
