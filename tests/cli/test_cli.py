"""The command itself: its help and JSON, and one clear line for bad input, errors of the machine and signals."""

import errno
import importlib.metadata
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

import slimstate
import tiny
from launching import Program
from places import ROOT, TESTS
from slimstate import cli
from slimstate.cli import name_flags
from slimstate.cli.terminal import Output, Table, print_all, secure_streams
from slimstate.core.file_names import PLAN
from slimstate.models.load import load
from slimstate.selectors import METHODS, channel_methods
from slimstate.system.errors import OutputError

COMMAND = Path(sys.executable).with_name("slimstate")
NAME = tiny.PLAIN[0]
ERRORS = {
    "memory": (MemoryError(), "out of memory"),
    "disk": (OSError(errno.ENOSPC, "No space left on device"), "no space left on the disk"),
    "permission": (PermissionError(errno.EACCES, "Permission denied", "/x"), "/x: Permission denied"),
    "a bug": (RuntimeError("a bug"), None),
}
NO_MODELS = [
    ('{"model_type": "llama"}', "llama is not a supported linear-attention model; supported families:"),
    ('{"model_type": "bailing_hybrid"}', "bailing_hybrid: its config has one linear_head_dim"),
    ("{}", "names no model_type"),
    ("not json", "is not JSON"),
    ("[]", "is not a JSON object"),
    ('{"model_type": "delta_net"}', "no weights in this format; save the model as safetensors first"),
    (None, "has no config.json"),
]


