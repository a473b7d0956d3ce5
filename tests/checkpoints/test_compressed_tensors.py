"""Models that llm-compressor quantises: the cut computes what its mask computes, and cutting and quantising commute.

`make engines-compressed` creates an environment with llm-compressor and ModelOpt, and runs this file in it.
"""

import pytest
import torch

import quantising
import slimstate
import tiny
from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.surgery import Cutter
from slimstate.models.hooks import masked
from slimstate.models.load import load
from slimstate.records.plan import read_plan_file
from slimstate.system.json_files import read_json, write_json
from tiny_model import GATED_DELTA_HYBRID, MIXTURE, VISION, Variant

compressor = pytest.importorskip("llmcompressor", reason="make engines-compressed installs llm-compressor")
pytestmark = pytest.mark.slow
SCHEMES = ("FP8_DYNAMIC", "W8A8", "W4A16", "W4A16_ASYM", "NVFP4A16", "MXFP4A16")
WIDTHS = (64, 96, 80)
# groups of inputs have up to 128; experts that are packed fail in transformers, cut or not
SIZES = {"hidden_size": 128, "num_experts_per_tok": None, "vocab_size": 272}
GATED = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 64, **SIZES}
MAMBA = {"mamba_d_state": 128, "mamba_n_heads": 16, "hidden_size": 128}
MAMBA |= {"num_local_experts": 0, "num_experts_per_tok": 0}
NEMOTRON = {"ssm_state_size": 128, "layers_block_type": ["mamba", "attention", "mlp", "mamba"], "hidden_size": 128}
MODELS = {
    "qwen3_next": {**MIXTURE, **GATED, "num_experts_per_tok": 2, "mlp_only_layers": [0, 1, 2]},
    "qwen3_5": {"text_config": {**GATED_DELTA_HYBRID, **GATED, "intermediate_size": 96}, "vision_config": VISION},
    "granitemoehybrid": {**tiny.VARIANTS["granitemoehybrid-plain"].options, **MAMBA},
    "nemotron_h": {**tiny.VARIANTS["nemotron_h-plain"].options, **NEMOTRON},
}
OTHERS = r"re:(?!.*(linear_attn\.in_proj_(qkv|qkvz|z)|(linear_attn|mamba|mixer)\.out_proj|(mamba|mixer)\.in_proj)$).*"


def quantise(model, scheme: str):
    """Quantise the projections of the mixers, and no activations, whose rounding would hide the cut."""
    out = model.with_name(f"{model.name}-{scheme}")
    compressor.model_free_ptq(str(model), str(out), scheme=scheme, ignore=[OTHERS], device="cpu")
    config = read_json(out / "config.json")
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = None
    write_json(out / "config.json", config)
    return out


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", MODELS)
def test_a_cut_computes_what_its_mask_computes(name, scheme, tmp_path):
    options = {key: value for key, value in MODELS[name].items() if value is not None}
    model = tiny.save(tiny.build(Variant(name, name, options)), tmp_path / "model")
    source, ids = quantise(model, scheme), tiny.token_ids(1, 40)
    runtime, checkpoint = load(source, device="cpu"), Checkpoint.open(source)
    mixers = checkpoint.mixers
    for mixer in mixers:
        weight = mixer.by_channel(mixer.key, runtime.model.get_parameter(mixer.running_name_of(mixer.key)).detach())
        rows = checkpoint.read_rows(mixer, mixer.key)
        torch.testing.assert_close(rows, weight, rtol=2**-8 if "NV" in scheme else 1e-6, atol=0)
    for width in WIDTHS:
        plain, out = tmp_path / f"plain-{width}", tmp_path / f"cut-{width}"
        slimstate.prune(model, plain, method="random", key_dim=width, progress=False)
        slimstate.prune(source, out, apply=plain, same_model=True, progress=False)
        with torch.inference_mode(), masked(runtime.model, mixers, read_plan_file(out).selections, rescaled=False):
            expected = runtime.model(input_ids=ids, use_cache=False).logits.double()
        with torch.inference_mode():
            logits = load(out, device="cpu").model(input_ids=ids, use_cache=False).logits.double()
        assert float((logits - expected).abs().max() / expected.std()) < 1e-4
        if scheme != "NVFP4A16":  # its scale of the whole tensor depends on the largest weight, which may be cut
            first, second = tiny.read_tensors(quantise(plain, scheme)), tiny.read_tensors(out)
            assert first.keys() == second.keys()
            for each, tensor in first.items():
                assert torch.equal(*(part.flatten().view(torch.uint8) for part in (tensor, second[each]))), each


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
@pytest.mark.parametrize("name", MODELS)
def test_rows_of_what_modelopt_writes_stand_for_the_same_numbers(name, algorithm, tmp_path):
    modelopt = pytest.importorskip("modelopt.torch.quantization"), pytest.importorskip("modelopt.torch.export")
    options = {key: value for key, value in MODELS[name].items() if value is not None}
    source, running = tmp_path / algorithm, tiny.build(Variant(name, name, options))
    settings = getattr(modelopt[0], f"{algorithm}_DEFAULT_CFG")
    oracle = quantising.SCHEMES[f"modelopt-{algorithm.lower()}"]
    running.config.architectures = [type(running).__name__]
    running = modelopt[0].quantize(running, settings, lambda each: each(input_ids=tiny.token_ids(1, 40)))
    modelopt[1].export_hf_checkpoint(running, export_dir=source)
    checkpoint, before = Checkpoint.open(source), tiny.read_tensors(source)
    for width in WIDTHS:
        plan = slimstate.prune(source, tmp_path / f"{width}", method="l1", key_dim=width, progress=False).plan
        after, cutter = tiny.read_tensors(tmp_path / f"{width}"), Cutter(checkpoint.mixers, plan.selections)
        for weight in (checkpoint.quantised[mixer.name_of(mixer.key)] for mixer in checkpoint.mixers):
            one, other = (oracle.values(quantising.parts_of(each, weight.module)) for each in (before, after))
            assert torch.equal(one[cutter.remaining_rows(weight.name, weight.shape[0])], other)
