"""How many sequences fit into the memory that an engine has for states and caches, at every key dim, with the parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from slimstate.records.base import Record
from slimstate.records.schema import NON_EMPTY, Count, Whole


@dataclass(frozen=True, kw_only=True)
class Pages:
    """What a layer keeps on one GPU, in bytes: a state, what its convolution keeps, and a token of softmax attention.

    `block` tokens of softmax attention are one page, as large as a state with its convolution or a little larger;
    None where an engine does not tie the two together.
    """

    state: Count
    convolution: Count
    token: Count
    block: Whole | None = None
    page: Count | None = None

    @property
    def filling(self) -> int | None:
        """What a page has more than the state that it is for."""
        return None if self.page is None else self.page - self.state - self.convolution


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one sequence takes on one GPU, in bytes: its states in all layers, and its keys and values."""

    states: Count
    attention: Count

    @property
    def total(self) -> int:
        return self.states + self.attention


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """One key dim: how many sequences run at once, and with prefix caching how many can be kept whole."""

    key_dim: Whole
    pages: Pages
    share: Share
    sequences: float
    kept: float | None = None
    gain: float | None = None  # times the sequences of the uncut model
    limit: str | None = None  # what runs out first, where the two have memory of their own


@dataclass(frozen=True, kw_only=True)
class PoolRecord(Record):
    KIND: ClassVar[str] = "pool"

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
    rows: Annotated[tuple[Fitting, ...], NON_EMPTY]
