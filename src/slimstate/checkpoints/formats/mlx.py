"""MLX: words of inputs, with scales and, unless they are floats, offsets of groups; read by mlx alone."""

from slimstate.checkpoints.formats.contract import Format, Storage
from slimstate.checkpoints.safetensors_io import FLOATS

STORAGES = (
    Storage(
        name="MLX", dtypes=("U32",), bits=(2, 3, 4, 5, 6, 8), scales={"scales": (*FLOATS, "U8")},
        optional={"biases": FLOATS},
    ),
)  # fmt: skip
FORMATS = (Format(method="mlx", storages=STORAGES, in_transformers=False),)
