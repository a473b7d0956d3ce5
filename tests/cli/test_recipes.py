"""Recipes: each is sound at both scales and runs at a toy scale; an interrupted one continues; mistakes are named."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import tiny
from places import ROOT
from slimstate.cli.app import COMMANDS, find_command
from slimstate.families import family_of
from slimstate.models.shapes import read_shape
from slimstate.models.stock import stock_model
from slimstate.records.provenance import RecipeRecord, command_line
from slimstate.system.errors import DataError, OutputError, PlanError, SlimstateError
from slimstate.workflows.run import PROGRESS, SCALES, Config, Recipe, run_recipe

RECIPES = {path.stem: path for path in sorted((ROOT / "recipes").glob("*.toml"))}
BY_NAME = {name: find_command(name) for name in COMMANDS}
# every label in the paper's source of a table or figure with results; fig:one is a drawing of the idea
LABELS = {
    "fig:histograms-main", "fig:rank-util-curve", "fig:histogram", "fig:histogram_pre_vs_post", "fig:filters_dn",
    "fig:filters_dn2", "tab:full_results_gdn_13B_paper", "tab:pre_rft_50_gated_only", "tab:mixer_scaling",
    "tab:shared-non-shared-comp-full", "table:adv_vs_non_adv", "tab:ablation_kq_targets", "tab:speedup_whole_model",
    "tab:unified_summary_50", "tab:zs-dn-370M", "tab:zs-dn-13B", "tab:zs-gdn-370M", "tab:zs-gdn-13B",
    "tab:recall-dn-370M", "tab:recall-dn-13B", "tab:recall-gdn-370M", "tab:recall-gdn-13B",
}  # fmt: skip
BEFORE_AND_AFTER = {"tab:unified_summary_50", *(f"tab:zs-{model}-{size}" for model in ("dn", "gdn") for size in ("370M", "13B"))}  # noqa: E501  # fmt: skip
DELTA_NETS = ("delta_net-370m", "delta_net-1.3B-100B")
GATED = ("gated_deltanet-370m", "1.3B-100B-GatedDeltaNet-pure")
KEY_DIMS = {name: {89, 76, 64, 32} if name in DELTA_NETS else {179, 153, 128, 64} for name in (*DELTA_NETS, *GATED)}
PUBLISHED = "--keep-norm-eps --rrqr-rows 5000 --rrqr-swaps 20 --special-tokens tokenizer"


def steps_of(recipe: str, command: str = "", scale: str = "paper", out: str = "out") -> list[Config]:
    configs = Recipe.read(RECIPES[recipe]).configs(scale, Path(out))
    return [config for config in configs if command in ("", config["command"])]


def test_every_table_and_figure_of_the_paper_is_reproduced_by_a_recipe():
    by_recipe = {name: {*Recipe.read(path).reproduces} for name, path in RECIPES.items()}
    assert set().union(*by_recipe.values()) == LABELS
    assert by_recipe["pre-rft"] & by_recipe["post-rft"] >= BEFORE_AND_AFTER  # columns before and after recovery


@pytest.mark.parametrize("name", RECIPES)
def test_every_value_at_the_scale_of_the_paper_names_its_source(name):
    """The source is a line of the paper, its released code, or a choice of ours."""
    text = RECIPES[name].read_text()
    lines = text[text.index("[paper]") : text.index("[small]")].splitlines()[1:]
    lines = [line for line in lines if line.strip() not in ("", "models = [", "cuts = [", "]")]
    silent = [line for line in lines if not re.search(r"# .*(L\d{3,4}|released|ours|all of it)", line)]
    assert {line.split(" = ")[0] for line in silent} <= {"variants", "shown"}


@pytest.mark.parametrize("name", ["pre-rft", "post-rft"])
def test_cuts_are_those_of_the_paper_and_ours_beside_them(name, execute):
    """Every model has its exact key dims, with norm_eps left alone and again with the correction."""
    cuts: dict[bool, dict[str, set[int]]] = {True: {}, False: {}}
    prunes = [config for config in steps_of(name, "prune") if not config.get("reconstruct")]
    assert {config["method"] for config in prunes} == {"random", "l1", "s-wanda", "grad", "drrqr"}
    for config in prunes:
        cuts[config.get("keep_norm_eps", False)].setdefault(Path(config["model"]).name, set()).add(config["key_dim"])
    assert cuts == {True: KEY_DIMS, False: KEY_DIMS}
    measured = [config["tasks"] for config in steps_of(name, "eval") if "reconstructed" not in config["out"]]
    assert {*measured} == {"paper"}
    assert len(measured) == len(prunes) + 4 * (1 if name == "pre-rft" else 2)  # and the uncut models, and the controls
    code, out, _ = execute("run", RECIPES[name], "--dry-run")
    lines = out.splitlines()
    assert (code, len(lines)) == (0, len(steps_of(name)))
    for model, key_dims in KEY_DIMS.items():
        for key_dim in key_dims:
            start = f"{model} --method drrqr --key-dim {key_dim} "
            assert any(start in line and line.endswith(PUBLISHED) for line in lines)


@pytest.mark.parametrize("shape", ["delta_net-370m", "delta_net-1.3b", "gated_deltanet-370m", "gated_deltanet-1.3b"])
def test_the_stock_class_has_the_key_dims_of_the_paper(shape):
    """Configs hold ratios: the key dims follow from them exactly, and the value dim stays."""
    config = read_shape(shape)
    family = family_of(config)
    before = family.mixers(config)[0]
    for key_dim in KEY_DIMS[DELTA_NETS[0] if shape.startswith("delta") else GATED[0]]:
        resized = family.resize(config, key_dim)
        mixer, model = family.mixers(resized)[0], stock_model({**resized, "num_hidden_layers": 1})
        assert (mixer.axis.width, mixer.value_dim) == (key_dim, before.value_dim)
        layer = model.get_submodule(mixer.path)
        assert layer.k_proj.weight.shape[0] == key_dim * mixer.axis.heads
        assert layer.v_proj.weight.shape[0] == before.value_dim * mixer.value_heads


def test_sweeps_trainings_and_timings_have_the_settings_of_the_paper():
    """Sweeps measure words at its key dims, with the correction and without it."""
    for name in ("pre-rft", "kq-ablation", "pca-sharing"):
        sweeps = steps_of(name, "sweep")
        assert {config["tasks"] for config in sweeps} == {"wikitext"}
        assert sum(config.get("keep_norm_eps", False) for config in sweeps) == len(sweeps) / 2
        for config in sweeps:
            assert {*config["key_dims"]} <= KEY_DIMS.get(Path(config["model"]).name, {32, 64})
            assert name != "pre-rft" or len(config["key_dims"]) == 4
    recoveries = steps_of("post-rft", "recover")
    assert {config["preset"] for config in recoveries} == {"paper"}
    assert {Path(config["teacher"]).name: config["grad_accum"] for config in recoveries}[GATED[1]] > 1
    trainings = steps_of("pretraining")
    assert [config["out"] for config in trainings] == [f"out/{name}" for name in (DELTA_NETS[0], GATED[0])]
    for config in trainings:
        sizes = tuple(config[name] for name in ("steps", "batch_size", "length"))
        assert sizes == (19_064, 256, 2048)
        assert (config["lr"], config["min_lr"], int(config["warm_up"] * config["steps"])) == (7e-4, 7e-5, 950)
        assert config["batch_size"] % config["grad_accum"] == 0
    *mixers, models, gated = steps_of("throughput")
    assert [(config["length"], config["no_gate"]) for config in mixers] == [(4096, True), (2048, True)]
    for config, width in ((models, 128), (gated, 256)):
        assert [config[name] for name in ("batch", "length", "modes")] == [32, 2048, "forward"]
        assert config["key_dims"] == ",".join(str(width // part) for part in (1, 2, 4, 8))


def texts_in(config: Config):
    for value in config.values():
        yield from (str(item) for item in (value if isinstance(value, list) else [value]))


def test_models_from_other_recipes_are_outputs_of_the_recipes_that_they_name():
    """And the 370M models are trained once."""
    built = {}
    for name in RECIPES:
        for config in steps_of(name, "train", out=str(ROOT / "build" / "recipes" / name)):
            built[config.pop("out")] = (name, command_line(config))
    assert len({training for _, training in built.values()}) == len(built) == 4
    for name in RECIPES:
        for config in steps_of(name):
            inputs = {text for text in texts_in(config) if text.startswith(str(ROOT / "build"))}
            assert inputs <= built.keys()
            assert all(built[text][0] != name for text in inputs)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", RECIPES)
def test_every_step_has_options_that_its_command_accepts_and_reads_what_was_written_before(name, scale):
    written: set[str] = set()
    for config in steps_of(name, scale=scale, out="/nowhere/out"):
        BY_NAME[config["command"]].parse(config)
        outputs = {config[key] for key in ("out", "control_out", "evidence") if key in config}
        for text in texts_in(config):
            inside = text.startswith("/nowhere/out/")
            assert not inside or text in outputs or str(Path(text).parent) in written or text in written, config
            assert "demo" not in Path(text).parts or Path(text).exists()
        written |= outputs


def toy_values(name: str, folders: dict[str, Path], text: str, root: Path) -> dict:
    """Return values for the names of a recipe that make it take seconds."""
    shape = str(tiny.write_shape(root / "shape.json", "delta_net"))
    models = {} if name in ("pca-sharing", "filters") else {"models": [str(folders[tiny.PLAIN[0]])]}
    training = {"preset": "paper", "steps": 2, "batch_size": 4, "length": 64, "report_to": "none"}
    values = {
        "model": str(folders[tiny.PLAIN[1]]), "shape": shape, "shapes": [shape], "data": text, "text": text,
        "samples": 2, "length": 64, "lengths": [64], "measured": 2048, "steps": 2, "batch": 4, "followed": 256,
        "methods": ["l1"], "tokenizer": {}, "measures": {"text": text, "max_tokens": 1024}, "key_dims": [7],
        "key_dim": 7, "rounds": 1, "hidden": 32, "recovery": training, "model_length": 64, "best": ["l1"],
        "reconstruction": {"reconstruct_steps": 2, "reconstruct_samples": 4, "reconstruct_length": 64}, **models,
    }  # fmt: skip
    return values | {
        "pca-sharing": {"methods": ["pca-released", "grad"]},
        "spectra": {"methods": ["drrqr", "l1"], "shown": ["{out}/l1", "{out}/drrqr-corrected"]},
        "utilisation": {"methods": ["random", "l1"], "shown": ["{out}/random", "{out}/l1"]},
        "throughput": {"models": "delta_net-5m", "model_key_dims": "32", "gated_key_dims": "16", "key_dims": "32,16"},
    }.get(name, {})  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_at_a_toy_scale(name, folders, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr("slimstate.reports.plots.style.svg", lambda figure, prefix: "<svg/>")  # painting takes seconds
    recipe, out = Recipe.read(RECIPES[name]), tmp_path / "out"
    names = recipe.values["paper"].keys() | recipe.values["small"].keys()
    values = toy_values(name, folders, str(text_file), tmp_path).items()
    toy = {**recipe.values["small"], **{key: value for key, value in values if key in names}}
    recipe = replace(recipe, values={**recipe.values, "small": toy})
    executed = []

    def execute(config: Config) -> None:
        executed.append(config)
        assert BY_NAME[config["command"]].execute(config) == 0

    for _ in range(2):  # all steps, then none
        executed.clear()
        run_recipe(recipe, execute, check=lambda step: BY_NAME[step["command"]].parse(step), scale="small", out=out)
        assert all(Path(config.get("out", out)).exists() for config in recipe.configs("small", out))
    assert executed == []


RECIPE = """
title = "A toy"
about = "Nothing"
reproduces = ["tab:a", "fig:b"]
[paper]
models = ["{root}/a model", {model = "{root}/wide", key_dims = [5], more = {data = "{out}/x"}}]
key_dims = [1, 2]
methods = ["l1", "drrqr"]
more = {}
head = ""
[small]
models = ["m"]
[[steps]]
command = "prune"
each = {model = "models", key_dim = "key_dims"}
model = "{model}"
key_dim = "{key_dim}"
options = ["{more}"]
evidence = "{head}"
out = "{out}/{model:name}-{key_dim}"
[[steps]]
only = "paper"
command = "sweep"
model = "x"
text = "t"
methods = ["{methods}", "grad"]
key_dims = "{key_dims}"
out = "{out}/sweep"
[[steps]]
command = "report"
folder = "{out}"
"""


@pytest.fixture
def recipe(tmp_path) -> Path:
    path = tmp_path / "home" / "recipes" / "toy.toml"
    path.parent.mkdir(parents=True)
    path.write_text(RECIPE)
    return path


def test_names_lists_tables_and_scales_become_configs(recipe, tmp_path):
    toy, root = Recipe.read(recipe), tmp_path / "home"
    assert toy.reproduces == ("tab:a", "fig:b")
    wide = {"command": "prune", "model": f"{root}/wide", "key_dim": 5, "out": "o/wide-5", "data": "o/x"}
    report = {"command": "report", "folder": "o"}
    assert toy.configs("paper", Path("o")) == [
        {"command": "prune", "model": f"{root}/a model", "key_dim": 1, "out": "o/a model-1"},
        {"command": "prune", "model": f"{root}/a model", "key_dim": 2, "out": "o/a model-2"},
        wide,
        {"command": "sweep", "model": "x", "text": "t", "methods": ["l1", "drrqr", "grad"], "key_dims": [1, 2],
         "out": "o/sweep"},
        report,
    ]  # fmt: skip
    for name in ("wide", "{root}/wide"):  # a table is named by a text in it, or by the last part of a path in it
        configs = toy.configs("paper", Path("o"), {"models": f"{name}, other", "key_dims": "3"})
        assert configs[:2] == [wide, {"command": "prune", "model": "other", "key_dim": 3, "out": "o/other-3"}]
    small = [{"command": "prune", "model": "m", "key_dim": key_dim, "out": f"o/m-{key_dim}"} for key_dim in (1, 2)]
    assert toy.configs("small", Path("o")) == [*small, report]


def test_an_interrupted_recipe_continues_where_it_was(recipe, tmp_path):
    toy, out, executed, errors = Recipe.read(recipe), tmp_path / "out", [], [SlimstateError("stopped")]

    def execute(config: Config) -> None:
        executed.append((config["command"], config.get("key_dim"), config.get("force", False)))
        if config["command"] == "sweep" and errors:
            raise errors.pop()
        if "out" in config:
            Path(config["out"]).mkdir(parents=True, exist_ok=True)

    def run_again(**changes: str) -> list[tuple[str, int | None, bool]]:
        executed.clear()
        record = run_recipe(toy, execute, out=out, changes=changes)
        assert RecipeRecord.read(out / PROGRESS) == record
        assert len(record.steps) == len(toy.configs("paper", out, changes))
        return executed

    sweep, report = ("sweep", None, False), ("report", None, False)
    with pytest.raises(SlimstateError):
        run_again()
    assert executed == [("prune", 1, False), ("prune", 2, False), ("prune", 5, False), sweep]
    assert run_again() == [sweep, report]
    assert run_again() == []
    (out / "a model-2").rmdir()
    assert run_again() == [("prune", 2, False), report]  # what was removed is written and reported again
    assert run_again(methods="l1") == [sweep, report]
    (out / "wide-5").rename(out / "wide-6")
    again = run_again(methods="l1", models="a model", key_dims="2,7")
    assert again == [("prune", 2, True), ("prune", 7, False), sweep, report]


def test_what_reads_a_replaced_result_runs_again(recipe, tmp_path):
    steps = (
        ("recover", "m", "cut"), ("eval", "{out}/cut", "eval.json"), ("eval", "{out}/control", "control.json"),
        ("eval", "m", "other.json"),
    )  # fmt: skip
    lines = [
        f'[[steps]]\ncommand = "{command}"\nmodel = "{model}"\nout = "{{out}}/{out}"' for command, model, out in steps
    ]
    lines[0] += '\nkey_dim = "{key}"\ncontrol_out = "{out}/control"'
    recipe.write_text('title = "A toy"\nabout = ""\n[paper]\nkey = 64\n[small]\n' + "\n".join(lines))
    executed = []

    def execute(config: Config) -> None:
        executed.append(Path(config["out"]).name)
        Path(config["out"]).parent.mkdir(exist_ok=True)
        Path(config["out"]).write_text("content")

    for key in ("64", "96"):
        executed.clear()
        run_recipe(Recipe.read(recipe), execute, out=tmp_path / "out", changes={"key": key})
    assert executed == ["cut", "eval.json", "control.json"]


@pytest.mark.parametrize("command", ["prune", "train", "eval"])
def test_a_recipe_replaces_only_what_it_wrote_itself(command, recipe, tmp_path):
    """Interrupted in a step, it repeats the step; other files in its place are left alone."""
    out, executed = tmp_path / "out", []
    text = RECIPE.replace('command = "sweep"', f'command = "{command}"')
    recipe.write_text(text.replace("{out}/sweep", "{out}/result"))

    def write(place: Path, is_folder: bool) -> None:
        place.parent.mkdir(exist_ok=True)
        place.mkdir() if is_folder else place.write_text("content")

    def execute(config: Config) -> None:
        if config.get("out") == str(out / "result"):
            write(out / "result", command != "eval")
            raise SlimstateError("stopped after it had written")

    with pytest.raises(SlimstateError, match="stopped after"):
        run_recipe(Recipe.read(recipe), execute, out=out)
    for kind in ("folder", "file"):
        write(tmp_path / kind / "result", kind == "folder" and command != "eval")
        with pytest.raises(OutputError, match="result exists and was not written by this recipe"):
            run_recipe(Recipe.read(recipe), lambda config: None, out=tmp_path / kind)
    run_recipe(Recipe.read(recipe), executed.append, out=out)
    again = next(config for config in executed if config.get("out") == str(out / "result"))
    expected = {"prune": {"force": True}, "train": {"force": True, "resume": True}, "eval": {}}[command]
    assert {name: again[name] for name in ("force", "resume") if name in again} == expected


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("title", "titel", "a recipe has no titel"),
        ("[small]", "[tiny]", "a recipe has no tiny"),
        ('title = "A toy"', "title = ", "is not TOML"),
        ('"{more}"', '"{lots}"', "KeyError 'lots'"),
        ('"{more}"', '"{key_dims}"', "`options` must name tables"),
        ('key_dim = "key_dims"}', 'key_dim = "head"}', "head is not a list of values"),
        ('only = "paper"', 'only = "toy"', "`only` must be one of paper, small"),
        ('command = "report"', 'command = ""', "a step must name a `command`"),
        ('command = "report"', "command = 5", "a step must name a `command`"),
        ('command = "report"', 'command = "run"', "a `command` other than run"),
        ('command = "report"', 'command = "reprot"', "unknown command reprot; there are inspect, prune"),
        ('folder = "{out}"', "folder = 5", "`folder` of report must be text, got 5"),
        ('folder = "{out}"', "", "report needs `folder`"),
        ('folder = "{out}"', 'folder = "{out}"\nquickly = true', "unknown option quickly"),
        ('"{out}"', '"{out.x}"', "KeyError 'out.x'"),
        ('"{out}"', '"{out.__class__.__init__}"', "KeyError"),
        ('"{out}"', '"{out[x]}"', "KeyError"),
        ('"{out}"', '"{}"', "KeyError"),
        ('"{out}"', '"{out:>99999999999}"', "only `name` may follow a colon"),
        ('"{out}"', '"{out!z}"', "ValueError"),
        ('each = {model = "models", key_dim', "each = 5 # ", "`each` must be a table of names of lists, got 5"),
        ('each = {model = "models", key_dim', "each = {model = 5} # ", "`each` must be a table of names of lists"),
        ('"{root}/a model"', '"{rot}/a model"', "its values: KeyError 'rot'"),
    ],
)
def test_mistakes_in_a_recipe_are_named_before_any_step_runs(before, after, message, recipe, refusal):
    recipe.write_text(RECIPE.replace(before, after, 1))
    assert message in refusal("run", recipe, "--out", recipe.parent / "out")
    assert not (recipe.parent / "out").exists()


def test_bad_requests_are_refused(recipe, tmp_path, execute, refusal):
    for words, line in (
        (("run", recipe, "--set", "modles=x"), f"{recipe} has no value modles; there are models, key_dims, methods"),
        (("run", recipe, "--set", "models"), "--set needs NAME=VALUE, got models"),
        (("run", recipe, "--set", "key_dims=1,x"), "--set key_dims: it must be a number, got x"),
        (("run", recipe, "--set", "more=x"), "--set more: it is a table of options; change the recipe"),
        (("run", "pre-rft", "--set", "cuts=none"), "--set cuts=none: there is no none; there are published, corrected"),
    ):
        assert refusal(*words, "--dry-run").startswith(line)
    code, out, _ = execute("run", recipe, "--small", "--dry-run", "--out", "o")
    assert (code, out.splitlines()[-1]) == (0, "slimstate report o")
    (tmp_path / PROGRESS).write_text("[]")
    with pytest.raises(DataError, match="is not the progress of a recipe"):
        run_recipe(Recipe.read(recipe), lambda config: None, out=tmp_path)
    with pytest.raises(PlanError, match="needs `model`"):
        BY_NAME["prune"].parse({"command": "prune"})
