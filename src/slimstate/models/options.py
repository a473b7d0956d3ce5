"""Where a model runs, in which precision, and where its weights lie: options of every command that runs a model."""

import re
from typing import TYPE_CHECKING, Literal

from slimstate.system.errors import PlanError
from slimstate.system.options import Options

if TYPE_CHECKING:
    import torch

UNITS = {"": 1, "B": 1} | {
    f"{name}{end}": base**power for power, name in enumerate("KMGT", 1) for end, base in (("B", 1000), ("IB", 1024))
}
SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>B|[KMGT]i?B|)", re.IGNORECASE)


class RunOptions(Options):
    """Where the model runs"""

    device: Literal["cpu", "cuda"] | None = None
    """cpu or cuda; default: a GPU where there is one."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """float32, bfloat16 or float16; default: bfloat16 on a GPU, float32 on a CPU."""

    @property
    def place(self) -> "torch.device":
        """The device, or a `PlanError` where there is no such device."""
        from slimstate.models.devices import pick_device

        return pick_device(self.device)

    @property
    def precision(self) -> "torch.dtype":
        from slimstate.models.devices import pick_dtype

        return pick_dtype(self.dtype, self.place)

    @property
    def precision_name(self) -> str:
        return str(self.precision).removeprefix("torch.")


class LoadOptions(RunOptions):
    """Where the model runs, and where its weights lie"""

    device_map: Literal["auto"] | None = None
    """auto: run a model larger than the device, with its layers on GPUs, in host memory and on disk."""
    max_memory: str | None = None
    """Maximum memory for weights by device, such as 0=40GiB,cpu=100GiB."""

    def check(self) -> None:
        self.refuse(("max_memory",), "needs `device_map` auto", unless=self.device_map is not None)
        parse_limits(self.max_memory)


def parse_limits(text: str | None) -> dict[str, int] | None:
    """Return the maximum bytes on each GPU and in host memory, from `0=40GiB,cpu=100GiB`."""
    if text is None:
        return None
    limits = {}
    for part in text.split(","):
        place, _, size = map(str.strip, part.partition("="))
        match = SIZE.fullmatch(size)
        if match is None or not (place.isdigit() or place == "cpu"):
            raise PlanError(f"`max_memory` must be sizes such as 0=40GiB,cpu=100GiB, got {text}")
        limits[place] = int(float(match["number"]) * UNITS[match["unit"].upper()])
    return limits
