"""ModelOpt of NVIDIA: FP8 with a scale for the tensor or for each row, and NVFP4."""

from slimstate.checkpoints.formats.contract import SCALES, Format, Storage

STORAGES = (
    Storage(
        name="ModelOpt FP8", dtypes=("F8_E4M3",), scales={"weight_scale": SCALES},
        shared=("input_scale", "pre_quant_scale"),
    ),
    Storage(
        name="ModelOpt NVFP4", dtypes=("U8",), bits=(4,), scales={"weight_scale": ("F8_E4M3",)}, group=16,
        shared=("weight_scale_2", "input_scale", "pre_quant_scale"),
    ),
)  # fmt: skip
FORMATS = (Format(method="modelopt", storages=STORAGES, in_transformers=False),)
