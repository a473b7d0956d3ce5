"""Estimate what half of the key dim gains in serving: how many sequences fit on GPUs, and how fast they decode.

A step of B sequences reads the weights once, of experts those that B tokens choose; it reads and writes every state and
reads every KV cache. The constants are fitted to the steps in docs/records/bench-decode*.json, 54 of DeltaNet and Gated
DeltaNet on an H200 as CUDA graphs: all are within 17 %, and speedups by half the key dim within 10 % from 16 sequences.
"""

from slimstate.families import Config, family_of
from slimstate.models.stock import routed_experts
from slimstate.records.cut import InspectionRecord
from slimstate.records.serving import Gain
from slimstate.system.value import Value

CARD, CARD_BYTES = "H200", int(0.9 * 140 * 2**30)  # what engines use of its memory
BANDWIDTH, STATE_SHARE = 4.2e12, 0.9  # bytes per second of a copy, and the share of it that states and caches reach
FLOPS, LAYER_SECONDS = 5e14, 5.5e-5  # per second, of products with weights; of a layer beside its bytes and products
NUMBER_BYTES = 2  # of weights and KV caches, in bfloat16
CONTEXTS = (4096, 32_768)


class Load(Value):
    """What a decoding step of a model reads and computes; `routed` parameters are in experts, tokens use a `share`."""

    parameters: int
    routed: int = 0
    share: float = 0.0
    layers: int
    state_bytes: int
    cards: int = 1

    def sequences(self, kv_bytes: int = 0) -> float:
        """Return how many sequences fit beside the weights, each with a KV cache of this size."""
        free = self.cards * CARD_BYTES - NUMBER_BYTES * self.parameters
        return free / (self.state_bytes + kv_bytes)

    def seconds(self, batch: float, kv_bytes: int = 0) -> float:
        """Return the time of a step of `batch` sequences."""
        chosen, dense = 1 - (1 - self.share) ** batch, self.parameters - self.routed
        weights = NUMBER_BYTES * (dense + self.routed * chosen) / BANDWIDTH
        products = 2 * batch * (dense + self.routed * self.share) / FLOPS
        caches = batch * (2 * self.state_bytes + kv_bytes) / (STATE_SHARE * BANDWIDTH)
        return self.layers * LAYER_SECONDS + (max(weights, products) + caches) / self.cards


def estimate_gains(config: Config, record: InspectionRecord, dtype: str) -> tuple[Gain, ...]:
    """Return what half of the key dim gains at each context, with states in this type; nothing where sizes are unknown.

    The GPUs are as many, 1, 2, 4, ..., as leave a fifth of their memory to states and caches.
    """
    family = family_of(config)
    cut = min(record.options, key=lambda option: abs(2 * option.key_dim - record.key_dim), default=None)
    token, parameters = family.cached_per_token(config), record.parameters or 0
    if cut is None or token is None or not parameters:
        return ()
    (routed, share), cards = routed_experts(config), 1
    layers = len({mixer.layer for mixer in family.mixers(config)} | family.softmax_layers(config))
    while NUMBER_BYTES * parameters > 0.8 * cards * CARD_BYTES:
        cards *= 2

    loads = [
        Load(
            parameters=size.parameters or 0, routed=routed, share=share, layers=layers, cards=cards,
            state_bytes=size.state_bytes[dtype],
        )
        for size in (record, cut)
    ]  # fmt: skip

    def gain(context: int) -> Gain:
        kv_bytes = NUMBER_BYTES * (family.cached_numbers(config, context) or 0)
        counts = tuple(load.sequences(kv_bytes) for load in loads)
        speeds = tuple(count / load.seconds(count, kv_bytes) for count, load in zip(counts, loads, strict=True))
        return Gain(
            context=context, card=f"{cards} {CARD}", key_dim=cut.key_dim, state_dtype=dtype, sequences=counts,
            tokens_per_second=speeds, state_share=1 / (1 + kv_bytes / loads[0].state_bytes),
        )  # fmt: skip

    return tuple(map(gain, CONTEXTS if token else (0,)))
