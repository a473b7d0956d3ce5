"""How many sequences fit into the memory that an engine has for states and caches, at every key dim."""

from __future__ import annotations

from typing import Annotated

from slimstate.records.base import Record
from slimstate.records.schema import NON_EMPTY, Count, Value, Whole


class Pages(Value):
    """Bytes of a layer on one GPU: a state, its convolution, and a token of softmax attention.

    `block` tokens of softmax attention make a page, which also holds a state with its convolution; None for engines
    that store them apart.
    """

    state: Count
    convolution: Count
    token: Count
    block: Whole | None = None
    page: Count | None = None

    @property
    def padding(self) -> int | None:
        """Bytes of a page beyond the state it holds."""
        return None if self.page is None else self.page - self.state - self.convolution


class Share(Value):
    """Bytes of one sequence on one GPU: its states in all layers, and its keys and values."""

    states: Count
    attention: Count

    @property
    def total(self) -> int:
        return self.states + self.attention


class PoolRow(Value):
    """The number of sequences at a key dim that run at once and, with prefix caching, that stay in the cache."""

    key_dim: Whole
    pages: Pages
    share: Share
    sequences: float
    cached: float | None = None
    gain: float | None = None  # times the sequences of the uncut model
    limit: str | None = None  # what runs out first, states or attention, where they are apart


class PoolRecord(Record):
    KIND = "pool"

    model: str
    model_type: str
    engine: str
    memory_bytes: Whole
    context: Whole
    prefix_caching: bool
    tensor_parallel: Whole
    state_dtype: str
    kv_dtype: str
    speculative_tokens: Count
    linear_layers: Whole
    softmax_layers: Count
    key_dim: Whole
    rows: Annotated[tuple[PoolRow, ...], NON_EMPTY]
