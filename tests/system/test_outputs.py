"""Outputs appear whole or not at all, in plain places only, and what is unfinished goes, whatever ends the process."""

import errno
import hashlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from threading import Thread

import pytest
import safetensors.torch
import torch

from forking import Fork
from launching import PATIENCE
from slimstate.system import atomic, run_folders, shortages
from slimstate.system.errors import OutputError
from slimstate.system.interruption import STOP
from slimstate.system.run_folders import locked_folder

HOST = socket.gethostname()


@pytest.fixture
def special(tmp_path, monkeypatch) -> dict[str, Path]:
    """What a path can lead to that is no plain file or folder, by the word for it."""
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    socket.socket(socket.AF_UNIX).bind("socket")
    os.mkfifo("pipe")
    Path("link").symlink_to("nowhere")
    return {**{f"a {name}": tmp_path / name for name in ("pipe", "link", "socket")}, "a device": Path("/dev/null")}


@pytest.mark.parametrize("kind", ["a pipe", "a link", "a socket", "a device"])
def test_only_plain_places_are_written(kind, special):
    path = special[kind]
    before = path.lstat().st_mode
    attempts = (
        lambda: atomic.write_text(path, "x"),
        lambda: atomic.check_place(path, folder=False),
        lambda: atomic.staged_files(path).__enter__(),
        lambda: atomic.check_place(path, folder=True),
    )
    for attempt in attempts:
        with pytest.raises(OutputError, match=f"{path} is {kind}"):
            attempt()
    assert path.lstat().st_mode == before


def test_something_that_gets_there_meanwhile_is_not_replaced(tmp_path):
    taken = pytest.raises(OutputError, match="is a link")
    with taken, atomic.staged_file(tmp_path / "out") as file:
        file.write_text("x")
        (tmp_path / "out").symlink_to("/etc/passwd")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["./", "..", "x/..", "/"])
def test_a_folder_is_no_file_however_it_is_spelt(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputError, match="is a folder; `out` must be a file"):
        atomic.check_place(Path(name), folder=False)


def test_a_name_whose_hidden_sibling_would_be_too_long_is_refused_at_once(tmp_path):
    with pytest.raises(OutputError, match="File name too long"):
        atomic.check_place(tmp_path / ("n" * 250), folder=False)


def test_whatever_is_written_next_in_a_folder_clears_what_dead_processes_left(tmp_path):
    dead = subprocess.check_output([sys.executable, "-S", "-c", "import os; print(os.getpid())"], text=True).strip()
    alive = os.getppid()
    gone = [f".sweep.json.partial-{HOST}-{dead}", f".a.png.partial-{HOST}-{dead}", f".cut.partial-{HOST}-{dead}"]
    stays = [f".b.partial-{HOST}-{alive}", f".c.partial-elsewhere-{dead}", ".d.partial-", ".e", "f.partial-1"]
    for name in (*gone[:2], *stays):
        (tmp_path / name).write_text("x")
    (tmp_path / gone[2]).mkdir()
    (tmp_path / gone[2] / "half").write_text("x")
    atomic.write_text(tmp_path / "new", "y")
    assert {path.name for path in tmp_path.iterdir()} == {"new", *stays}


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("failing", ["first", "last"])
def test_files_that_belong_together_appear_together(failing, tmp_path):
    def cut_short(folder: Path) -> None:
        with atomic.staged_files(folder) as place:
            if failing == "first":
                full_disk()
            atomic.write_text(place / "a.json", "x")
            full_disk()

    for folder in (tmp_path / "new" / "newer", tmp_path):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(OutputError, match="no space left for"):
            cut_short(folder)
        assert sorted(tmp_path.rglob("*")) == before
    for folder in (tmp_path / "new", tmp_path):
        with atomic.staged_files(folder) as place:
            for name in ("a.json", "b.png"):
                atomic.write_text(place / name, "x")
            assert not (folder / "a.json").exists()
        assert {"a.json", "b.png"} <= {path.name for path in folder.iterdir()}
    assert not list(tmp_path.rglob(".*"))


def test_an_error_names_the_output_and_not_its_staging_folder(tmp_path):
    full = pytest.raises(OutputError, match=f"no space left for {tmp_path}/new/a.json; ")
    with full, atomic.staged_files(tmp_path / "new") as place, atomic.writing(place / "a.json"):
        full_disk()


def test_a_full_disk_is_known_by_whatever_libraries_make_of_it(tmp_path):
    """Under a limit on the size of files, which the system treats in the same way."""

    def fill() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        errors, tensors = [], {"x": torch.zeros(10**5)}
        for write in (partial(safetensors.torch.save_file, tensors), lambda path: path.write_bytes(bytes(10**6))):
            try:
                write(tmp_path / "x")
            except Exception as error:
                errors.append(error)
        return [shortages.is_disk_full(error) for error in errors] != [True, True]

    assert Fork.start(fill, tmp_path / "errors").wait(PATIENCE).code == 0


def test_a_folder_is_for_one_process_at_a_time(tmp_path):
    taken = pytest.raises(OutputError, match=re.escape(f"another process works in {tmp_path}"))
    with locked_folder(tmp_path), taken, locked_folder(tmp_path):
        pass
    with locked_folder(tmp_path):
        pass


