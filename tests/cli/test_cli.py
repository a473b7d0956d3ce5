"""The command itself: its help, its JSON, and one clear line with exit code 2 for bad input."""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import slimstate
import tiny
from command import run
from slimstate.cli import name_flags
from slimstate.core.file_names import PLAN
from slimstate.models.load import load
from slimstate.selectors import METHODS, channel_methods

COMMAND = Path(sys.executable).with_name("slimstate")
NAME = tiny.PLAIN[0]
L1 = ("--method", "l1")


@pytest.mark.slow
def test_the_installed_command_cuts_and_measures(folders, text_file, tmp_path, capsys, monkeypatch):
    """The cut runs in a process of its own; its result is measured in this one."""
    out = tmp_path / "cut"
    calibration = ["--data", text_file, "--samples", "4", "--length", "64"]
    prune = subprocess.run(
        [COMMAND, "prune", folders[NAME], "--out", out, "--compression", "0.4", *calibration, "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    record = json.loads(prune.stdout)
    assert (record["width"], record["key_dim"], record["out"]) == (24, 16, str(out))
    assert record["state_bytes"]["after"]["fp32"] * 24 == record["state_bytes"]["before"]["fp32"] * 16
    assert "rounded to key dim 16" in prune.stderr
    assert "kernels: PyTorch" in prune.stderr
    assert "\r" not in prune.stderr  # no progress bar where there is no terminal
    windows = ["--length", "128", "--max-tokens", "1024"]
    measured = json.loads(run(capsys, monkeypatch, "eval", out, "--text", text_file, *windows, "--json")[1])
    runtime = load(out, device="cpu")
    ids = torch.tensor(runtime.tokenizer(text_file.read_text())["input_ids"][:1024]).view(8, 128)
    with torch.inference_mode():
        logits = runtime.model(input_ids=ids, use_cache=False).logits
    nats = float(F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
    assert measured["perplexity"] == pytest.approx(math.exp(nats), rel=1e-4)
    assert measured["bits_per_byte"] == pytest.approx(nats / math.log(2), rel=1e-4)  # one token per byte


IMPORTS = """
import os, signal, sys
handlers = [signal.getsignal(number) for number in signal.valid_signals()]
os.umask(0o027)
import slimstate
assert "inspect" in dir(slimstate)
assert handlers == [signal.getsignal(number) for number in signal.valid_signals()]
assert os.umask(0o027) == 0o027
assert "torch" not in sys.modules
from slimstate.__main__ import main
sys.argv = ["slimstate", "--help"]
try:
    main()
except SystemExit as stop:
    assert not stop.code
assert "torch" not in sys.modules
"""


def test_importing_slimstate_changes_nothing_in_the_process_and_loads_no_torch():
    """Neither does its help."""
    process = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.startswith("Usage: ")


@pytest.mark.parametrize("words", [(), ("bench",)])
def test_without_a_command_the_help_is_shown(words, capsys, monkeypatch):
    code, out, err = run(capsys, monkeypatch, *words)
    assert (code, out) == (2, "")
    assert err.startswith("Usage: ")
    assert len(err.splitlines()) > 8


def test_help_and_version(capsys, monkeypatch):
    first, packages, device = run(capsys, monkeypatch, "--version")[1].splitlines()
    assert first == f"slimstate {slimstate.__version__}"
    assert f"torch {importlib.metadata.version('torch')}" in packages
    assert "CPU" in device
    assert run(capsys, monkeypatch, "-h") == run(capsys, monkeypatch, "--help")
    sweep = (*channel_methods(), "0.3,0.4,0.5,0.75")
    for command, words in (("inspect", ()), ("eval", ()), ("prune", METHODS), ("sweep", sweep)):
        code, out, _ = run(capsys, monkeypatch, command, "--help")
        assert code == 0
        assert "MODEL" in out
        assert not re.search("{[a-z_]+}", out)  # every placeholder was filled in
        assert all("".join(word.split()) in "".join(out.split()) for word in words)


@pytest.mark.parametrize("name", tiny.PLAIN)
def test_inspect_describes_the_model(name, folders, capsys, monkeypatch):
    code, out, _ = run(capsys, monkeypatch, "inspect", folders[name], "--json")
    record, model = json.loads(out), load(folders[name], device="cpu").model
    assert code == 0
    assert record["model_type"] == name.split("-")[0]
    assert (record["mixers"], record["heads"], record["key_dim"]) == (2, 2, 24)
    assert record["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    state = model(input_ids=tiny.token_ids(1, 8), use_cache=True).past_key_values[0]["recurrent_state"]
    assert record["state_bytes"] == {"fp32": 2 * state.numel() * 4, "bf16": 2 * state.numel() * 2}
    assert record["value_dim"] * 24 == state[0, 0].numel()
    code, out, _ = run(capsys, monkeypatch, "inspect", folders[name])
    assert code == 0
    assert "recurrent state per sequence" in out


def test_a_data_free_cut_runs_no_kernels_and_a_second_cut_mentions_the_first(folders, tmp_path, capsys, monkeypatch):
    first, second = tmp_path / "cut", tmp_path / "again"
    code, out, err = run(capsys, monkeypatch, "prune", folders[NAME], "--out", first, *L1, "--key-dim", 8)
    assert code == 0
    assert "kernels: none ran" in out
    assert "key dim 8 of 24" in err
    code, out, err = run(capsys, monkeypatch, "prune", first, "--out", second, *L1, "--key-dim", 4, "--quiet")
    assert (code, err) == (0, "")
    code, out, err = run(capsys, monkeypatch, "prune", first, "--dry-run", *L1, "--key-dim", 4)
    assert "cut before, from key dim 24 to 8" in err
    assert "nothing was written" in out


BAD = {
    "no such folder": (["/nowhere/model", *L1, "--key-dim", "8"], "no model at /nowhere/model"),
    "no such hub id": (["nobody/nothing-here", *L1, "--key-dim", "8"], "the hub cannot be reached from here"),
    "key dim 0": (["MODEL", *L1, "--key-dim", "0"], "--key-dim must be at least 1 and less than the width 24, got 0"),
    "key dim negative": (["MODEL", *L1, "--key-dim", "-3"], "got -3"),
    "key dim too large": (["MODEL", *L1, "--key-dim", "500"], "got 500"),
    "key dim is the width": (["MODEL", *L1, "--key-dim", "24"], "nothing to cut"),
    "compression 0": (["MODEL", *L1, "--compression", "0"], "--compression must lie between 0 and 1, got 0"),
    "compression 1": (["MODEL", *L1, "--compression", "1"], "--compression must lie between 0 and 1, got 1"),
    "compression nan": (["MODEL", *L1, "--compression", "nan"], "--compression must be finite, got nan"),
    "two sizes": (["MODEL", *L1, "--compression", "0.5", "--key-dim", "8"], "either --key-dim or --compression"),
    "no size": (["MODEL", *L1], "either --key-dim or --compression"),
    "method": (["MODEL", "--method", "magic", "--key-dim", "8"], "there are random, l1, s-wanda, grad, drrqr"),
    "score": (["MODEL", *L1, "--score", "v", "--key-dim", "8"], "unknown --score v; there are kq, k, q"),
    "device": (["MODEL", *L1, "--device", "tpu", "--key-dim", "8"], "unknown --device tpu; there are cpu, cuda"),
    "dtype": (["MODEL", *L1, "--dtype", "int4", "--key-dim", "8"], "unknown --dtype int4"),
    "no such dataset": (["MODEL", "--key-dim", "8", "--data", "no/dataset"], "the hub cannot be reached"),
    "no data": (["MODEL", "--key-dim", "8"], "give text to calibrate on with --data"),
    "missing data": (["MODEL", "--key-dim", "8", "--data", "/nowhere/x.txt"], "no data at /nowhere/x.txt"),
    "short data": (
        ["MODEL", "--key-dim", "8", "--data", "TEXT", "--samples", "128", "--length", "2048"],
        "samples of 2048 need 262,144",
    ),
    "rrqr f": (["MODEL", "--key-dim", "8", "--rrqr-f", "0.5"], "--rrqr-f must be at least 1, got 0.5"),
    "state dtype": (["MODEL", *L1, "--key-dim", "8", "--state-dtype", "junk"], "unknown --state-dtype junk"),
    "not a number": (["MODEL", "--key-dim", "many"], "Invalid value for '--key-dim'"),
    "no such option": (["MODEL", "--keydim", "8"], "No such option"),
    "detail without its switch": (
        ["MODEL", "--key-dim", "8", "--reconstruct-steps", "3"], "--reconstruct-steps needs --reconstruct",
    ),
    "distillation alone": (["MODEL", "--key-dim", "8", "--distill", "3"], "--distill needs --reconstruct"),
    "reconstruction without text": (["MODEL", *L1, "--key-dim", "8", "--reconstruct"], "give it with --data"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_input_is_one_line_and_writes_nothing(name, folders, text_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("slimstate.system.hub.reachable", lambda: False)
    words, message = BAD[name]
    places = {"MODEL": folders[NAME], "TEXT": text_file}
    capsys.readouterr()  # output of building the model
    code, out, err = run(capsys, monkeypatch, "prune", *[places.get(w, w) for w in words], "--out", tmp_path / "cut")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith("slimstate: ")
    assert message in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prefix-caching"], "--prefix-caching is for the memory of a serving engine: give --engine vllm or sglang"),
        (["--kv-dtype", "fp8", "--engine", "vllm"], "--kv-dtype is for the memory of a serving engine"),
        (["--memory-gb", 40, "--context", 4096], "give --engine vllm or sglang, --context and --memory-gb"),
        (["--state-dtype", "float16"], "unknown --state-dtype float16; there are fp32, bf16"),
    ],
)
def test_an_option_without_effect_is_refused(words, message, folders, capsys, monkeypatch):
    code, out, err = run(capsys, monkeypatch, "inspect", folders[NAME], *words)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert message in err


def test_state_dtypes_have_a_short_and_a_long_name(folders, capsys, monkeypatch):
    short, long = (
        run(capsys, monkeypatch, "inspect", folders[NAME], "--state-mb", 1, "--state-dtype", name)[:2]
        for name in ("bf16", "bfloat16")
    )
    assert short == long
    assert short[0] == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"model_type": "llama"}', "llama is not a supported linear-attention model; supported families:"),
        ('{"model_type": "kimi_linear"}', "kimi_linear: its config has one linear_head_dim"),
        ("{}", "names no model_type"),
        ("not json", "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"model_type": "delta_net"}', "no weights at all"),
        (None, "has no config.json"),
    ],
)
def test_folders_without_a_supported_model_are_refused(config, message, tmp_path, capsys, monkeypatch):
    (tmp_path / "model").mkdir()
    if config is not None:
        (tmp_path / "model" / "config.json").write_text(config)
    for command, options in (("inspect", ()), ("prune", ("--key-dim", "8", "--out", tmp_path / "cut", *L1))):
        code, _, err = run(capsys, monkeypatch, command, tmp_path / "model", *options)
        assert (code, len(err.splitlines())) == (2, 1)
        assert message in err


@pytest.mark.parametrize(
    "size", [("--key-dim", 6), ("--compression", 0.5), ("--state-mb", 1.0), ("--sequences", 8, "--memory-gb", 1.0)]
)
def test_a_plan_to_apply_has_its_own_size(size, folders, tmp_path, capsys, monkeypatch):
    slimstate.prune(folders[NAME], tmp_path / "cut", method="l1", key_dim=8)
    words = ("prune", folders[NAME], "--apply", tmp_path / "cut" / PLAN, "--out", tmp_path / "other")
    code, _, err = run(capsys, monkeypatch, *words, *size)
    assert (code, "says how much is kept" in err) == (2, True)
    assert not (tmp_path / "other").exists()
    assert run(capsys, monkeypatch, *words)[0] == 0


def test_options_in_errors_of_the_library_are_shown_as_flags():
    """Names of fields in a model's config are left as they are."""
    assert name_flags("give either `compression` or `key_dim`") == "give either --compression or --key-dim"
    assert name_flags("give text with `data`; `norm_eps` stays") == "give text with --data; `norm_eps` stays"
