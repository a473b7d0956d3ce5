"""Linear attention of fla: tiny models with every option, and the feature maps that cannot be cut."""

import pytest

import slimstate
from slimstate.checkpoints.reader import Checkpoint
from slimstate.families import FAMILIES
from slimstate.system.errors import ModelError
from tiny_model import GROUPED, variants

VARIANTS = variants(
    "linear_attn",
    {"expand_k": 0.75, "feature_map": "relu"},
    {
        "plain": {},
        "grouped-keys": GROUPED,
        "elu": {"feature_map": "elu"},
        "normalised": {"norm_feature_map": True, "feature_map": "elu"},
        "hedgehog": {"feature_map": "hedgehog", "norm_q": True, "norm_k": True, **GROUPED},
        "product": {"feature_map": "elementwise_product"},
        "dpfp": {"feature_map": "dpfp", "norm_feature_map": True},
    },
)


def test_values_behind_a_feature_map_are_chosen_and_measured_on_text(folders, text_file, tmp_path):
    """The map makes two features of each key channel, which the state has and no selector sees."""
    model = folders["linear_attn-hedgehog"]
    text = {"data": text_file, "samples": 2, "length": 64, "evidence": tmp_path / "evidence.safetensors"}
    record = slimstate.prune(model, tmp_path / "cut", value_dim=8, **text)
    mixer = Checkpoint.open(model).mixers[0]
    assert record.state_bytes["after"]["fp32"] == 2 * 4 * mixer.value_heads * 2 * mixer.axis.width * 8
    assert record.plan.value_method == "energy"


@pytest.mark.parametrize("feature_map", [None, "hedgehog", "t2r", "dpfp", "elementwise_product"])
def test_keys_that_a_feature_map_mixes_are_not_cut(feature_map):
    config = {"model_type": "linear_attn"} | ({} if feature_map is None else {"feature_map": feature_map})
    family = FAMILIES["linear_attn"]
    with pytest.raises(ModelError, match=r"mixes the channels of a head.*cut its values with `value_dim`"):
        family.resize(config, 256)
    assert family.sizes(family.resize(config, 512, 256)).value_dim == 256
