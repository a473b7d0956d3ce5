"""Linear attention of fla: tiny models with every option, and the feature maps that cannot be cut."""

from __future__ import annotations

import pytest

from slimstate.families import family_of
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
    },
)


@pytest.mark.parametrize("feature_map", [None, "hedgehog", "t2r", "dpfp", "elementwise_product"])
def test_feature_maps_that_mix_channels_are_refused(feature_map):
    config = {"model_type": "linear_attn"} | ({} if feature_map is None else {"feature_map": feature_map})
    with pytest.raises(ModelError, match="mixes the channels"):
        family_of(config)
