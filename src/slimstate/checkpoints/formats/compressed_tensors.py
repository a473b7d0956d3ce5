"""compressed-tensors, which llm-compressor writes: FP8 and int8, int4 in words, NVFP4 and MXFP4, and FP8 in blocks."""

from collections.abc import Mapping

from slimstate.checkpoints.formats.contract import SCALES, Format, Settings, Storage
from slimstate.checkpoints.safetensors_io import FLOATS

INPUTS = ("input_scale", "input_zero_point", "input_global_scale", "weight_global_scale")


class CompressedTensors(Format):
    def block(self, settings: Settings) -> tuple[int, int] | None:
        for weights in _weights(settings):
            structure = weights.get("block_structure")
            if isinstance(structure, list) and len(structure) == 2 and all(type(n) is int and n > 0 for n in structure):
                return structure[0], structure[1]
        return None

    def bits(self, settings: Settings) -> int | None:
        whole = (weights.get("num_bits") for weights in _weights(settings) if weights.get("type") != "float")
        return super().bits({"bits": next(whole, None)})


def _weights(settings: Settings) -> list[Settings]:
    groups = settings.get("config_groups")
    each = groups.values() if isinstance(groups, Mapping) else ()
    weights = [group.get("weights") for group in each if isinstance(group, Mapping)]
    return [entry for entry in weights if isinstance(entry, Mapping)]


STORAGES = (
    Storage(
        name="compressed-tensors", dtypes=("F8_E4M3", "I8"), scales={"weight_scale": SCALES}, shared=INPUTS,
        optional={"weight_zero_point": ("I8", "F8_E4M3", *FLOATS)},
    ),
    Storage(
        name="compressed-tensors pack-quantized", weight="weight_packed", dtypes=("I32",), bits=(2, 3, 4, 5, 6, 7, 8),
        scales={"weight_scale": SCALES}, zeros="weight_zero_point", stated="weight_shape",
        shared=("weight_g_idx", *INPUTS),
    ),
    Storage(
        name="compressed-tensors FP4", weight="weight_packed", dtypes=("U8",), bits=(4,), shared=INPUTS,
        scales={"weight_scale": ("F8_E4M3", "F8_E8M0", "U8")},
    ),
)  # fmt: skip
REQUIRED = {"transform_config": ("{}", "none")}  # a transform may mix output rows
FORMATS = (CompressedTensors(method="compressed-tensors", storages=STORAGES, required=REQUIRED, unquantised="ignore"),)
