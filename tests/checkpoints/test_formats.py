"""Quantised checkpoints: rows of the cut stand for the same numbers as rows of the original, in every format."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

import slimstate
import tiny
from cases import cut
from fuzz.verdicts import difference
from quantising import SCHEMES, parts_of, quantise
from slimstate.checkpoints.reader import Checkpoint
from slimstate.checkpoints.tensor_cut import TensorMask
from slimstate.core.file_names import PLAN
from slimstate.core.surgery import Cutter, outline
from slimstate.models.hooks import masked
from slimstate.records.plan import Plan
from slimstate.system.errors import ModelError, PlanError
from slimstate.system.json_files import read_json, write_json

MODELS = ("qwen3_next-plain", "qwen3_5-plain", "granitemoehybrid-plain", "nemotron_h-plain")
DIM = 8


def is_projection(name: str) -> bool:
    return "in_proj" in name and name.endswith(("in_proj.weight", "qkvz.weight", "qkv.weight", "in_proj_z.weight"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("formats")
    return {name: tiny.save(tiny.build(tiny.VARIANTS[name]), root / name) for name in MODELS}


def stock_name(name: str) -> str:
    return name.replace("language_model.model.", "model.language_model.")


# other layouts of rows: in words, packed anew, in tensors that are renamed, and in blocks that are fused with others
OTHERS = ("ct-fp8", "ct-w4-asymmetric", "ct-nvfp4", "mlx-4", "modelopt-fp8", "gptq", "awq", "fp8-blocks")
CASES = [(MODELS[0], scheme) for scheme in SCHEMES] + [
    pytest.param(model, scheme, marks=pytest.mark.slow) for model in MODELS[1:] for scheme in OTHERS
]


@pytest.mark.parametrize(("model", "name"), CASES)
def test_rows_of_a_cut_stand_for_the_same_numbers(name, model, models, tmp_path, monkeypatch):
    scheme, source, out = SCHEMES[name], tmp_path / "quantised", tmp_path / "cut"
    if model != MODELS[0]:  # the stock shapes of one model are compared in every format
        monkeypatch.setattr("slimstate.workflows.prune.check_stock_shapes", lambda *_: None)
    modules = quantise(models[model], source, scheme, is_projection)
    plan = slimstate.prune(source, out, method="l1", key_dim=DIM, progress=False).plan
    before, after = (load_file(folder / "model.safetensors") for folder in (source, out))
    plain = {f"{stock_name(module)}.weight": scheme.values(parts_of(before, module)) for module in modules}
    mixers = Checkpoint.open(source).mixers
    slots = {f"{mixer.place_in_files}.{slot.parameter}" for mixer in mixers for slot in mixer.axis.slots}
    expected = cut(plain, Checkpoint.open(models[model]).mixers, plan.selections)
    for module in modules:
        parts, rows = parts_of(after, module), expected[f"{stock_name(module)}.weight"]
        dtypes = {part: tensor.dtype for part, tensor in parts_of(before, module).items()}
        if "blocks" in name:
            dtypes, values = {"weight": torch.bfloat16}, parts["weight"].float()
        else:
            values = scheme.values(parts)
        assert torch.equal(values, rows), module
        assert {part: tensor.dtype for part, tensor in parts.items()} == dtypes
    assert Checkpoint.open(out).mixers[0].axis.width == DIM  # and every tensor fits the config
    for each in before.keys() - slots:
        if each.rpartition(".")[0] not in modules:
            assert same_bytes(before[each], after[each]), each


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(*(each.contiguous().flatten().view(torch.uint8) for each in (one, other)))


def quantised(models: dict[str, Path], out: Path, scheme: str, model: str = MODELS[0], chosen=is_projection) -> Path:
    quantise(models[model], out, SCHEMES[scheme], chosen)
    return out


@pytest.mark.parametrize("scheme", ["gptq", "fp8-blocks"])
def test_a_checkpoint_with_plain_linear_attention_is_cut_as_any_other(scheme, models, tmp_path):
    """Whatever the rest is stored as: an unknown method, too, as nothing of it is touched."""
    source = quantised(models, tmp_path / "model", scheme, chosen=lambda name: "shared_expert.up_proj" in name)
    config = read_json(source / "config.json")
    config["quantization_config"]["quant_method"] = "of tomorrow"
    config["quantization_config"] |= {"weight": {"dtype": "fp4"}, "ignored_layers": ["lm_head"] * 2000}
    write_json(source / "config.json", config)
    for folder, out in ((source, "cut"), (models[MODELS[0]], "plain")):
        slimstate.prune(folder, tmp_path / out, method="l1", key_dim=DIM, progress=False)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "cut"))
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert same_bytes(tensor, plain[name] if "linear_attn" in name else before[name]), name
    assert read_json(tmp_path / "cut" / "config.json")["quantization_config"] == config["quantization_config"]


def damaged(folder: Path, changes, **settings) -> None:
    """Replace tensors of the first layer by other ones, or remove them; and change the settings in the config."""
    tensors, start = load_file(folder / "model.safetensors"), "model.layers.0.linear_attn.in_proj_qkvz."
    for part, change in changes.items():
        tensor = change(tensors.pop(start + part, None))
        tensors |= {} if tensor is None else {start + part: tensor.contiguous()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = read_json(folder / "config.json")
    config["quantization_config"] = {**config["quantization_config"], **settings}
    write_json(folder / "config.json", config)


BAD = {
    "unknown": ("gptq", {}, {"quant_method": "hqq"}, r"qkvz\.\w+ is quantised by hqq, which cannot be cut"),
    "layout": ("awq", {}, {"version": "gemv"}, "qkvz: awq with version gemv is not known; version must be gemm"),
    "checkpoint format": ("gptq", {}, {"checkpoint_format": "marlin"}, "checkpoint_format marlin is not known"),
    "mixed": ("ct-w4", {"qzeros": lambda _: torch.ones(2, 2)}, {}, "qkvz.qzeros does not belong to a weight in com"),
    "both": ("ct-w4", {"weight": lambda _: torch.ones(192, 64)}, {}, "qkvz.weight does not belong to a weight in com"),
    "no scale": ("ct-fp8", {"weight_scale": lambda _: None}, {}, "qkvz.weight_scale is missing, which compressed-tens"),
    "short scale": ("ct-fp8", {"weight_scale": lambda t: t[1:]}, {}, r"weight_scale is \[191, 1\] of BF16; compressed"),
    "scale of integers": ("gptq", {"scales": lambda t: t.int()}, {}, "qkvz.scales is .* of I32; GPTQ needs of F64"),
    "values": ("awq", {"qweight": lambda t: t[1:]}, {}, r"qweight is \[63, 24\] of I32; AWQ needs the values of a wei"),
    "zeros": ("gptq", {"qzeros": lambda t: t[:, 1:]}, {}, r"qzeros is \[4, 23\] of I32; GPTQ needs \[4, 24\] of I32"),
    "stated": ("ct-w4", {"weight_shape": lambda t: t + 1}, {}, r"weight_shape says \[193, 65\]; compressed-ten"),
    "nan": ("ct-fp8", {"weight": lambda t: torch.full_like(t, torch.nan)}, {}, "qkvz.weight holds NaN or infinite"),
    "blocks": ("fp8-blocks", {"weight_scale_inv": lambda t: t[1:]}, {}, r"scale_inv is \[11, 4\] of F32; FP8 needs"),
    "codes of blocks": ("fp8-blocks", {"weight_scale_inv": lambda t: t.byte()}, {}, "of U8; FP8 needs scales of bl"),
    "dtype": ("modelopt-nvfp4", {"weight": lambda t: t.to(torch.int16)}, {}, "weight of I16 is not known to the"),
    "rotated": ("ct-fp8", {}, {"transform_config": {"config_groups": {}}}, "with transform_config .* is not known"),
    "no zeros": ("awq", {"qzeros": lambda _: None}, {}, "qkvz.qzeros is missing, which AWQ needs"),
    "inputs": ("gptq", {"g_idx": lambda t: t[1:]}, {}, r"g_idx is \[63\] of I32; GPTQ needs \[64\] of I32 or I64"),
    "groups": ("gptq", {"g_idx": lambda t: t + 1}, {}, r"qkvz.g_idx must have groups from 0 to 3 \(GPTQ\)"),
    "factor": ("ct-nvfp4", {"weight_global_scale": lambda t: t.repeat(3)}, {}, "FP4 needs one number, or 64 there"),
    "no method": ("ct-fp8", {}, {"quant_method": None}, "a method without a name, which cannot be cut"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_a_format_is_refused_by_tensor_and_format(case, models, tmp_path, refusal):
    scheme, changes, settings, message = BAD[case]
    damaged(quantised(models, tmp_path / "model", scheme), changes, **settings)
    line = refusal("prune", tmp_path / "model", "--out", tmp_path / "cut", "--method", "l1", "--key-dim", DIM)
    assert re.search(message, line), line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize("scheme", ["gptq", "awq"])
def test_rows_that_do_not_fill_words_are_refused(scheme, models, tmp_path):
    source = quantised(models, tmp_path / "model", scheme)
    with pytest.raises(ModelError, match=r"has 8 rows in a word, and 116 rows would remain; choose another key dim"):
        slimstate.prune(source, tmp_path / "cut", method="random", key_dim=5)
    assert not (tmp_path / "cut").exists()


def test_weights_without_a_config_of_their_format_are_refused(models, tmp_path):
    source = quantised(models, tmp_path / "model", "ct-fp8")
    write_json(source / "config.json", {**read_json(source / "config.json"), "quantization_config": None})
    with pytest.raises(ModelError, match=r"qkvz.weight is of F8_E4M3, and config.json has no quantization_config"):
        _ = Checkpoint.open(source).mixers


def test_modelopt_may_describe_itself_in_a_file_of_its_own(models, tmp_path):
    source = quantised(models, tmp_path / "model", "modelopt-fp8")
    write_json(source / "config.json", {**read_json(source / "config.json"), "quantization_config": None})
    about = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    write_json(source / "hf_quant_config.json", about)
    slimstate.prune(source, tmp_path / "cut", method="random", key_dim=DIM)


def test_blocks_of_fp8_become_bfloat16_with_what_engines_fuse_with_them(models, tmp_path, succeed):
    """And transformers, which runs them on a CPU, computes with the cut what it computes with channels zeroed."""
    source = quantised(models, tmp_path / "model", "fp8-blocks", "qwen3_5-plain")
    tensors = load_file(source / "model.safetensors")  # with scales of powers of two, bfloat16 has the same values
    powers = {name: 2 ** tensor.log2().round() for name, tensor in tensors.items() if "scale_inv" in name}
    save_file(tensors | powers, source / "model.safetensors", {"format": "pt"})
    options = ("--method", "l1", "--key-dim", DIM, "--json")
    record = json.loads(succeed("prune", source, "--out", tmp_path / "cut", *options))
    assert "in_proj_qkv, in_proj_z: scales of 16 x 16 blocks cannot be cut" in record["dequantised"]
    plain = read_json(tmp_path / "cut" / "config.json")["quantization_config"]["modules_to_not_convert"]
    layers = [f"model.{root}layers.{layer}.linear_attn" for root in ("language_model.", "") for layer in (0, 2)]
    assert {f"{layer}.{name}" for layer in layers for name in ("in_proj_qkv", "in_proj_z")} <= {*plain}
    assert difference(source, tmp_path / "cut") is None


def test_a_cut_of_values_is_refused_where_the_output_projection_is_quantised(models, tmp_path):
    options = {"method": "random", "key_dim": DIM, "value_dim": 8, "value_method": "random", "progress": False}
    source = quantised(models, tmp_path / "outputs", "ct-fp8", chosen=lambda name: "out_proj.weight" in name)
    slimstate.prune(source, tmp_path / "keys", method="random", key_dim=DIM, progress=False)
    with pytest.raises(PlanError, match=r"out_proj.weight is quantised, and a cut of values takes columns"):
        slimstate.prune(source, tmp_path / "values", **options)
    slimstate.prune(quantised(models, tmp_path / "inputs", "ct-fp8"), tmp_path / "both", **options)
    scale = parts_of(load_file(tmp_path / "both" / "model.safetensors"), "model.layers.0.linear_attn.in_proj_qkvz")
    assert scale["weight_scale"].shape == (96, 1)


def test_a_plan_of_the_unquantised_model_is_applied_only_when_told_so(models, tmp_path, text_file, refusal, succeed):
    source, plain = quantised(models, tmp_path / "model", "awq"), tmp_path / "plain"
    slimstate.prune(models[MODELS[0]], plain, method="l1", key_dim=DIM, progress=False)
    line = refusal("prune", source, "--apply", plain, "--out", tmp_path / "cut")
    assert "is a plan for another model" in line
    assert line.endswith("use --same-model")
    succeed("prune", source, "--apply", plain, "--same-model", "--out", tmp_path / "cut")
    plan = Plan.read(tmp_path / "cut" / PLAN)
    assert plan.same_cut(Plan.read(plain / PLAN))
    assert (plan.model.source, plan.origin.source) == (str(source), str(models[MODELS[0]]))
    line = refusal("prune", source, "--data", text_file, "--key-dim", DIM, "--out", tmp_path / "drrqr")
    assert "use the unquantised model, whose plan a cut takes with --apply and --same-model" in line
    other = refusal("prune", models[MODELS[1]], "--apply", plain, "--same-model", "--out", tmp_path / "other")
    assert "is a plan for a qwen3_next, the model is a qwen3_5" in other


@pytest.mark.parametrize("command", ["recover", "reconstruct", "sweep"])
def test_commands_that_need_plain_weights_refuse_quantised_ones(command, models, tmp_path, text_file, refusal):
    source, text = quantised(models, tmp_path / "model", "ct-fp8"), ["--text", text_file] * (command == "sweep")
    line = refusal(command, source, "--data", text_file, "--out", tmp_path / "out", *text)
    assert "is quantised (compressed-tensors) and cannot be" in line


def test_gptq_has_its_zero_points_and_groups_as_its_config_and_file_say(models, tmp_path):
    source = quantised(models, tmp_path / "model", "gptq")
    damaged(source, {"g_idx": lambda groups: groups.view(4, 16).T.flatten()}, checkpoint_format="gptq_v2")
    tensors = parts_of(load_file(source / "model.safetensors"), "model.layers.0.linear_attn.in_proj_qkvz")
    scale, checkpoint = tensors["scales"].float()[tensors["g_idx"].long()].T, Checkpoint.open(source)
    mixer = checkpoint.mixers[0]
    expected = mixer.by_channel(mixer.key, SCHEMES["gptq"].values(tensors) + scale)  # zero points are not less one
    torch.testing.assert_close(checkpoint.read_rows(mixer, mixer.key), expected)


@pytest.mark.parametrize("name", SCHEMES)
def test_values_are_read_and_zeroed_rows_are_zero_in_every_format(name, models, tmp_path):
    scheme = SCHEMES[name]
    checkpoint = Checkpoint.open(quantised(models, tmp_path / "model", name))
    cutter = outline(checkpoint.mixers, DIM)
    mask = TensorMask(checkpoint, cutter)
    before = load_file(tmp_path / "model" / "model.safetensors")
    after = {each: mask.apply(each, tensor) if mask.touches(each) else tensor for each, tensor in before.items()}
    for each in {mixer.name_of(slot) for mixer in checkpoint.mixers for slot in mixer.axis.slots}:
        module, pair = each.removesuffix(".weight"), (before, after)
        if "conv1d" in each:
            plain = [tensors[each].flatten(1) for tensors in pair]
        else:
            plain = [scheme.values(parts_of(tensors, module)) for tensors in pair]
            rows = checkpoint.quantised[each].dequantised(checkpoint.read, torch.arange(len(plain[0])))
            assert torch.equal(rows.bfloat16().float() if "blocks" in name else rows, plain[0]), each
        keep = cutter.remaining_rows(each, len(plain[0]))
        expected = torch.zeros_like(plain[0]).index_copy(0, keep, plain[0][keep])
        assert torch.equal(plain[1], expected), each


def test_cut_blocks_have_the_values_that_transformers_dequantises(models, tmp_path):
    """Bit for bit with any scales, and the cut computes what the dequantised model computes with channels zeroed."""
    source, out, ids = quantised(models, tmp_path / "model", "fp8-blocks"), tmp_path / "cut", tiny.token_ids(1, 40)
    selections = slimstate.prune(source, out, method="l1", key_dim=DIM, progress=False).plan.selections
    options = {"quantization_config": FineGrainedFP8Config(weight_block_size=(16, 16), dequantize=True)}
    options["rms_norm_eps"] = read_json(out / "config.json")["rms_norm_eps"]  # other norms share that of the cut
    stock = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, **options)
    cutter = Cutter(Checkpoint.open(source).mixers, selections)
    after = load_file(out / "model.safetensors")
    for name, weight in Checkpoint.open(source).quantised.items():
        assert torch.equal(after[name], stock.get_parameter(name)[cutter.remaining_rows(name, weight.shape[0])])
    with torch.inference_mode(), masked(stock.float(), Checkpoint.open(source).mixers, selections, rescaled=True):
        expected = stock(input_ids=ids, use_cache=False).logits
    with torch.inference_mode():
        loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16, **options).float()
        logits = loaded(input_ids=ids, use_cache=False).logits
    assert float((logits - expected).abs().max() / expected.std()) < 1e-4
