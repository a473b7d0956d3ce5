"""Comba of fla: tiny models with every option."""

from tiny_model import BY_HEAD_DIM, variants

VARIANTS = variants("comba", BY_HEAD_DIM, {"plain": {}, "grouped-values": {"num_v_heads": 4, "use_output_gate": False}})
