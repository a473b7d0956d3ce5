"""Parts that several kinds of records share: the model, the text, the origin."""

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from slimstate.core.standard_errors import ratio_residuals
from slimstate.core.stock_class import StockClass
from slimstate.records.provenance import command_line
from slimstate.records.schema import Count, Positive, Value, Whole


class Cut(Value):
    """The last cut of a model, from the `slimstate` entry of its config."""

    method: str
    key_dim: Whole
    width: Whole
    value_dim: Whole | None = None
    value_width: Whole | None = None
    value_method: str | None = None
    base_model: str | None = None
    base_fingerprint: str | None = None
    version: str | None = None
    score: str | None = None
    corrected: bool | None = None
    correction: str | None = None
    shared_filters: str | None = None
    history: tuple[Mapping[str, Any], ...] = ()  # earlier cuts
    reconstructed: tuple[Mapping[str, Any], ...] = ()
    recovered: tuple[Mapping[str, Any], ...] = ()  # later trainings

    def __str__(self) -> str:
        """Return what was cut, such as: key dim 64 to 32 by drrqr, value dim 64 to 48 by energy."""
        keys = f"key dim {self.width} to {self.key_dim} by {self.method}"
        values = f"value dim {self.value_width} to {self.value_dim} by {self.value_method}"
        return ", ".join([keys] * (self.key_dim < self.width or not self.value_dim) + [values] * bool(self.value_dim))


class TrainingEntry(Value):
    """A training in the config of a model."""

    tokens: Count


class ConfigEntry(Value):
    """The `slimstate` entry of a model's config: a cut, the trainings after it, and the history before it."""

    method: str | None = None
    key_dim: Whole | None = None
    width: Whole | None = None
    base_model: str | None = None
    base_fingerprint: str | None = None
    shared_filters: str | None = None
    trained: tuple[TrainingEntry, ...] = ()
    recovered: tuple[TrainingEntry, ...] = ()
    history: "tuple[ConfigEntry, ...]" = ()

    def __post_init__(self) -> None:
        if self.key_dim is not None and (self.width is None or self.method is None):
            raise ValueError("a cut must have a key_dim, a width and a method")


class Text(Value):
    """Windows of tokens and the text they came from; of the windows of a training, some are held out."""

    data: str | None = None
    documents: str | None = None  # how the text was split into documents
    special_tokens: str | None = None  # around each document
    rows: Count | None = None  # queries and keys that Gram matrices sum, if not all
    samples: Count | None = None
    length: Count | None = None
    windows: Count | None = None
    held_out: Count | None = None
    seed: int | None = None
    digest: str | None = None


class ReconstructionSettings(Value):
    """The windows of the text, and the steps of Adam over batches of them for every layer."""

    steps: Count
    batch: Whole
    samples: Whole
    length: Whole
    learning_rate: float | None  # None: every kind of layer has its own
    seed: int


class TextSizes(Value):
    """The tokens and bytes of windows, and, of WikiText, the words of the pages that lm-eval scores."""

    tokens: Count | None = None
    bytes: Count | None = None
    words: Count | None = None

    @property
    def counts(self) -> str | None:
        """The size of the text, or None where it is not known."""
        if self.tokens is None or self.bytes is None:
            return None
        words = "" if self.words is None else f"; word perplexity over {self.words:,} words"
        return f"{self.tokens:,} tokens, {self.bytes:,} bytes{words}"


class TextScores(TextSizes):
    """How well a text is predicted: bits per byte of UTF-8 and, of WikiText, lm-eval's perplexity per word."""

    word_perplexity: Positive | None = None
    bits_per_byte: float | None = None
    page_nats: tuple[float, ...] = ()  # of each page of WikiText
    page_words: tuple[Whole, ...] = ()

    @property
    def page_residuals(self) -> tuple[float, ...]:
        """By how much each page moves ln(word perplexity)."""
        return ratio_residuals(self.page_nats, self.page_words)


class Model(Value):
    """The model of a record."""

    name: str
    model: str
    fingerprint: str | None = None
    model_type: str | None = None
    key_dim: Count | None = None
    value_dim: Count | None = None
    cut: Cut | None = None
    loader: StockClass | None = None


class Origin(Value):
    """How a record was produced: the config of the run, the software, the kernels, the seed."""

    config: Mapping[str, Any] = field(default_factory=dict)
    command: str | None = None  # the config as a command line; a record without a config may hold it alone
    versions: Mapping[str, str] = field(default_factory=dict)
    kernels: str | None = None
    seed: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.config:
            object.__setattr__(self, "command", command_line(self.config))
