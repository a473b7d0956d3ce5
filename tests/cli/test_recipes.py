"""Recipes: every one is sound at both scales and runs at a toy one; a stopped one goes on; mistakes are named."""

from __future__ import annotations

import itertools
import json
import shlex
from pathlib import Path

import pytest
import typer

import tiny
from command import run
from places import ROOT
from slimstate.cli import app
from slimstate.cli.recipes import PROGRESS, SCALES, Recipe, run_recipe
from slimstate.records.recipe import RecipeRecord
from slimstate.system.errors import DataError, PlanError, SlimstateError
from tiny_shapes import SHAPES, SIZES

FOLDER = ROOT / "recipes"
RECIPES = {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}
PROMISED = {
    "pre-rft", "post-rft", "kq-ablation", "pca-sharing", "shared-convolutions", "throughput", "spectra", "utilisation",
    "filters",
}  # fmt: skip
VERBS = dict(typer.main.get_command(app).commands.items())


def test_there_is_a_recipe_for_every_table_and_figure():
    assert RECIPES.keys() >= PROMISED


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", RECIPES)
def test_every_step_is_a_command_with_options_it_knows(name, scale):
    """Parsed by the command's own parser, which reads no file."""
    commands = Recipe.read(RECIPES[name]).commands(scale, Path("out"))
    assert commands
    for words in commands:
        verb = VERBS[words[0]]
        rest = words[1:]
        while hasattr(verb, "commands"):
            verb, rest = verb.commands[rest[0]], rest[1:]
        verb.make_context(words[0], list(rest), resilient_parsing=False).close()


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_step_reads_an_earlier_one_has_written(name):
    """At the small scale, where nothing comes from elsewhere."""
    written: set[str] = set()
    for words in Recipe.read(RECIPES[name]).commands("small", Path("/nowhere/out")):
        places = {option: place for option, place in itertools.pairwise(words) if option.startswith("--")}
        made = {place for option, place in places.items() if option in ("--out", "--control-out")}
        for word in words:
            if word.startswith("/nowhere/out/") and word not in made and word != places.get("--evidence"):
                assert word in written, (words, word)
        written |= made
        for word in words:
            if "demo" in Path(word).parts:
                assert Path(word).exists()


@pytest.fixture(scope="module")
def toy(folders, text_file, tmp_path_factory) -> dict[str, str]:
    """Values for the names of all recipes that make them take seconds."""
    root = tmp_path_factory.mktemp("toy")
    shape = root / "shape.json"
    shape.write_text(json.dumps({**SIZES, **SHAPES["delta_net"]}))
    text = str(text_file)
    return {
        "models": str(folders[tiny.PLAIN[0]]), "model": str(folders[tiny.PLAIN[1]]), "shape": str(shape),
        "shapes": str(shape), "data": text, "text": text, "samples": "2", "length": "64", "measured": "2048",
        "steps": "2", "batch": "4", "tokens": "512", "followed": "256", "methods": "random,l1", "tokenizer": "",
        "measures": f"--text,{text},--max-tokens,1024", "compressions": "0.5", "rounds": "1", "hidden": "32",
    }  # fmt: skip