@pytest.mark.slow
def test_the_installed_command_cuts_and_measures(folders, text_file, tmp_path, execute):
    """The cut runs in a process of its own; its result is measured in this one."""
    out = tmp_path / "cut"
    calibration = ["--data", text_file, "--samples", "4", "--length", "64"]
    words = [COMMAND, "prune", folders[NAME], "--out", out, "--compression", "0.4", *calibration, "--json", "-v"]
    shown, said = tmp_path / "shown", tmp_path / "said"
    assert Program(*words, out=shown, err=said).wait() == 0, said.read_text()
    record, err = json.loads(shown.read_text()), said.read_text()
    assert (record["width"], record["key_dim"], record["out"]) == (24, 16, str(out))
    assert record["state_bytes"]["after"]["fp32"] * 24 == record["state_bytes"]["before"]["fp32"] * 16
    assert "rounded to key dim 16" in err
    assert "kernels: PyTorch" in err
    assert "\r" not in err  # no progress bar where there is no terminal
    windows = ["--length", "128", "--max-tokens", "1024"]
    measured = json.loads(execute("eval", out, "--text", text_file, *windows, "--json")[1])
    runtime = load(out, device="cpu")
    ids = torch.tensor(runtime.tokenizer(text_file.read_text())["input_ids"][:1024]).view(8, 128)
    with torch.inference_mode():
        logits = runtime.model(input_ids=ids, use_cache=False).logits
    nats = float(F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
    assert measured["perplexity"] == pytest.approx(math.exp(nats), rel=1e-4)
    assert measured["bits_per_byte"] == pytest.approx(nats / math.log(2), rel=1e-4)  # one token per byte


def test_help_and_version(execute):
    for words in ((), ("bench",)):  # without a command the help is shown
        code, out, err = execute(*words)
        assert (code, out, err.startswith("Usage: "), len(err.splitlines()) > 8) == (2, "", True, True)
    first, packages, device = execute("--version")[1].splitlines()
    assert first == f"slimstate {slimstate.__version__}"
    assert f"torch {importlib.metadata.version('torch')}" in packages
    assert "CPU" in device
    assert execute("-h") == execute("--help")
    sweep = (*channel_methods(), "0.3,0.4,0.5,0.75")
    for command, words in (("inspect", ()), ("eval", ()), ("prune", METHODS), ("sweep", sweep)):
        code, out, _ = execute(command, "--help")
        assert (code, "MODEL" in out) == (0, True)
        assert not re.search("{[a-z_]+}", out)  # every placeholder was filled in
        assert all("".join(word.split()) in "".join(out.split()) for word in words)


@pytest.mark.parametrize("name", tiny.PLAIN)
def test_inspect_describes_the_model(name, folders, execute):
    code, out, _ = execute("inspect", folders[name], "--json")
    record, model = json.loads(out), load(folders[name], device="cpu").model
    assert (code, record["model_type"]) == (0, name.split("-")[0])
    assert (record["mixers"], record["heads"], record["key_dim"]) == (2, 2, 24)
    assert record["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    state = model(input_ids=tiny.token_ids(1, 8), use_cache=True).past_key_values[0]["recurrent_state"]
    assert record["state_bytes"] == {"fp32": 2 * state.numel() * 4, "bf16": 2 * state.numel() * 2}
    assert record["value_dim"] * 24 == state[0, 0].numel()
    short, long = (
        execute("inspect", folders[name], "--state-mb", 1, "--state-dtype", dtype) for dtype in ("bf16", "bfloat16")
    )
    assert short == long
    assert (short[0], "recurrent state per sequence" in short[1]) == (0, True)


def test_a_data_free_cut_runs_no_kernels_and_a_second_cut_mentions_the_first(folders, tmp_path, execute):
    first = tmp_path / "cut"
    code, out, err = execute("prune", folders[NAME], "--out", first, "--method", "l1", "--key-dim", 8, "-v")
    assert (code, "kernels: none ran" in out, "key dim 8 of 24" in err) == (0, True, True)
    again = ("prune", first, "--method", "l1", "--key-dim", 4)
    code, out, err = execute(*again, "--dry-run")
    assert (code, "nothing was written" in out, "cut before: key dim 24 to 8 by l1;" in err) == (0, True, True)
    code, _, err = execute(*again, "--out", tmp_path / "again", "--quiet")
    assert (code, err) == (0, "")


REFUSED = {
    "prune /nowhere/model --method l1 --key-dim 8": "no model at /nowhere/model",
    "prune nobody/nothing-here --method l1 --key-dim 8": "the hub cannot be reached from here",
    "prune MODEL --method l1 --key-dim 0": "--key-dim must be at least 1 and less than the width 24, got 0",
    "prune MODEL --method l1 --key-dim 24": "nothing to cut",
    "prune MODEL --method l1 --compression 0": "--compression must lie between 0 and 1, got 0",
    "prune MODEL --method l1 --compression 1": "--compression must lie between 0 and 1, got 1",
    "prune MODEL --method l1 --compression nan": "--compression must be finite, got nan",
    "prune MODEL --method l1 --compression 0.5 --key-dim 8": "either --key-dim or --compression",
    "prune MODEL --method l1": "either --key-dim or --compression",
    "prune MODEL --method magic --key-dim 8": "there are random, l1, s-wanda, grad, drrqr",
    "prune MODEL --method l1 --key-dim 8 --score v": "unknown --score v; there are kq, k, q",
    "prune MODEL --method l1 --key-dim 8 --device tpu": "unknown --device tpu; there are cpu, cuda",
    "prune MODEL --method l1 --key-dim 8 --dtype int4": "unknown --dtype int4",
    "prune MODEL --method l1 --key-dim 8 --state-dtype junk": "unknown --state-dtype junk",
    "prune MODEL --key-dim 8 --data no/dataset": "the hub cannot be reached",
    "prune MODEL --key-dim 8": "give text to calibrate on with --data",
    "prune MODEL --key-dim 8 --data /nowhere/x.txt": "no data at /nowhere/x.txt",
    "prune MODEL --key-dim 8 --data TEXT --samples 128 --length 2048": "samples of 2048 need 262,144",
    "prune MODEL --key-dim 8 --rrqr-f 0.5": "--rrqr-f must be at least 1, got 0.5",
    "prune MODEL --key-dim many": "Invalid value for '--key-dim'",
    "prune MODEL --keydim 8": "No such option",
    "prune MODEL --key-dim 8 --reconstruct-steps 3": "--reconstruct-steps needs --reconstruct",
    "prune MODEL --key-dim 8 --distill 3": "--distill needs --reconstruct",
    "prune MODEL --method l1 --key-dim 8 --reconstruct": "give it with --data",
    "inspect MODEL --prefix-caching": "--prefix-caching is for the memory of a serving engine: give --engine vllm or",
    "inspect MODEL --kv-dtype fp8 --engine vllm": "--kv-dtype is for the memory of a serving engine",
    "inspect MODEL --memory-gb 40 --context 4096": "give --engine vllm or sglang, --context and --memory-gb",
    "inspect MODEL --state-dtype float16": "unknown --state-dtype float16; there are fp32, bf16",
}


@pytest.mark.parametrize("line", REFUSED)
def test_bad_input_is_one_line_and_writes_nothing(line, folders, text_file, tmp_path, capsys, monkeypatch, execute):
    monkeypatch.setattr("slimstate.system.hub.is_reachable", lambda: False)
    places = {"MODEL": folders[NAME], "TEXT": text_file}
    out = ("--out", tmp_path / "cut") if line.startswith("prune") else ()
    capsys.readouterr()  # output of building the model
    code, shown, err = execute(*[places.get(word, word) for word in shlex.split(line)], *out)
    assert (code, shown, len(err.splitlines()), err.startswith("slimstate: ")) == (2, "", 1, True)
    assert REFUSED[line] in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("config", "message"), NO_MODELS)
def test_folders_without_a_supported_model_are_refused(config, message, tmp_path, refusal):
    (tmp_path / "model").mkdir()
    if config is not None:
        (tmp_path / "model" / "config.json").write_text(config)
    assert message in refusal("inspect", tmp_path / "model")
    assert message in refusal("prune", tmp_path / "model", "--key-dim", 8, "--out", tmp_path / "cut", "--method", "l1")


def test_a_plan_to_apply_has_its_own_size(folders, tmp_path, execute, refusal):
    slimstate.prune(folders[NAME], tmp_path / "cut", method="l1", key_dim=8)
    words = ("prune", folders[NAME], "--apply", tmp_path / "cut" / PLAN, "--out", tmp_path / "other")
    for size in ("--key-dim 6", "--compression 0.5", "--state-mb 1.0", "--sequences 8 --memory-gb 1.0"):
        assert "says how much is kept" in refusal(*words, *size.split())
    assert not (tmp_path / "other").exists()
    assert execute(*words)[0] == 0


def test_options_in_errors_of_the_library_are_shown_as_flags():
    """Names of fields in a model's config are left as they are."""
    assert name_flags("give either `compression` or `key_dim`") == "give either --compression or --key-dim"
    assert name_flags("give text with `data`; `norm_eps` stays") == "give text with --data; `norm_eps` stays"


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
        secure_streams()
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


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_the_machine_are_one_line_and_a_bug_keeps_its_traceback(name, monkeypatch, refusal):
    error, line = ERRORS[name]
    monkeypatch.setattr("slimstate.workflows.inspect.read_headers", Mock(side_effect=error))
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
def test_commands_that_are_stopped_leave_nothing_and_can_be_repeated(tmp_path):
    """A few trials of the crash suite; `make crash` has hundreds."""
    words = ["--trials", "3", "--classes", "kills,races", "--commands", "prune"]
    suite = Program(TESTS / "crash_suite.py", *words, out=tmp_path / "shown", err=tmp_path / "said")
    assert suite.wait() == 0, (tmp_path / "shown").read_text() + (tmp_path / "said").read_text()


@pytest.mark.parametrize("width", [80, 120])
def test_no_word_is_cut_off_in_a_narrow_terminal(width, capsys, monkeypatch):
    monkeypatch.setattr("slimstate.cli.terminal.printer", lambda: Console(width=width, soft_wrap=True))
    names = [f"column-of-numbers-{number}" for number in range(width // 20)]
    print_all([Table(names[:2], [("a" * 10, "b")]), Table(names, [["12,345,678 ± 0.1"] * len(names)])])
    out = capsys.readouterr().out
    assert "…" not in out
    assert out.splitlines()[-1] == "; ".join(f"{name} 12,345,678 ± 0.1" for name in names)
