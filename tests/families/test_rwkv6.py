"""RWKV-6 of fla: tiny models with every option, and the parameters that start as zeros."""

import torch
from torch import nn

from cases import cut
from slimstate.core.selection import Selection
from slimstate.families import FAMILIES
from slimstate.models.hooks import masked
from tiny_model import WITH_SOFTMAX, build, token_ids, variants

VARIANTS = variants(
    "rwkv6",
    {"expand_k": 0.75, "proj_low_rank_dim": 8, "gate_low_rank_dim": 8},
    {
        "plain": {},
        "wide-keys": {"expand_k": 1.0, "expand_v": 0.5},
        "unfused": {"fuse_norm": False, "fuse_cross_entropy": False, "norm_first": False},
        "no-norm-bias": {"norm_bias": False, "tie_word_embeddings": True},
        "hybrid": {"attn": WITH_SOFTMAX, "num_hidden_layers": 3},
    },
)


def test_bonuses_and_biases_are_cut_with_their_channels():
    """A model that was not trained has zeros there, whatever rows of them are kept."""
    model, ids = build(VARIANTS[0]), token_ids()
    for name, parameter in model.named_parameters():
        if name.endswith(("bonus", "lora.2.bias", "x_bias")):
            nn.init.normal_(parameter)
    config = model.config.to_dict()
    mixers = FAMILIES["rwkv6"].mixers(config)
    keep = {mixer.layer: Selection(keep=torch.tensor([[0, 3, 9, 22], [1, 2, 11, 17]])) for mixer in mixers}
    changes = {"expand_k": FAMILIES["rwkv6"].resize(config, 4)["expand_k"]}
    small = build(VARIANTS[0], **changes)
    small.load_state_dict(cut(model.state_dict(), mixers, keep))
    with torch.inference_mode():
        with masked(model, mixers, keep):
            expected = model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(small(input_ids=ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)
        assert (model(input_ids=ids, use_cache=False).logits - expected).abs().max() > 1e-2
