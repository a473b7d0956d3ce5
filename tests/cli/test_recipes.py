"""Recipes: every one is sound at both scales and runs at a toy one; a stopped one goes on; mistakes are named."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from pathlib import Path

import pytest
import typer
from slimstate.cli.recipes import PROGRESS, SCALES, Recipe, run_recipe

import tiny
from command import run
from places import ROOT
from slimstate.cli import app
from slimstate.cli.running import check_words
from slimstate.families import family_of
from slimstate.models.stock import stock_model
from slimstate.records.recipe import RecipeRecord
from slimstate.system.errors import DataError, OutputError, PlanError, SlimstateError
from slimstate.training.initial_model import read_config
from slimstate.workflows.recover import RecoverConfig
from tiny_shapes import SHAPES, SIZES

FOLDER = ROOT / "recipes"
RECIPES = {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}
# every label of the paper's source that a table or a figure with results has; fig:one is a drawing of the idea
LABELS = {
    "fig:histograms-main", "fig:rank-util-curve", "fig:histogram", "fig:histogram_pre_vs_post", "fig:filters_dn",
    "fig:filters_dn2", "tab:full_results_gdn_13B_paper", "tab:pre_rft_50_gated_only", "tab:mixer_scaling",
    "tab:shared-non-shared-comp-full", "table:adv_vs_non_adv", "tab:ablation_kq_targets", "tab:speedup_whole_model",
    "tab:unified_summary_50", "tab:zs-dn-370M", "tab:zs-dn-13B", "tab:zs-gdn-370M", "tab:zs-gdn-13B",
    "tab:recall-dn-370M", "tab:recall-dn-13B", "tab:recall-gdn-370M", "tab:recall-gdn-13B",
}  # fmt: skip
BOTH = {"tab:unified_summary_50", "tab:zs-dn-370M", "tab:zs-dn-13B", "tab:zs-gdn-370M", "tab:zs-gdn-13B"}
DELTA_NETS = ("delta_net-370m", "delta_net-1.3B-100B")
GATED = ("gated_deltanet-370m", "1.3B-100B-GatedDeltaNet-pure")
KEY_DIMS = {name: {89, 76, 64, 32} if name in DELTA_NETS else {179, 153, 128, 64} for name in (*DELTA_NETS, *GATED)}
COMMAND = typer.main.get_command(app)
VERBS = dict(COMMAND.commands.items())


def paper_commands(name: str) -> list[list[str]]:
    return Recipe.read(RECIPES[name]).commands("paper", Path("out"))


def option(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_every_table_and_figure_of_the_paper_is_reproduced_by_a_recipe():
    by_recipe = {name: {*Recipe.read(path).reproduces} for name, path in RECIPES.items()}
    assert set().union(*by_recipe.values()) == LABELS
    assert by_recipe["pre-rft"] >= BOTH  # these tables have columns before and after recovery
    assert by_recipe["post-rft"] >= BOTH


@pytest.mark.parametrize("name", RECIPES)
def test_every_value_of_the_papers_scale_names_its_source(name):
    """A line of the paper's source, its released code, or that it is ours."""
    text = RECIPES[name].read_text()
    values = text[text.index("[paper]") : text.index("[small]")].splitlines()[1:]
    silent = [line for line in values if line.strip() and line.split(" = ")[0] not in ("variants", "shown")]
    silent = [line for line in silent if line.strip() not in ("models = [", "cuts = [", "]")]
    assert silent
    for line in silent:
        assert re.search(r"# .*(L\d{3,4}|released|ours|all of it)", line), line


@pytest.mark.parametrize("name", ["pre-rft", "post-rft"])
def test_the_papers_numbers_are_cut_as_it_cuts_and_ours_stands_beside_them(name):
    """Its exact key dims, for each model its own, and norm_eps left alone; the same again with the correction."""
    cuts: dict[bool, dict[str, set[int]]] = {True: {}, False: {}}
    prunes = [words for words in paper_commands(name) if words[0] == "prune"]
    assert {option(words, "--method") for words in prunes} == {"random", "l1", "s-wanda", "grad", "drrqr"}
    for words in prunes:
        found = cuts["--keep-norm-eps" in words].setdefault(Path(words[1]).name, set())
        found.add(int(option(words, "--key-dim")))
    assert cuts == {True: KEY_DIMS, False: KEY_DIMS}
    measured = [option(words, "--tasks") for words in paper_commands(name) if words[0] == "eval"]
    assert {*measured} == {"paper"}
    assert len(measured) == len(prunes) + 4 * (1 if name == "pre-rft" else 2)  # and the uncut models, and the controls


