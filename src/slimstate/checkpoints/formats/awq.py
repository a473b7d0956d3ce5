"""AWQ: several output rows in a word, in an order of its own."""

from slimstate.checkpoints.formats.contract import Format, Storage
from slimstate.checkpoints.safetensors_io import FLOATS

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
STORAGES = (
    Storage(
        name="AWQ", weight="qweight", dtypes=("I32",), bits=(4,), dim=1, order=ORDER, scales={"scales": FLOATS},
        zeros="qzeros",
    ),
)  # fmt: skip
FORMATS = (Format(method="awq", storages=STORAGES, required={"version": ("gemm",)}),)