def stopped(folder: Path, number: int, work) -> tuple[int, str, float]:
    """A process that works until it is stopped: its exit code, what it said, and how long it took to end."""
    ready, begun = os.pipe()

    def listen_and_work() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which jobs in the background ignore
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as nohup does
        with STOP.listening():
            work(lambda: os.write(begun, b"x"))

    child = Fork.start(listen_and_work, folder.parent / "said")
    os.close(begun)
    assert os.read(ready, 1) == b"x"
    sent = time.monotonic()
    os.kill(child.pid, number)
    ended = child.wait(PATIENCE, sent)
    return ended.code, ended.errors, ended.seconds


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_what_is_in_native_code_and_takes_what_is_unfinished_with_it(number, code, tmp_path):
    folder = tmp_path / "records"
    folder.mkdir()

    def work(begun) -> None:
        with atomic.staging_folder(folder / "new" / "newer" / "out") as place, atomic.staged_file(folder / "file"):
            (place / "half").write_text("x")
            atomic.write_text(place / "whole", "x")  # which goes with the folder it lies in
            begun()
            hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # a Python handler would wait for minutes

    found, said, seconds = stopped(folder, number, work)
    assert (found, said) == (code, "slimstate: stopped; nothing was written; the same command starts again\n")
    assert list(folder.iterdir()) == []
    assert seconds < 2


def test_a_stop_says_what_is_kept(tmp_path):
    folder = tmp_path / "records"

    def kept(begun) -> None:
        says = STOP.with_message
        with says(lambda: None), says(lambda: "3 rows are kept"), says(lambda: "inner"):
            begun()
            time.sleep(60)

    def written(begun) -> None:
        atomic.write_text(folder / "a", "x")
        atomic.write_text(folder / "b", "x")
        begun()
        time.sleep(60)

    assert stopped(folder, signal.SIGTERM, kept)[1] == "slimstate: stopped; 3 rows are kept\n"
    said = stopped(folder, signal.SIGTERM, written)[1]
    assert said == f"slimstate: stopped; {folder / 'b'} and 1 more: written, and complete\n"


def test_a_process_that_is_ending_makes_nothing_more(tmp_path):
    """What is unfinished was removed by then; a folder that is made a moment later would stay."""
    done = []

    def write() -> None:
        atomic.write_text(tmp_path / "new" / "out.txt", "words")
        done.append(True)

    with STOP.lock:
        writer = Thread(target=write)
        writer.start()
        writer.join(0.1)
        assert (list(tmp_path.iterdir()), done) == ([], [])
    writer.join()
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "out.txt"]


@pytest.mark.parametrize("files", [atomic.copy_files, lambda _, copy: atomic.create_parents(copy, copy.parents[1])])
def test_a_staging_folder_that_a_stop_has_removed_does_not_come_back(files, tmp_path):
    source, staging = tmp_path / "source", tmp_path / "staging"
    (source / "inner").mkdir(parents=True)
    (source / "inner/file").write_text("text")
    with pytest.raises(FileNotFoundError):
        files(source, staging / "folder/copy")
    assert not staging.exists()
    (staging / "folder").mkdir(parents=True)
    files(source, staging / "folder/copy")


def test_a_signal_to_a_forked_process_is_none_to_its_parent():
    """As libraries end their workers."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with STOP.listening():
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert handlers == {number: signal.getsignal(number) for number in handlers}


def test_importing_the_package_changes_neither_signal_handlers_nor_the_umask():
    code = """
import os, signal, sys
os.umask = signal.signal = signal.set_wakeup_fd = lambda *_, **__: sys.exit("changed")
import slimstate.system.atomic
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_names_that_are_no_utf8_can_be_written_about(tmp_path):
    atomic.write_text(tmp_path / "x", "caf\udce9")
    assert (tmp_path / "x").read_text() == "caf\\udce9"
    assert atomic.STAGING.fullmatch(f".x.partial-{HOST}-1")


def test_files_have_the_mode_of_any_other_file_here(tmp_path):
    """safetensors makes its files for their owner alone."""
    (tmp_path / "other").write_text("")
    usual = (tmp_path / "other").stat().st_mode
    with atomic.staged_file(tmp_path / "one") as path:
        safetensors.torch.save_file({"x": torch.zeros(2)}, path)
    with atomic.staged_folder(tmp_path / "folder", force=False) as place:
        safetensors.torch.save_file({"x": torch.zeros(2)}, place / "two")
    assert (tmp_path / "one").stat().st_mode == usual
    assert (tmp_path / "folder" / "two").stat().st_mode == usual


def test_a_run_folder_is_emptied_with_its_settings_last(tmp_path, monkeypatch):
    """Killed on the way, it is still known whose the rest is."""
    for name in ("zebra", "apple"):
        (tmp_path / name).mkdir()
    for name in (run_folders.SETTINGS, "a.json", "z.json"):
        (tmp_path / name).write_text("{}")
    gone: list[str] = []
    monkeypatch.setattr(atomic, "remove", lambda path: gone.append(path.name))
    run_folders.RunFolder(tmp_path).empty()
    assert set(gone[:2]) == {"zebra", "apple"}
    assert gone[-1] == run_folders.SETTINGS
    assert len(gone) == 5