@pytest.mark.parametrize("shape", ["delta_net-370m", "delta_net-1.3b", "gated_deltanet-370m", "gated_deltanet-1.3b"])
def test_the_stock_class_has_the_papers_key_dims(shape):
    """Configs hold ratios: the key dims come out of them exactly, and the value dim stays."""
    config = read_config(shape)
    family = family_of(config)
    before = family.mixers(config)[0]
    for key_dim in KEY_DIMS[DELTA_NETS[0] if shape.startswith("delta") else GATED[0]]:
        resized = family.resize(config, key_dim)
        mixer, running = family.mixers(resized)[0], stock_model({**resized, "num_hidden_layers": 1})
        assert (mixer.axis.width, mixer.value_dim) == (key_dim, before.value_dim)
        layer = running.get_submodule(mixer.path)
        assert layer.k_proj.weight.shape[0] == key_dim * mixer.axis.heads
        assert layer.v_proj.weight.shape[0] == before.value_dim * mixer.value_heads


def test_the_dry_run_of_recovery_shows_the_papers_key_dims(capsys, monkeypatch):
    code, out, _ = run(capsys, monkeypatch, "run", RECIPES["post-rft"], "--dry-run")
    assert code == 0
    for model, key_dims in KEY_DIMS.items():
        for key_dim in key_dims:
            assert f"{model} --method drrqr --key-dim {key_dim} --keep-norm-eps" in out.replace("\n", "")


@pytest.mark.parametrize("name", ["pre-rft", "kq-ablation", "pca-sharing"])
def test_sweeps_measure_words_at_the_papers_key_dims_with_and_without_the_correction(name):
    sweeps = [words for words in paper_commands(name) if words[0] == "sweep"]
    assert {option(words, "--tasks") for words in sweeps} == {"wikitext"}
    assert sum("--keep-norm-eps" in words for words in sweeps) == len(sweeps) / 2
    for words in sweeps:
        asked = {int(key_dim) for key_dim in option(words, "--key-dims").split(",")}
        assert asked <= KEY_DIMS.get(Path(words[1]).name, {32, 64})
        assert name != "pre-rft" or len(asked) == 4


def test_recoveries_are_the_papers_and_fit():
    recoveries = [words for words in paper_commands("post-rft") if words[0] == "recover"]
    assert {option(words, "--preset") for words in recoveries} == {"paper"}
    pieces = {Path(option(words, "--teacher")).name: int(option(words, "--grad-accum")) for words in recoveries}
    assert pieces[GATED[1]] > 1
    for count in pieces.values():
        RecoverConfig.from_values({"preset": "paper", "grad_accum": count, "device": "cpu"}).check_environment()


def test_pre_training_has_the_released_settings_and_one_home():
    trainings = paper_commands("pretraining")
    assert [option(words, "--out") for words in trainings] == [f"out/{name}" for name in (DELTA_NETS[0], GATED[0])]
    for words in trainings:
        steps, batch, length = (int(option(words, flag)) for flag in ("--steps", "--batch-size", "--length"))
        assert (steps, batch, length) == (19_064, 256, 2048)
        assert 9.9e9 < steps * batch * length < 10e9
        assert (float(option(words, "--lr")), float(option(words, "--min-lr"))) == (7e-4, 7e-5)
        assert int(float(option(words, "--warm-up")) * steps) == 950
        assert batch % int(option(words, "--grad-accum")) == 0


def test_what_recipes_take_from_each_other_at_the_papers_scale_is_made_there():
    """Every {built} folder is an output of the recipe that it names, and the 370M models are trained once."""
    built = {}
    for name, path in RECIPES.items():
        for words in Recipe.read(path).commands("paper", ROOT / "build" / "recipes" / name):
            if words[0] == "train":
                built[option(words, "--out")] = (name, tuple(words[1:-2]))
    assert len({training for _, training in built.values()}) == len(built) == 4
    for name in RECIPES:
        for words in paper_commands(name):
            taken = [word for word in words if word.startswith(str(ROOT / "build"))]
            assert {*taken} <= built.keys()
            assert all(built[word][0] != name for word in taken)


