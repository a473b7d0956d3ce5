"""FP8 as transformers and Qwen publish it: a scale for each block of 128 x 128, or one for the tensor."""

from slimstate.checkpoints.formats.contract import SCALES, Format, Settings, Storage


class Fp8(Format):
    def block(self, settings: Settings) -> tuple[int, int] | None:
        size = settings.get("weight_block_size", [128, 128])
        if isinstance(size, list) and len(size) == 2 and all(type(number) is int and number > 0 for number in size):
            return size[0], size[1]
        return None


FORMATS = (
    Fp8(
        method="fp8",
        storages=(
            Storage(
                name="FP8", dtypes=("F8_E4M3",), scales={"weight_scale_inv": SCALES},
                shared=("activation_scale", "input_scale"),
            ),
        ),
        unquantised="modules_to_not_convert",
    ),
)  # fmt: skip
