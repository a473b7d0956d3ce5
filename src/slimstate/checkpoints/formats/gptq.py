"""GPTQ: words of inputs in columns of output rows, zero points with several rows in a word."""

from slimstate.checkpoints.formats.contract import Format, Storage
from slimstate.checkpoints.safetensors_io import FLOATS

STORAGES = (
    Storage(
        name="GPTQ", weight="qweight", dtypes=("I32",), bits=(2, 4, 8), dim=1, scales={"scales": FLOATS},
        zeros="qzeros", shared=("g_idx",),
    ),
)  # fmt: skip
FORMATS = (Format(method="gptq", storages=STORAGES, required={"checkpoint_format": ("gptq", "gptq_v2")}),)
