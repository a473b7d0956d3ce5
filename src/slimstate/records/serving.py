"""Serving: how much faster narrower layers are, how many sequences fit, and whether an engine computes the same."""

from collections.abc import Mapping
from typing import Annotated, Literal

from slimstate.records.base import Record
from slimstate.records.numbers import plural
from slimstate.records.parts import Model, Origin, Text
from slimstate.records.schema import NON_EMPTY, Count, Positive, Value, Whole

Verdict = Literal["agrees", "differs", "refuses"]
MEASURE = "largest difference of a token's log-probability from transformers', in standard deviations of the logits"
MASKED = (
    "largest difference of a token's log-probability from that of the uncut model with the dropped channels zeroed, in"
    " the same engine, in standard deviations of log-probabilities"
)


class LayerSpeed(Value):
    """How much faster a layer is at key dims below its width; where and how it was timed, and advice."""

    device: str
    kernels: str
    source: str
    advice: str
    speedups: Mapping[int, float]


class Gain(Value):
    """What half of the key dim gains at a context, estimated: numbers of the uncut model and of the cut."""

    context: Count  # 0 without KV caches: all are alike
    card: str
    key_dim: Whole
    state_dtype: str
    sequences: tuple[float, ...]
    tokens_per_second: tuple[float, ...]  # with as many sequences as fit
    state_share: float  # of states in a sequence of the uncut model


class Pages(Value):
    """Bytes of a layer on one GPU: a state, its convolution, and a token of softmax attention."""

    state: Count
    convolution: Count
    token: Count
    block: Whole | None = None  # tokens of attention in a page, which also holds a state; None if stored apart
    page: Count | None = None


class Share(Value):
    """Bytes of one sequence on one GPU: its states in all layers, and its keys and values."""

    states: Count
    attention: Count


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
    warning: str | None = None  # where the engine does not serve such a model

    def headline(self) -> str:
        cards = "" if self.tensor_parallel == 1 else f" on each of {self.tensor_parallel} GPUs"
        prefixes = ", prefix caching" if self.prefix_caching else ""
        layers = f"{plural(self.linear_layers, 'linear layer')}, {plural(self.softmax_layers, 'softmax layer')}"
        memory = (
            f"{self.engine}: {self.memory_bytes / 2**30:g} GiB for states and caches{cards}, sequences of"
            f" {self.context:,} tokens{prefixes}; states in {self.state_dtype}, keys and values in {self.kv_dtype}"
        )
        lines = (f"{self.model}: {self.model_type}, {layers}", self.warning, memory)
        return "\n".join(filter(None, lines))

    def table(self) -> list[dict[str, object]]:
        names = ("key_dim", "sequences", "gain", "cached", "limit")
        return [{name: getattr(row, name) for name in names} for row in self.rows]


class Differences(Value):
    """Differences of log-probabilities, in standard deviations of the logits; None is NaN or infinite."""

    prefill: float | None  # over the tokens of a text
    decoding: float | None  # over tokens that the engine generated with its cache
    same: Count  # of the `continued` tokens, those that were the first choice of transformers too
    continued: Count
    deviation: Positive  # of transformers' logits, in nats

    @property
    def largest(self) -> float | None:
        """The larger of both; None where one of them is."""
        return None if self.prefill is None or self.decoding is None else max(self.prefill, self.decoding)


class Outcome(Value):
    """The verdict on one model, with the differences, or with what the engine says where it refuses."""

    model: str
    verdict: Verdict
    words: str | None = None
    reason: str | None = None  # why the engine is known to refuse such models; the words may name another reason
    differences: Differences | None = None

    def __post_init__(self) -> None:
        if (self.verdict == "refuses") != (self.differences is None):
            raise ValueError("there must be differences unless the engine refuses the model")

    def describe(self) -> str:
        """Return the verdict and its reason in one line."""
        if (numbers := self.differences) is None:
            return f"refuses: {self.words}" + (f" (known of such models: {self.reason})" if self.reason else "")
        parts = f"prefill {_number(numbers.prefill)}, decoding {_number(numbers.decoding)}"
        greedy = f"{numbers.same} of {numbers.continued} greedy tokens the same"
        return f"{self.verdict}: largest difference {_number(numbers.largest)} ({parts}), {greedy}"


class VerificationRecord(Record, Model, Origin):
    """An engine compared with transformers, on a model and optionally on the model it was cut from."""

    KIND = "verification"

    engine: str
    engine_version: str | None = None
    text: Text | None = None
    dtype: str
    tolerance: Positive
    measure: str = MEASURE
    outcome: Outcome
    against: Outcome | None = None

    def headline(self) -> str:
        return f"{self.model}: {self.verdict}"

    @property
    def verdict(self) -> str:
        """What the engine does, in one line, and whether the cut is the cause."""
        version = f" {self.engine_version}" if self.engine_version else ""
        line = f"{self.engine}{version} {self.outcome.describe()}"
        if self.against is None:
            return line
        line = f"{line}; {self.against.model} beside it: {self.against.describe()}"
        if self.outcome.verdict == "agrees":
            return line
        alone = self.against.verdict != "agrees"
        return f"{line}: {'the engine does so by itself, without the cut' if alone else 'the cut breaks it there'}"


def _number(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.1e}"
