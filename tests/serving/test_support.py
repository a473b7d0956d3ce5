"""Rules about families and engines are consistent, and every place that shows them applies them."""

import json

import pytest

import slimstate
import tiny
from places import ROOT
from slimstate.families import FAMILIES
from slimstate.families.contract import NOT_NEEDED
from slimstate.serving import engines
from slimstate.serving.engines import ServedModel, rules_for, warning
from slimstate.system.errors import PlanError

EXACTNESS = json.loads((ROOT / "docs" / "records" / "exactness.json").read_text())
WIDTHS = tuple(range(112, 0, -16))


def test_every_family_has_a_plain_tiny_model():
    assert FAMILIES.keys() == {tiny.VARIANTS[name].model_type for name in tiny.EVERY_PLAIN}


def test_measured_families_are_exact():
    assert EXACTNESS.keys() <= FAMILIES.keys()
    for name, measured in EXACTNESS.items():
        family = FAMILIES[name]
        exact, small = family.correction(family.stock_config) == NOT_NEEDED, 1e-3 if family.one_width else 1e-4
        assert measured.get("half", 0.0) <= (0 if exact else small)
        assert measured.get("third", 0.0) <= (0 if exact else 1e-3)
        assert measured.get("rescaled", 0.0) <= (0 if exact else small)
        # in Bamba other norms share the epsilon that a cut of values scales: the difference falls with it
        assert measured.get("values", 0.0) <= (1e-3 if name == "bamba" else 1e-4)
        assert measured.get("both", 0.0) <= 1e-3


def test_every_rule_is_about_known_families_and_names_its_evidence():
    for rule in engines.rule_book().rules:
        assert rule.when in engines.KEY_DIM_CONDITIONS
        assert rule.model is None or rule.model in engines.CONFIG_CONDITIONS
        assert rule.engine in engines.TITLES
        assert rule.version
        assert set(rule.model_types) <= FAMILIES.keys()
        assert rule.source.startswith(("slimstate ", "python benchmarks/")) == (rule.checked == "run")


def model(model_type: str, **changes: object) -> dict[str, object]:
    return {**FAMILIES[model_type].stock_config, "num_hidden_layers": 4, **changes}


def verdicts(model_type: str, key_dim: int, engine: str, **changes: object) -> set[str]:
    """Return what an engine does on any machine."""
    served = ServedModel.at_dims(model(model_type, **changes), key_dim)
    return {rule.verdict for rule in rules_for(served, engine) if rule.where is None}


def test_rules_depend_on_the_key_dim():
    at = {key_dim: rules_for(ServedModel.at_dims(model("qwen3_next"), key_dim)) for key_dim in (128, 96, 64)}
    assert not any(rule.is_failure for rule in at[128])
    assert ["triton" in (rule.advice or "") for rule in at[64]].count(True) == 1
    assert {rule.engine for rule in at[96] if rule.is_failure} == {"llama.cpp", "sglang"}
    assert {rule.engine for rule in at[64] if rule.is_failure} == {"llama.cpp"}
    assert rules_for(ServedModel.at_dims(model("delta_net"), 64)) == engines.rules_of("delta_net") == ()


def test_rules_depend_on_the_config():
    for engine, several in (("llama.cpp", "agrees"), ("vllm", "agrees"), ("mlx", "differs")):
        assert verdicts("mamba2", 64, engine, n_groups=2) == {several}
        assert verdicts("mamba2", 64, engine, n_groups=1) == {"agrees"}
    assert verdicts("nemotron_h", 64, "mlx") == {"differs"}
    assert verdicts("nemotron_h", 64, "mlx", time_step_min=1e-9) == {"agrees"}
    assert verdicts("bamba", 64, "vllm") == {"not supported"}
    assert "not supported" not in verdicts("mamba2", 64, "sglang")


@pytest.mark.parametrize(("groups", "other"), [(1, "several groups"), (2, "one group")])
def test_each_engine_has_one_verdict_and_no_rule_about_other_models(groups, other):
    serving = engines.describe_serving(model("mamba2", n_groups=groups), None, WIDTHS)
    assert [line.partition(" ")[0].rstrip(":") for line in serving.verdicts] == [*engines.TITLES.values()]
    assert other not in {rule["model"] for rule in serving.rules}
    assert engines.describe_serving(model("mamba2", n_groups=groups), "mlx", WIDTHS).verdicts == serving.verdicts[1:2]
    assert ("differs" in serving.verdicts[1]) == (groups == 2)  # mlx-lm normalises groups together
    unknown = engines.describe_serving(model("delta_net"), None, WIDTHS).verdicts
    assert unknown == ("no engine was examined with delta_net",)