OWN = {
    "pca-sharing": {"models": None, "methods": "pca,pca-adversarial,grad"},
    "filters": {"models": None},
    "spectra": {"methods": "drrqr,l1", "cuts": "{out}/l1"},
    "utilisation": {"cuts": "{out}/random,{out}/l1"},
    "throughput": {"models": "delta_net-5m", "model_key_dims": "32", "gated_key_dims": "16", "key_dims": "32,16"},
}
RESULTS = {
    "pre-rft": ["delta_net-plain/sweep/sweep.md", "delta_net-plain/l1.json", "report.html"],
    "post-rft": ["delta_net-plain/l1-0.5-recovered/slimstate_recovery.json", "delta_net-plain/control", "report.html"],
    "kq-ablation": ["delta_net-plain/ablation.tex", "report.html"],
    "pca-sharing": ["sweep-own/sweep.md", "sweep-head/sweep.md", "report.html"],
    "shared-convolutions": ["own/config.json", "all/config.json", "head.json", "report.html"],
    "pretraining": ["shape.json/model.safetensors"],
    "spectra": ["states", "drrqr-recovered/config.json", "report.html"],
    "utilisation": ["states", "report.html"],
    "filters": ["states", "report.html"],
    "throughput": ["mixer", "model", "gated"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_at_a_toy_scale(name, toy, tmp_path, capsys, monkeypatch):
    recipe = Recipe.read(RECIPES[name])
    known = {**recipe.values["paper"], **recipe.values["small"]}
    changes = {key: value for key, value in {**toy, **OWN.get(name, {})}.items() if key in known and value is not None}
    words = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, out, err = run(capsys, monkeypatch, "run", RECIPES[name], "--small", "--out", tmp_path / "out", *words)
    assert code == 0, err
    assert "results are in" in out
    for result in RESULTS[name]:
        assert (tmp_path / "out" / result).exists()
    code, _, err = run(capsys, monkeypatch, "run", RECIPES[name], "--small", "--out", tmp_path / "out", *words)
    assert code == 0
    assert "done before" in err.splitlines()[1]
    assert not any(line.startswith("step") and "done before" not in line for line in err.splitlines())


RECIPE = """
title = "A toy"
about = "Nothing"
[paper]
methods = ["l1", "drrqr"]
model = "{root}/a model"
many = ["--text", "x y"]
[small]
methods = ["l1"]
[[steps]]
run = "prune '{model}' --method {method} {*many} --methods {methods} --out {out}/{model:name}/{method}"
each = {method = "methods"}
[[steps]]
only = "paper"
run = "eval {model}"
[[steps]]
run = "report {out}"
"""


@pytest.fixture
def recipe(tmp_path) -> Path:
    path = tmp_path / "home" / "recipes" / "toy.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(RECIPE)
    return path


def test_names_lists_and_scales_become_words(recipe, tmp_path):
    model = str(tmp_path / "home" / "a model")
    found = Recipe.read(recipe).commands("paper", Path("o"))
    tail = ["--text", "x y", "--methods", "l1,drrqr", "--out"]
    assert found == [
        ["prune", model, "--method", "l1", *tail, "o/a model/l1"],
        ["prune", model, "--method", "drrqr", *tail, "o/a model/drrqr"],
        ["eval", model],
        ["report", "o"],
    ]
    small = Recipe.read(recipe).commands("small", Path("o"), {"model": "m", "methods": "a, b"})
    assert [words[:4] for words in small] == [["prune", "m", "--method", "a"], ["prune", "m", "--method", "b"], ["report", "o"]]  # noqa: E501  # fmt: skip


def test_a_stopped_recipe_goes_on_where_it_was(recipe, tmp_path):
    out, seen, trouble = tmp_path / "out", [], ["eval"]

    def execute(words):
        seen.append(words)
        if words[0] in trouble:
            trouble.clear()
            raise SlimstateError("stopped")
        if "--out" in words:
            Path(words[words.index("--out") + 1]).mkdir(parents=True, exist_ok=True)

    with pytest.raises(SlimstateError):
        run_recipe(Recipe.read(recipe), execute, out=out)
    assert [words[0] for words in seen] == ["prune", "prune", "eval"]
    assert seen[0][-1] == "--force"
    seen.clear()
    record = run_recipe(Recipe.read(recipe), execute, out=out)
    assert [words[0] for words in seen] == ["eval", "report"]
    assert RecipeRecord.read(out / PROGRESS) == record
    assert [step.command.split()[0] for step in record.steps] == ["prune", "prune", "eval", "report"]
    seen.clear()
    run_recipe(Recipe.read(recipe), execute, out=out)
    assert seen == []
    (out / "a model" / "drrqr").rmdir()
    run_recipe(Recipe.read(recipe), execute, out=out)  # what was removed is made again, and reported again
    assert [(words[0], words[3] if len(words) > 3 else "") for words in seen] == [
        ("prune", "drrqr"), ("eval", ""), ("report", ""),
    ]  # fmt: skip
    seen.clear()
    run_recipe(Recipe.read(recipe), execute, out=out, changes={"methods": "l1,grad"})
    assert [words[3] for words in seen if words[0] == "prune"] == ["l1", "grad"]  # --methods is in both commands


def test_a_recipe_goes_on_from_a_file_of_0_1(recipe, tmp_path):
    """Which had neither a kind nor a format; what is no step of the recipe any more is forgotten."""
    out, seen = tmp_path / "out", []
    commands = list(map(shlex.join, Recipe.read(recipe).commands("paper", out)))
    steps = [{"command": command, "seconds": 3.5} for command in (*commands[:3], "eval another")]
    old = {"recipe": str(recipe), "title": "A toy", "scale": "paper", "versions": {"python": "3.11.9"}, "steps": steps}
    for method in ("l1", "drrqr"):
        (out / "a model" / method).mkdir(parents=True)
    (out / PROGRESS).write_text(json.dumps({**old, "out": str(out)}))
    record = run_recipe(Recipe.read(recipe), seen.append, out=out)
    assert seen == [["report", str(out)]]
    assert [step.command for step in record.steps] == commands
    assert 10.5 < record.seconds < 13


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("title", "titel", "titel is no part of a recipe"),
        ("{*many}", "{*lots}", "KeyError 'lots'"),
        ('each = {method = "methods"}', 'each = {method = "model"}', "model is no list of values"),
        ('only = "paper"', 'only = "toy"', "`only` is one of paper, small"),
        ("[small]", "[tiny]", "tiny is no part of a recipe"),
        ('run = "report {out}"', 'runs = "report"', "TypeError"),
        ('title = "A toy"', "title = ", "is not a recipe"),
    ],
)
def test_a_recipe_that_is_none_is_named(before, after, complaint, recipe):
    recipe.write_text(RECIPE.replace(before, after, 1))
    with pytest.raises(DataError, match=complaint):
        Recipe.read(recipe).commands("paper", Path("o"))


def test_bad_requests_are_refused(recipe, tmp_path, capsys, monkeypatch):
    with pytest.raises(PlanError, match=r"has no value modle; there are methods, model, many"):
        Recipe.read(recipe).commands("paper", Path("o"), {"modle": "x"})
    code, _, err = run(capsys, monkeypatch, "run", recipe, "--set", "model")
    assert (code, err) == (2, "slimstate: --set model: give NAME=VALUE\n")
    code, out, _ = run(capsys, monkeypatch, "run", recipe, "--small", "--dry-run", "--out", "o")
    assert code == 0
    assert out.splitlines()[-1] == "slimstate report o"
    (tmp_path / PROGRESS).write_text("[]")
    with pytest.raises(DataError, match="does not say what was done"):
        run_recipe(Recipe.read(recipe), lambda words: None, out=tmp_path)
