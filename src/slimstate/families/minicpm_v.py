"""MiniCPM-V 4.6 and 4.7 and MiniCPM-OCR: vision-language models around a Qwen3.5, which has a model type of its own."""

from slimstate.families.gated_delta_hybrid import DEFAULTS, GatedDeltaHybrid
from slimstate.families.qwen3_5 import STOCK, side_by_side

FAMILIES = tuple(
    GatedDeltaHybrid(
        model_type=name,
        module="qwen3_5",
        layout=side_by_side,
        defaults={**DEFAULTS, **STOCK["qwen3_5"]},
        nested=True,
        language="qwen3_5_text",
    )
    for name in ("minicpmv4_6", "minicpmv4_7", "minicpm_ocr")
)
