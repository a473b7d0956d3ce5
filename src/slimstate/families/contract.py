"""The interface of a family, and how a family corrects the query scale."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any, Literal

from slimstate.core.layout import Axis, HookPoint, Mixer, Slot
from slimstate.core.stock_class import StockClass
from slimstate.system.errors import ModelError, quoted
from slimstate.system.value import Value

Config = Mapping[str, Any]
EXACT_EPSILON, MAX_EPSILON = 1e-4, 1e-3  # after a cut: up to the first the cut is exact, above the second refused
MAX_CHANNELS = 2**31  # of all heads of a layer
Library = Literal["fla", "transformers"]


class Correction(Value):
    """What makes the output of a cut layer equal to its output with the dropped channels zeroed.

    Layers scale queries by d_k^-0.5, so a cut multiplies what they read from the state by s = sqrt(width / key dim).
    After that comes a norm, and s o / sqrt(s^2 mean(o^2) + s^2 eps) = o / sqrt(mean(o^2) + eps): an `epsilon` (the
    config field) s^2 times as large cancels s. Trained models have mean(o^2) well below eps, so without it the output
    of the layer would be larger. The other norms share the epsilon, but their inputs are a thousand times its size or
    more: with an epsilon e after the cut, logits are off by about e standard deviations.
    If only linear maps lie before the state, 1/s is `folded` into the query rows instead.
    """

    why: str  # what it does, or why nothing is done
    epsilon: str | None = None  # the config field of the norm's epsilon: "norm_eps"
    folded: bool = False  # whether 1/s goes into the query rows, those of a slot with a `scale_power`

    @property
    def possible(self) -> bool:
        """Whether a cut can correct the query scale, by an epsilon or in the query rows."""
        return self.epsilon is not None or self.folded

    def describe(
        self, width: int, key_dim: int, corrected: bool, rotated: bool = False, epsilon: float | None = None
    ) -> str:
        """Return a sentence on the correction, for a cut that was `corrected` or not.

        A cut with `rotated` channels does not zero them. A large `epsilon` after the cut also affects other norms.
        """
        if not self.possible:
            return self.why
        if not corrected:
            return "not corrected; the cut zeroes the channels and uses the query scale of the new key dim"
        meaning = "" if rotated else ", so that cutting equals zeroing"
        if self.folded:
            return f"query weights times {(key_dim / width) ** 0.5:.4g} {self.why}{meaning}"
        if epsilon is not None and epsilon > EXACT_EPSILON:
            meaning = f"; not exact, because the other norms share an epsilon that is now {epsilon:.2g}"
        return f"{self.epsilon} times {width / key_dim:.4g} {self.why}{meaning}"


NORM_EPS = Correction(epsilon="norm_eps", why="compensates the new query scale")
RMS_NORM_EPS = replace(NORM_EPS, epsilon="rms_norm_eps")
FOLDED = Correction(folded=True, why="compensate the new query scale exactly")
NOT_NEEDED = Correction(why="these layers do not scale queries, so that cutting equals zeroing bit for bit")


class Sizes(Value):
    """The sizes of a linear-attention layer."""

    heads: int  # H, key heads
    width: int  # D, key channels of a head
    value_heads: int  # G, heads of the state, a multiple of the key heads
    value_dim: int  # V, value channels of a head
    input_size: int  # inputs of the projections, the hidden size

    def __post_init__(self) -> None:
        fewest, most = min(self.heads, self.width, self.value_heads, self.value_dim), max(self.keys, self.values)
        if fewest < 1 or most > MAX_CHANNELS or self.value_heads % self.heads:
            sizes = f"{self.heads} key heads of {self.width} and {self.value_heads} value heads of {self.value_dim}"
            rule = f"value heads must be a multiple of key heads, with 1 to {MAX_CHANNELS:,} channels"
            raise ModelError(f"config.json: {rule}, got {quoted(sizes)}")

    @property
    def keys(self) -> int:
        """The key channels of all heads."""
        return self.heads * self.width

    @property
    def values(self) -> int:
        """The value channels of all heads."""
        return self.value_heads * self.value_dim


class Caches(Value):
    """What an engine caches for a sequence: the sizes of states, of convolutions and of softmax layers."""

    sizes: Sizes  # the sizes of a linear-attention layer
    linear_layers: int  # the number of linear-attention layers
    softmax_layers: int  # the number of layers with softmax attention; one layer may have both
    taps: int  # taps of the convolution over queries, keys and values, all but one of which are cached
    kv_heads: int  # key and value heads of a softmax layer
    kv_dim: int  # their channels
    state_dtype: str | None = None  # the dtype of states in the config: "float32"; None if it has none
    repeated_keys: bool = False  # whether key heads are repeated if there are fewer than GPUs, as in Mamba-2
    stores_block_states: bool = False  # whether a prefill stores states at ends of blocks: one more in vLLM


class Family(Value, ABC):
    """An architecture: which of its configs can be cut, where their key channels live, what a cut does to a config.

    Architectures that differ only in names and rows are instances of one class.
    """

    model_type: str  # the `model_type` of its configs: "delta_net"
    library: Library = "transformers"  # the library that has its stock class
    defaults: Config  # the defaults of the stock config: {"num_heads": 16, "expand_k": 1.0}
    language: str | None = None  # the model type of the class that runs its language model, if another: "qwen3_5_text"
    # the part that only images need, if the class of everything in its files runs the language model: "model.visual"
    tower: str | None = None
    one_width: bool = False  # whether its configs have one width for keys and values
    nested: bool = False  # whether the config of the language model is under `text_config`
    # why its keys cannot be cut with any config: "it rotates them by frequencies that depend on the key dim"
    fixed_keys: str | None = None
    fixed_values: str | None = None  # why its values can never be cut: "its norm over values subtracts their mean"
    # which of its configs cannot be cut, and why: {"`norm_q`": "channels of a head are mixed"}
    refused: Mapping[str, str] = field(default_factory=dict)

    @abstractmethod
    def mixers(self, config: Config) -> tuple[Mixer, ...]:
        """Return every linear-attention layer of a model with this config."""

    @abstractmethod
    def softmax_layers(self, config: Config) -> frozenset[int]:
        """Return the layers with softmax attention, which a cut does not change."""

    @abstractmethod
    def correction(self, config: Config) -> Correction:
        """Return how a cut of such a model corrects the query scale."""

    @abstractmethod
    def sizes(self, config: Config) -> Sizes:
        """Return the sizes of every linear-attention layer."""

    @abstractmethod
    def fields_for(self, config: Config, sizes: Sizes) -> Config:
        """Return the config fields that give the same model other widths of keys and values, without its epsilon.

        Raise a `ModelError` if no config has such widths.
        """

    def one_dim(self, sizes: Sizes) -> int:
        """Return the one width of keys and values; refuse two."""
        if sizes.width != sizes.value_dim:
            raise ModelError(
                f"{self.model_type} has one width for keys and values, got key dim {sizes.width} and value dim"
                f" {sizes.value_dim}: use `state_dim`"
            )
        return sizes.width

    def resize(self, config: Config, key_dim: int, value_dim: int | None = None, *, corrected: bool = True) -> Config:
        """Return the config of the same model with `key_dim` and `value_dim` channels per head.

        `corrected` also changes what makes the output of layers equal to that with key channels zeroed; a cut of values
        always does so.
        """
        before = self.sizes(config)
        if key_dim != before.width and (reason := self.key_refusal(config)) is not None:
            raise ModelError(f"the keys of {self.model_type} cannot be cut: {reason}; cut its values with `value_dim`")
        other = key_dim if self.one_width else before.value_dim
        after = replace(before, width=key_dim, value_dim=other if value_dim is None else value_dim)
        fields = dict(self.fields_for(config, after))
        epsilons = [(self.correction(config).epsilon, before.width / after.width)] if corrected else []
        if after.value_dim != before.value_dim:
            epsilons.append((self.value_epsilon(config), before.value_dim / after.value_dim))
        for name, factor in epsilons:
            if name is not None:
                fields[name] = fields.get(name, float(self.with_defaults(config)[name])) * factor
        return self.changed(config, fields)

    def value_epsilon(self, config: Config) -> str | None:
        """Return the config field of the epsilon of the norm over values, which a cut of values changes, if any."""
        return self.correction(config).epsilon

    def describe_value_correction(self, config: Config, value_dim: int) -> str:
        """Return a sentence on what makes a cut of values equal to zeroing them."""
        name, axis = self.value_epsilon(config), self.mixers(config)[0].value_axis
        if axis is None or not any(slot.scale_power for slot in axis.slots):
            return "no norm follows the values, so that cutting them equals zeroing"
        factor = f"{name} times {self.sizes(config).value_dim / value_dim:.4g} and " if name else ""
        return f"{factor}output weights compensate the norm over fewer values, so that cutting them equals zeroing"

    def key_refusal(self, config: Config) -> str | None:
        """Return why the keys of a model with this config cannot be cut, or None if they can."""
        return self.fixed_keys

    def value_refusal(self, config: Config) -> str | None:
        """Return why the values of a model with this config cannot be cut, or None if they can."""
        return self.fixed_values

    def changed(self, config: Config, fields: Config) -> Config:
        """Return the config with other values of some fields of the language model."""
        return {**config, "text_config": {**config["text_config"], **fields}} if self.nested else {**config, **fields}

    def language_config(self, config: Config) -> Config:
        """Return the part of a config that describes the language model."""
        text = config.get("text_config") if self.nested else config
        if not isinstance(text, Mapping):
            raise ModelError(f"config.json of {self.model_type} has no text_config with its language model")
        return text

    def with_defaults(self, config: Config) -> Config:
        """Return the config of the language model with its defaults."""
        return {**self.defaults, **self.language_config(config)}

    def epsilon(self, config: Config) -> float | None:
        """Return the norm epsilon that a cut changes to correct the query scale, or None."""
        name = self.correction(config).epsilon
        return None if name is None else float(self.with_defaults(config)[name])

    def published(self, config: Config) -> Config:
        """Return fields that published checkpoints have and configs of transformers 5 express in another way.

        Such are those of the rotary embedding, from a `rope_parameters` that is the same for all layers.
        """
        nested, names = config.get("rope_parameters"), ("rope_theta", "partial_rotary_factor")
        rope = nested if isinstance(nested, Mapping) else {}
        return {name: rope[name] for name in names if isinstance(rope.get(name), (int, float))}

    def caches(self, config: Config) -> Caches | None:
        """Return what an engine caches for a sequence, or None for families that no such engine runs."""
        return None

    def logit_factor(self, config: Config) -> float:
        """Return the factor of the logits, which a loss computed from hidden states and head must apply, too."""
        return 1.0

    def cached_per_token(self, config: Config) -> int | None:
        """Return the numbers that softmax layers cache per token, keys and values together; None if unknown."""
        layers, values = len(self.softmax_layers(config)), self.with_defaults(config)
        if not layers or not values.get("num_attention_heads"):
            return None if layers else 0
        heads, channels = self.softmax_sizes(values)
        return 2 * layers * heads * channels or None

    def cached_numbers(self, config: Config, context: int) -> int | None:
        """Return the numbers that softmax layers cache for a sequence of this length; None if unknown."""
        numbers = self.cached_per_token(config)
        return None if numbers is None else numbers * context

    @staticmethod
    def softmax_sizes(values: Config) -> tuple[int, int]:
        """Return the key/value heads of softmax attention and their channels, from a config of transformers."""
        heads = int(values.get("num_attention_heads") or 1)
        channels = values.get("head_dim") or values.get("attention_head_dim") or int(values["hidden_size"]) // heads
        return int(values.get("num_key_value_heads") or heads), int(channels)

    @property
    def stock_config(self) -> Config:
        """An empty config, as the stock class reads it."""
        return {"model_type": self.model_type, **({"text_config": self.defaults} if self.nested else self.defaults)}

    @property
    def hook(self) -> HookPoint:
        """The functions that its layers call, the same for every config."""
        return self.mixers(self.stock_config)[0].hook

    @property
    def language_type(self) -> str:
        """The model type of the class that runs the language model alone."""
        return self.language or self.model_type

    @property
    def loader(self) -> StockClass:
        """The stock class of a model with everything in its files."""
        alone = self.language_type == self.model_type and self.tower is None
        return StockClass(library=self.library, name="AutoModelForCausalLM" if alone else "AutoModelForImageTextToText")


def filter_axis(parameter: str, heads: int, width: int, start: int = 0) -> Axis:
    """Return the channels that a convolution filters, head by head from row `start` on."""
    return Axis(heads=heads, width=width, slots=(Slot(parameter=parameter, start=start),))


def scalar_axis(sizes: Sizes, *parameters: str | Slot) -> Axis | None:
    """Return the parameters with one number for each value head, in the order of the heads unless a slot says more."""
    slots = tuple(Slot(parameter=item) if isinstance(item, str) else item for item in parameters)
    return Axis(heads=sizes.value_heads, width=1, slots=slots) if slots else None


def fused_filters(sizes: Sizes, *, query: int, key: int, value: int) -> tuple[tuple[str, Axis], ...]:
    """Return the filters of one convolution over queries, keys and values, by the first row of each."""
    return (
        ("query", filter_axis("conv1d.weight", sizes.heads, sizes.width, query)),
        ("key", filter_axis("conv1d.weight", sizes.heads, sizes.width, key)),
        ("value", filter_axis("conv1d.weight", sizes.value_heads, sizes.value_dim, value)),
    )
