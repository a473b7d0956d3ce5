"""Production hybrids: fused rows, grouped heads, nested configs, and traps of their libraries."""

import json

import pytest
import torch
import torch.nn.functional as F

import slimstate
import tiny
from launching import Program
from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.file_names import PLAN
from slimstate.families import FAMILIES
from slimstate.families.refused import REFUSED
from slimstate.models.load import load
from slimstate.pruning.calibration import calibrate
from slimstate.records.plan import Plan
from slimstate.system.errors import ModelError

pytestmark = pytest.mark.slow
PLAIN_HYBRIDS = [name for name in tiny.EVERY_PLAIN if name in tiny.OF_TRANSFORMERS]
WITHOUT_FLA = """
import sys
sys.modules["fla"] = None
import slimstate
for model, out in zip(sys.argv[2::2], sys.argv[3::2]):
    slimstate.prune(model, out, method="grad", key_dim=8, data=sys.argv[1], samples=2, length=64)
"""
SWEPT = ["qwen3_next-plain", "olmo_hybrid-plain", "mamba2-plain", "nemotron_h-plain", "comba-plain"]


@pytest.mark.parametrize("name", PLAIN_HYBRIDS)
def test_the_gradient_of_a_channel_is_what_its_rows_do_to_the_loss(name, folders):
    """Wherever its rows lie: a small change of them changes the loss by as much as the evidence says."""
    checkpoint, runtime = Checkpoint.open(folders[name]), load(folders[name], device="cpu")
    ids = tiny.token_ids(1, 40)
    evidence = calibrate(runtime, checkpoint.mixers, ids, frozenset({"gradient"}))
    mixer, step = checkpoint.mixers[0], 3e-4

    def loss() -> float:
        with torch.no_grad():
            logits = runtime.model(input_ids=ids, use_cache=False).logits[0, :-1].double()
        return float(F.cross_entropy(logits, ids[0, 1:], reduction="sum"))

    sums = evidence[mixer.layer]
    for slot, gradient in ((mixer.query, sums.query_gradient), (mixer.key, sums.key_gradient)):
        assert gradient is not None
        head, channel = divmod(int(gradient.norm(dim=-1).argmax()), mixer.axis.width)
        slope = gradient[head, channel]
        row = int(mixer.axis.all_rows(slot)[0, head, channel])
        weight = runtime.model.get_parameter(mixer.running_name_of(slot))
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                weight[row] += sign * step * slope / slope.norm()
                losses.append(loss())
                weight[row] -= sign * step * slope / slope.norm()
        assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(float(slope.norm()), rel=0.05)


@pytest.mark.parametrize("name", PLAIN_HYBRIDS)
def test_a_cut_model_generates_with_a_cache_what_it_predicts_without(name, folders, tmp_path):
    slimstate.prune(folders[name], tmp_path / "cut", method="l1", key_dim=8)
    model = load(tmp_path / "cut", device="cpu").model
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        tokens = model.generate(tiny.token_ids(2, 20), max_new_tokens=10, do_sample=False)
        predicted = model(input_ids=tokens, use_cache=False).logits.argmax(-1)
    assert tokens.shape == (2, 30)
    assert torch.equal(predicted[:, 19:-1], tokens[:, 20:])


def test_vision_towers_experts_and_softmax_layers_are_not_cut(folders):
    for name in PLAIN_HYBRIDS:
        checkpoint = Checkpoint.open(folders[name])
        attention = () if checkpoint.family.one_width else ("self_attn",)  # there the name of linear layers, too
        for mixer in checkpoint.mixers:
            for slot in mixer.axis.slots:
                assert not any(word in mixer.name_of(slot) for word in ("visual", "expert", "mlp", *attention))


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("name", SWEPT)
def test_hybrids_are_swept_and_analyzed(name, folders, text_file, tmp_path):
    """A candidate of a sweep is a masked model, and measures as the cut model does."""
    swept = slimstate.sweep(
        folders[name], tmp_path / "sweep", text=text_file, data=text_file, samples=2, length=64, methods=["l1"],
        compressions=[0.4], text_length=64, max_tokens=512, device="cpu",
    )  # fmt: skip
    slimstate.prune(folders[name], tmp_path / "cut", method="l1", compression=0.4)
    measured = slimstate.evaluate(tmp_path / "cut", text_file, length=64, max_tokens=512, device="cpu")
    (row,) = (row for row in swept.rows if row.method == "l1")
    assert measured.perplexity == pytest.approx(row.perplexity, rel=1e-3)
    assert 0 < row.rank_utilisation <= 1
    options = {"length": 96, "every": 16, "skip": 16, "device": "cpu"}
    (analyzed,) = slimstate.analyze([folders[name]], text_file, tmp_path / "traces", **options).models
    assert 0 < analyzed.utilisation <= 1
    assert analyzed.violations == 0


def test_without_fla_the_same_channels_are_chosen(folders, text_file, tmp_path):
    """Transformers then has other kernels to choose from; on a CPU it must make no difference."""
    names = ("qwen3_next-plain", "mamba2-plain")
    places = [str(place) for name in names for place in (folders[name], tmp_path / name)]
    program, errors = tmp_path / "program.py", tmp_path / "errors"
    program.write_text(WITHOUT_FLA)
    assert Program(program, text_file, *places, err=errors, fla=False).wait() == 0, errors.read_text()
    for name in names:
        options = {"data": text_file, "samples": 2, "length": 64, "device": "cpu"}
        slimstate.prune(folders[name], tmp_path / f"{name}-with", method="grad", key_dim=8, **options)
        plans = [Plan.read(tmp_path / place / PLAN) for place in (name, f"{name}-with")]
        for layer, selection in plans[0].selections.items():
            assert torch.equal(selection.keep, plans[1].selections[layer].keep)


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_models_that_cannot_be_cut_are_refused_with_the_reason(model_type, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ModelError, match=model_type) as refusal:
        slimstate.inspect(tmp_path)
    assert REFUSED[model_type] in str(refusal.value)
    assert model_type not in FAMILIES


@pytest.mark.parametrize(("name", "config", "layers"), [
    ("qwen3_next", {"num_hidden_layers": 8}, [0, 1, 2, 4, 5, 6]),
    ("qwen3_next", {"num_hidden_layers": 4, "full_attention_interval": 2}, [0, 2]),
    ("olmo_hybrid", {"num_hidden_layers": 3}, [0, 1]),
    ("nemotron_h", {"hybrid_override_pattern": "M-M*E"}, [0, 2]),
    ("nemotron_h", {"layer_types": ["mamba", "mlp", "attention", "mamba"]}, [0, 3]),
    ("zamba2", {"layer_types": ["mamba", "hybrid", "mamba"], "num_hidden_layers": 3}, [0, 1, 2]),
    ("bamba", {"num_hidden_layers": 4, "attn_layer_indices": [2]}, [0, 1, 3]),
    ("granitemoehybrid", {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2}, [0]),
])  # fmt: skip
def test_old_and_short_lists_of_layers_are_read_as_the_stock_class_reads_them(name, config, layers):
    from slimstate.models.stock import stock_class

    family = FAMILIES[name]
    assert [mixer.layer for mixer in family.mixers({"model_type": name, **config})] == layers
    stock = stock_class(family)[0](**config)
    kinds = stock.layer_types if hasattr(stock, "layer_types") else stock.layers_block_type
    assert [layer for layer, kind in enumerate(kinds) if kind in ("linear_attention", "hybrid")] == layers
