"""GPTQ: words of inputs in columns of output rows, zero points with several rows in a word."""

from dataclasses import replace

from slimstate.checkpoints.formats.contract import Format, Module, QuantisedWeight, Settings, Storage
from slimstate.checkpoints.safetensors_io import FLOATS


class Gptq(Format):
    def read(self, module: Module, inputs: int, settings: Settings) -> QuantisedWeight:
        weight = super().read(module, inputs, settings)
        return replace(weight, zero=int(settings.get("checkpoint_format") != "gptq_v2"))  # zero points less one


STORAGES = (
    Storage(
        name="GPTQ", weight="qweight", dtypes=("I32",), bits=(2, 4, 8), dim=1, scales={"scales": FLOATS},
        zeros="qzeros", shared=("g_idx",),
    ),
)  # fmt: skip
FORMATS = (Gptq(method="gptq", storages=STORAGES, required={"checkpoint_format": ("gptq", "gptq_v2")}),)