def test_speed_is_measured_as_released():
    mixers, (models, gated) = paper_commands("throughput")[:-2], paper_commands("throughput")[-2:]
    assert [option(words, "--length") for words in mixers] == ["4096", "2048"]
    assert all("--no-gate" in words for words in mixers)
    for words, width in ((models, 128), (gated, 256)):
        assert [option(words, flag) for flag in ("--batch", "--length", "--modes")] == ["32", "4096", "forward"]
        assert option(words, "--key-dims") == ",".join(str(width // part) for part in (1, 2, 4, 8))


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
    recovery = "--preset,paper,--steps,2,--batch-size,4,--length,64,--report-to,none"
    return {
        "models": str(folders[tiny.PLAIN[0]]), "model": str(folders[tiny.PLAIN[1]]), "shape": str(shape),
        "shapes": str(shape), "data": text, "text": text, "samples": "2", "length": "64", "lengths": "64",
        "measured": "2048", "steps": "2", "batch": "4", "followed": "256", "methods": "l1", "tokenizer": "",
        "measures": f"--text,{text},--max-tokens,1024", "key_dims": "7", "key_dim": "7", "rounds": "1", "hidden": "32",
        "recovery": recovery, "model_length": "64",
    }  # fmt: skip


OWN = {
    "pca-sharing": {"models": None, "methods": "pca-released,grad"},
    "filters": {"models": None},
    "spectra": {"methods": "drrqr,l1", "shown": "{out}/l1,{out}/drrqr-corrected"},
    "utilisation": {"methods": "random,l1", "shown": "{out}/random,{out}/l1"},
    "throughput": {"models": "delta_net-5m", "model_key_dims": "32", "gated_key_dims": "16", "key_dims": "32,16"},
}
RESULTS = {
    "pre-rft": [
        "delta_net-plain/sweep-published/sweep.md", "delta_net-plain/sweep-corrected/sweep.md",
        "delta_net-plain/l1-7-published.json", "delta_net-plain/l1-7-corrected.json", "report.html",
    ],
    "post-rft": [
        "delta_net-plain/l1-7-published-recovered/slimstate_recovery.json", "delta_net-plain/control.json",
        "delta_net-plain/l1-7-corrected.json", "report.html",
    ],
    "kq-ablation": ["delta_net-plain/published/ablation.tex", "delta_net-plain/corrected/ablation.tex", "report.html"],
    "pca-sharing": ["sweep-own-published/sweep.md", "sweep-head-corrected/sweep.md", "report.html"],
    "shared-convolutions": ["own/config.json", "all/config.json", "head.json", "report.html"],
    "pretraining": ["shape.json/model.safetensors"],
    "spectra": ["states", "drrqr-recovered/config.json", "report.html"],
    "utilisation": ["states", "report.html"],
    "filters": ["states", "report.html"],
    "throughput": ["mixer-64", "model", "gated"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("unrendered")
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


TABLES = """
title = "Two kinds of models"
about = "Nothing"
reproduces = ["tab:a", "fig:b"]
[paper]
models = ["{root}/plain", {model = "{root}/wide", key_dims = [5], more = ["--b", "{out}/x"]}]
key_dims = [1, 2]
more = []
[small]
[[steps]]
run = "prune {model} --key-dim {key_dim} --all {key_dims} {*more}"
each = {model = "models", key_dim = "key_dims"}
[[steps]]
run = "report {key_dims}"
"""


def test_a_member_that_is_a_table_brings_names_of_its_own(recipe, tmp_path):
    recipe.write_text(TABLES)
    found, root = Recipe.read(recipe), tmp_path / "home"
    assert found.reproduces == ("tab:a", "fig:b")
    wide = ["prune", f"{root}/wide", "--key-dim", "5", "--all", "5", "--b", "o/x"]
    assert found.commands("paper", Path("o")) == [
        ["prune", f"{root}/plain", "--key-dim", "1", "--all", "1,2"],
        ["prune", f"{root}/plain", "--key-dim", "2", "--all", "1,2"],
        wide,
        ["report", "1,2"],
    ]
    for name in ("wide", "{root}/wide"):  # a table is named by a text in it, or by the end of one
        chosen = found.commands("paper", Path("o"), {"models": f"{name}, other", "key_dims": "3"})
        assert chosen == [wide, ["prune", "other", "--key-dim", "3", "--all", "3"], ["report", "3"]]


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
    assert not any("--force" in words for words in seen)
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
    assert ["--force" in words for words in seen if words[0] == "prune"] == [True, False]


@pytest.mark.parametrize("verb", ["prune", "train", "eval"])
def test_a_recipe_replaces_only_what_it_wrote_itself(verb, recipe, tmp_path):
    """Stopped in a step, which it then does again; what others have put there is left alone, `--force` or not."""
    out, seen = tmp_path / "out", []
    place = out / "result"
    recipe.write_text(RECIPE.replace('run = "eval {model}"', f'run = "{verb} {{model}} --force --out {{out}}/result"'))

    def execute(words):
        seen.append(words)
        if words[0] == verb and words[-1] != "--again" and str(place) in words:
            place.mkdir(parents=True) if verb != "eval" else place.write_text("mine")
            raise SlimstateError("stopped after it had written")

    with pytest.raises(SlimstateError, match="stopped after"):
        run_recipe(Recipe.read(recipe), execute, out=out)
    for kind in ("folder", "file"):
        other = tmp_path / kind
        other.mkdir()
        (other / "result").mkdir() if kind == "folder" and verb != "eval" else (other / "result").write_text("theirs")
        with pytest.raises(OutputError, match="result is there, and this recipe did not write it"):
            run_recipe(Recipe.read(recipe), seen.append, out=other)
    seen.clear()
    run_recipe(Recipe.read(recipe), seen.append, out=out)
    again = next(words for words in seen if str(place) in words)
    assert again[again.index(str(place)) + 1 :] == {"prune": ["--force"], "train": ["--force", "--resume"]}.get(
        verb, []
    )


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
        ("report {out}", "report {out.x}", "KeyError 'out.x'"),
        ("report {out}", "report {out.__class__.__init__}", "KeyError"),
        ("report {out}", "report {out[x]}", "KeyError"),
        ("report {out}", "report {}", "KeyError '0'"),
        ("report {out}", "report {out:>99999999999}", "after a colon there is only `name`"),
        ("report {out}", "report {out!z}", "ValueError"),
        ("report {out}", "report {*out}", "out is no list of values"),
        ("report {out}", "report '", "No closing quotation"),
        ("report {out}", "", "`run` is a command, and not empty"),
        ("report {out}", "  ", "`run` is a command, and not empty"),
        ("report {out}", "''", "there is no command"),
        ("report {out}", "# report", "there is no command #"),
        ("report {out}", "reprot {out}", "there is no command reprot"),
        ("report {out}", "report", "Missing argument"),
        ("report {out}", "bench", "there is no command"),
        ("report {out}", "report --help", "it only shows help"),
        ("report {out}", "report {out} --quick", "No such option"),
        ("report {out}", "run recipes/toy.toml", "a step is one of the other commands"),
        ('"report {out}"', "5", "`run` is a command"),
        ('each = {method = "methods"}', "each = 5", "`each` is a table of names of lists, not 5"),
        ('each = {method = "methods"}', "each = {method = 5}", "`each` is a table of names of lists"),
        ('model = "{root}/a model"', 'model = "{rot}/a model"', "its values: KeyError 'rot'"),
        ('model = "{root}/a model"', 'model = "a\\u0000b"', "a word holds the character 0"),
    ],
)
def test_a_recipe_that_is_none_is_named(before, after, complaint, recipe):
    recipe.write_text(RECIPE.replace(before, after, 1))
    with pytest.raises((DataError, PlanError), match=complaint):
        check_words(COMMAND, Recipe.read(recipe).commands("paper", Path("o"))[-1])  # the others are of no verb


def test_bad_requests_are_refused(recipe, tmp_path, capsys, monkeypatch):
    with pytest.raises(PlanError, match=r"has no value modle; there are methods, model, many"):
        Recipe.read(recipe).commands("paper", Path("o"), {"modle": "x"})
    code, _, err = run(capsys, monkeypatch, "run", "pre-rft", "--set", "cuts=none", "--dry-run")
    assert (code, err) == (2, "slimstate: --set cuts=none: there is no none; there are published, corrected\n")
    code, _, err = run(capsys, monkeypatch, "run", recipe, "--set", "model")
    assert (code, err) == (2, "slimstate: --set model: give NAME=VALUE\n")
    code, out, _ = run(capsys, monkeypatch, "run", recipe, "--small", "--dry-run", "--out", "o")
    assert code == 0
    assert out.splitlines()[-1] == "slimstate report o"
    (tmp_path / PROGRESS).write_text("[]")
    with pytest.raises(DataError, match="does not say what was done"):
        run_recipe(Recipe.read(recipe), lambda words: None, out=tmp_path)
