"""One convolution filter for all channels of a head, or for all heads, of queries, of keys and of values.

The stock class has no such filters, so they are stored for every channel, and shared only in training: by a
parametrisation that spreads G filters over D channels, registered before training and removed before writing.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from slimstate.core.layout import Mixer
from slimstate.system.errors import ModelError


class SharedFilters(nn.Module):
    """G filters [G, 1, W] as the weight [D, 1, W] of a depthwise convolution, D / G neighbours to each."""

    def __init__(self, groups: int, channels: int) -> None:
        super().__init__()
        self.size = channels // groups

    def forward(self, filters: Tensor) -> Tensor:
        return filters.repeat_interleave(self.size, dim=0)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return the filter of the first channel of each group; all of a group are equal."""
        return weight[:: self.size].clone()


def share(model: Any, mixers: Iterable[Mixer], *, initial: bool = False) -> None:
    """Make mixers that share filters train one filter per group; unless `initial`, filters of a group must be equal."""
    convolutions = [(mixer, axis) for mixer in mixers if mixer.sharing is not None for _, axis in mixer.filters]
    for mixer, axis in convolutions:
        name = mixer.running_name_of(axis.slots[0]).rpartition(".")[0]
        module = model.get_submodule(name)
        weight = module.weight.detach()
        shared = SharedFilters(axis.heads if mixer.sharing == "head" else 1, len(weight))
        if not initial and not bool((shared(shared.right_inverse(weight)) == weight).all()):
            raise ModelError(
                f"{name}: its channels should share a filter, as config.json says, and do not; "
                "remove shared_filters from its slimstate entry to train them apart"
            )
        parametrize.register_parametrization(module, "weight", shared)


def expand(model: nn.Module) -> None:
    """Restore the plain modules, in which every channel has its own copy of the filter it shares."""
    for module in model.modules():
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
