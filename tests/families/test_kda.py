"""Kimi Delta Attention of fla: tiny models with every option."""

from tiny_model import BY_HEAD_DIM, WITH_SOFTMAX, variants

VARIANTS = variants(
    "kda",
    BY_HEAD_DIM,
    {
        "plain": {},
        "grouped-values": {"num_v_heads": 4},
        "bounded-gate": {"safe_gate": True, "lower_bound": -5.0, "allow_neg_eigval": True},
        "hybrid": {"attn": WITH_SOFTMAX, "num_hidden_layers": 3},
    },
)
