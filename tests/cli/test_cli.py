"""The command itself: its verbs, its JSON, and one clear line with exit code 2 for everything that is wrong."""

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
import typer
from slimstate.cli.flags import as_flags, flags_of

import slimstate
import tiny
from command import run
from slimstate import cli
from slimstate.core.file_names import PLAN
from slimstate.models.load import load
from slimstate.selectors import METHODS, channel_methods

COMMAND = Path(sys.executable).with_name("slimstate")
NAME = tiny.PLAIN[0]


@pytest.mark.slow
def test_the_installed_command_cuts_and_measures(folders, text_file, tmp_path, capsys, monkeypatch):
    """In a process of its own; what it wrote is measured in this one."""
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
    _, found, _ = run(capsys, monkeypatch, "eval", out, "--text", text_file, *windows, "--json")
    measured = json.loads(found)
    runtime = load(out, device="cpu")
    ids = torch.tensor(runtime.tokenizer(text_file.read_text())["input_ids"][:1024]).view(8, 128)
    with torch.inference_mode():
        logits = runtime.model(input_ids=ids, use_cache=False).logits
    nats = float(F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
    assert measured["perplexity"] == pytest.approx(math.exp(nats), rel=1e-4)
    assert measured["bits_per_byte"] == pytest.approx(nats / math.log(2), rel=1e-4)  # one token per byte


@pytest.mark.parametrize("verb", [(), ("bench",)])
def test_without_a_verb_the_help_is_shown_line_by_line(verb, capsys, monkeypatch):
    code, out, err = run(capsys, monkeypatch, *verb)
    assert (code, out) == (2, "")
    assert err.startswith("Usage: ")
    assert len(err.splitlines()) > 8


@pytest.mark.parametrize("name", tiny.PLAIN)
def test_inspect_says_what_the_model_is(name, folders, capsys, monkeypatch):
    code, out, _ = run(capsys, monkeypatch, "inspect", folders[name], "--json")
    record = json.loads(out)
    model = load(folders[name], device="cpu").model
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


def test_data_free_methods_say_that_nothing_ran(folders, tmp_path, capsys, monkeypatch):
    first, second = tmp_path / "cut", tmp_path / "again"
    code, out, err = run(capsys, monkeypatch, "prune", folders[NAME], "--out", first, *L1, "--key-dim", 8)
    assert code == 0
    assert "kernels: none ran" in out
    assert "key dim 8 of 24" in err
    code, _, err = run(capsys, monkeypatch, "prune", first, "--out", second, *L1, "--key-dim", 4)
    assert code == 0
    assert "cut before, from key dim 24 to 8" in err


def test_compressions_are_rounded_and_announced():
    from slimstate.pruning.key_dim import resolve_key_dim

    kept = {c: resolve_key_dim(128, c, None)[0] for c in (0.3, 0.4, 0.5, 0.75, 0.875, 0.01, 0.999)}
    assert kept == {0.3: 96, 0.4: 80, 0.5: 64, 0.75: 32, 0.875: 16, 0.01: 112, 0.999: 16}
    assert resolve_key_dim(80, 0.8, None) == (16, "compression 0.8 of 80 channels keeps 16")
    assert resolve_key_dim(128, None, 77)[0] == 77
    assert resolve_key_dim(16, 0.5, None)[0] == 8
    assert "rounded to key dim 96" in resolve_key_dim(128, 0.3, None)[1]


L1 = ("--method", "l1")
BAD = {
    "no such folder": (["/nowhere/model", *L1, "--key-dim", "8"], "no model at /nowhere/model"),
    "no such hub id": (["nobody/nothing-here", *L1, "--key-dim", "8"], "the hub cannot be reached from here"),
    "key dim 0": (["MODEL", *L1, "--key-dim", "0"], "key dim 0: it must be at least 1 and less than the width 24"),
    "key dim negative": (["MODEL", *L1, "--key-dim", "-3"], "key dim -3"),
    "key dim too large": (["MODEL", *L1, "--key-dim", "500"], "key dim 500"),
    "key dim is the width": (["MODEL", *L1, "--key-dim", "24"], "nothing to cut"),
    "compression 0": (["MODEL", *L1, "--compression", "0"], "compression 0.0: it must lie between 0 and 1"),
    "compression 1": (["MODEL", *L1, "--compression", "1"], "compression 1.0"),
    "compression nan": (["MODEL", *L1, "--compression", "nan"], "compression nan"),
    "both": (["MODEL", *L1, "--compression", "0.5", "--key-dim", "8"], "either --compression or --key-dim"),
    "neither": (["MODEL", *L1], "either --compression or --key-dim"),
    "method": (["MODEL", "--method", "magic", "--key-dim", "8"], "there are random, l1, s-wanda, grad, drrqr"),
    "score": (["MODEL", *L1, "--score", "v", "--key-dim", "8"], "unknown score 'v'; there are kq, k, q"),
    "device": (["MODEL", *L1, "--device", "tpu", "--key-dim", "8"], "unknown device 'tpu'"),
    "dtype": (["MODEL", *L1, "--dtype", "int4", "--key-dim", "8"], "unknown dtype 'int4'"),
    "no such dataset": (["MODEL", "--key-dim", "8", "--data", "no/dataset"], "the hub cannot be reached from here"),
    "no data": (["MODEL", "--key-dim", "8"], "give text to calibrate on with --data"),
    "missing data": (["MODEL", "--key-dim", "8", "--data", "/nowhere/x.txt"], "no data at /nowhere/x.txt"),
    "short data": (
        ["MODEL", "--key-dim", "8", "--data", "TEXT", "--samples", "128", "--length", "2048"],
        "samples of 2048 need 262,144",
    ),
    "f": (["MODEL", "--key-dim", "8", "--rrqr-f", "0.5"], "f >= 1"),
    "state": (["MODEL", *L1, "--key-dim", "8", "--state-dtype", "junk"], "unknown --state-dtype 'junk'"),
    "not a number": (["MODEL", "--key-dim", "many"], "Invalid value for '--key-dim'"),
    "no such option": (["MODEL", "--keydim", "8"], "No such option"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prefix-caching"], "--prefix-caching is for the pool of an engine: give --engine vllm or sglang"),
        (["--kv-dtype", "fp8", "--engine", "vllm"], "--kv-dtype is for the pool of an engine"),
        (["--memory-gb", 40, "--context", 4096], "give --engine vllm or sglang, --context and --memory-gb"),
        (["--state-dtype", "float16"], "unknown --state-dtype 'float16'; there are fp32, bf16"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(arguments, message, folders, capsys, monkeypatch):
    code, out, err = run(capsys, monkeypatch, "inspect", folders[NAME], *arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert message in err


def test_types_of_a_state_have_two_names_each(folders, capsys, monkeypatch):
    told = [run(capsys, monkeypatch, "inspect", folders[NAME], "--state-mb", 1, "--state-dtype", name)[:2]
            for name in ("bf16", "bfloat16")]  # fmt: skip
    assert told[0] == told[1]
    assert told[0][0] == 0


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_input_gets_one_line_and_writes_nothing(name, folders, text_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("slimstate.system.hub.reachable", lambda: False)
    arguments, message = BAD[name]
    places = {"MODEL": folders[NAME], "TEXT": text_file}
    arguments = [places.get(argument, argument) for argument in arguments]
    capsys.readouterr()  # what making the model said
    code, out, err = run(capsys, monkeypatch, "prune", *arguments, "--out", tmp_path / "cut")
    assert code == 2
    assert out == ""
    assert err.startswith("slimstate: ")
    assert len(err.splitlines()) == 1
    assert message in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            '{"model_type": "llama"}',
            "llama is not a supported linear-attention model; supported families:",
        ),
        ('{"model_type": "kimi_linear"}', "kimi_linear: its config has one linear_head_dim"),
        ("{}", "names no model_type"),
        ("not json", "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"model_type": "delta_net"}', "no weights at all"),
        (None, "has no config.json"),
    ],
)
def test_what_is_not_a_supported_model_is_refused(config, message, tmp_path, capsys, monkeypatch):
    (tmp_path / "model").mkdir()
    if config is not None:
        (tmp_path / "model" / "config.json").write_text(config)
    for verb in ("inspect", "prune"):
        options = [] if verb == "inspect" else ["--key-dim", "8", "--out", tmp_path / "cut", *L1]
        code, _, err = run(capsys, monkeypatch, verb, tmp_path / "model", *options)
        assert (code, len(err.splitlines())) == (2, 1)
        assert message in err


def test_help_and_version(capsys, monkeypatch):
    import slimstate

    first, packages, device = run(capsys, monkeypatch, "--version")[1].splitlines()
    assert first == f"slimstate {slimstate.__version__}"
    assert f"torch {importlib.metadata.version('torch')}" in packages
    assert "CPU" in device
    assert run(capsys, monkeypatch, "-h") == run(capsys, monkeypatch, "--help")
    for verb, known in (
        ("inspect", ()),
        ("eval", ()),
        ("prune", METHODS),
        ("sweep", (*channel_methods(), "0.3,0.4,0.5,0.75")),
    ):
        code, out, _ = run(capsys, monkeypatch, verb, "--help")
        assert code == 0
        assert "MODEL" in out
        assert not re.search("{[a-z_]+}", out)  # every word was filled in
        assert all("".join(name.split()) in "".join(out.split()) for name in known)


@pytest.mark.parametrize(
    "wish", [("--key-dim", 6), ("--compression", 0.5), ("--state-mb", 1.0), ("--sequences", 8, "--memory-gb", 1.0)]
)
def test_a_plan_says_how_much_is_kept(wish, folders, tmp_path, capsys, monkeypatch):
    slimstate.prune(folders[NAME], tmp_path / "cut", method="l1", key_dim=8)
    words = ("prune", folders[NAME], "--apply", tmp_path / "cut" / PLAN, "--out", tmp_path / "other", *wish)
    code, _, err = run(capsys, monkeypatch, *words)
    assert (code, "says how much is kept" in err) == (2, True)
    assert not (tmp_path / "other").exists()


def test_a_parameter_in_an_error_is_told_as_its_flag():
    """The library names parameters, the command names flags; names of config fields are left as they are."""
    flags = flags_of(typer.main.get_command(cli.app))
    assert as_flags("give either `compression` or `key_dim`", flags) == "give either --compression or --key-dim"
    assert (
        as_flags("give text with `calibration`; `norm_eps` stays", flags) == "give text with --data; `norm_eps` stays"
    )
    assert all(flag.startswith("--") for flag in flags.values())