def test_rules_and_diagnostics_need_verbose(folders, execute):
    words = ("prune", folders["qwen3_next-plain"], "--method", "l1", "--key-dim", 16, "--dry-run", "--engine", "vllm")
    brief, full = (" ".join(execute(*words, *more)[1:]) for more in ((), ("-v",)))
    for word in ("kernels: none ran", "falls back"):
        assert word in full
        assert word not in brief
    assert brief.count("vLLM") == 1


@pytest.mark.parametrize(
    ("engine", "config", "safe", "fast"),
    [
        ("vllm", model("qwen3_next"), WIDTHS, None),
        ("sglang", model("qwen3_next"), (64, 32, 16), (64, 32)),  # a CPU needs a multiple of 32
        # with CUDA its projections are split without the kernel that needs a power of two
        ("sglang", model("qwen3_5"), WIDTHS, (64, 32)),
        ("llama.cpp", model("qwen3_next"), WIDTHS, None),  # with as many values
        ("mlx", model("mamba2", n_groups=1), (96, 64, 32), None),  # with Metal others may be wrong
        ("mlx", model("falcon_h1", mamba_n_groups=2), (), None),  # not examined with several groups
        ("vllm", model("falcon_h1", mamba_n_groups=2), (), None),
        ("llama.cpp", model("mamba2", n_groups=1), None, (96,)),
        ("vllm", model("delta_net"), (), None),
    ],
)
def test_safe_key_dims_were_seen_to_work_and_have_no_failure(engine, config, safe, fast):
    serving = engines.describe_serving(config, engine, WIDTHS)
    assert safe is None or serving.safe == safe
    assert fast is None or serving.fast == fast


def test_a_warning_needs_a_failure_in_every_engine_in_question():
    served = ServedModel.at_dims(model("qwen3_next"), 64)
    assert warning(served) is None  # mlx-lm runs it
    assert warning(served, "vllm") is None
    assert "llama.cpp" in str(warning(served, "llama.cpp"))
    assert warning(ServedModel.at_dims(model("qwen3_next")), "llama.cpp") is None
    nowhere = ServedModel.at_dims(model("bamba", attn_layer_indices=[1]), 64)
    assert "every engine" in str(warning(nowhere))


def test_inspect_lists_safe_key_dims_of_an_engine(folders, succeed):
    words = ("inspect", folders["qwen3_next-plain"], "--engine", "vllm")
    out = succeed(*words)
    assert "vLLM: safe key dim 16" in out
    assert "llama.cpp" not in out
    assert json.loads(succeed(*words, "--json"))["serving"]["safe"] == [16]


def test_key_dims_that_an_engine_was_not_run_at_or_that_need_more_values_are_not_safe():
    shape = {"linear_key_head_dim": 128, "linear_value_head_dim": 64}
    verdicts = engines.describe_serving(model("qwen3_next", **shape), None, (96, 77, 64, 48)).verdicts
    (vllm,) = (line for line in verdicts if line.startswith("vLLM"))
    assert "safe key dims 96, 64, 48;" in vllm
    (llama,) = (line for line in verdicts if line.startswith("llama.cpp"))
    assert "safe key dims 64, 48, with as many values" in llama


@pytest.mark.parametrize("way", ["--dry-run", "--plan-only"])
def test_prune_warns_before_it_works(way, folders, execute, refusal):
    command = ("prune", folders["qwen3_next-plain"], "--method", "l1", "--key-dim", 16, way)
    code, _, err = execute(*command, "--engine", "llama.cpp")
    assert code == 0
    assert "warning: at key dim 16 llama.cpp refuses the model" in " ".join(err.split())
    assert "warning" not in execute(*command)[2]
    assert "unknown --engine onnx" in refusal(*command, "--engine", "onnx")


def test_prune_keeps_equal_dims_for_an_engine_that_needs_them(folders, tmp_path):
    options = {"method": "l1", "value_method": "l1", "key_dim": 8}
    with pytest.raises(PlanError, match="`value_method` needs `value_dim`"):
        slimstate.prune(folders["qwen3_next-plain"], **options)
    cut = slimstate.prune(folders["qwen3_next-plain"], engine="llama.cpp", **options)
    assert (cut.key_dim, cut.value_dim) == (8, 8)


@pytest.mark.parametrize("name", ["qwen3_next-plain", "delta_net-plain"])
def test_cards_and_inspect_show_what_engines_do(name, folders, tmp_path, succeed):
    slimstate.prune(folders[name], tmp_path / "cut", method="l1", key_dim=16)
    card = (tmp_path / "cut" / "README.md").read_text()
    served = name == "qwen3_next-plain"
    assert ("--gdn-prefill-backend triton" in card) == served
    assert ("import fla" in card) != served
    assert "{" not in card.replace("{{", "")
    out = succeed("inspect", folders[name])
    assert ("triton" in out) == served
    assert ("no engine was examined" in out) != served
    *_, verdict = succeed("inspect", folders[name], "--engine", "vllm").splitlines()
    assert (verdict == "serving: vLLM was not examined with delta_net") != served
