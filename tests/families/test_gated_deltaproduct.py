"""Gated DeltaProduct of fla: tiny models with every option."""

from tiny_model import BY_HEAD_DIM, variants

VARIANTS = variants(
    "gated_deltaproduct",
    {**BY_HEAD_DIM, "num_householder": 2},
    {
        "plain": {"use_forget_gate": True},
        "ungated": {"num_householder": 3, "use_output_gate": False, "allow_neg_eigval": True},
    },
)
