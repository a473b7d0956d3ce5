"""What a family is, and how it makes up for the query scale."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from slimstate.core.layout import Axis, HookPoint, Mixer, Slot
from slimstate.core.stock_class import StockClass

Config = Mapping[str, Any]
EXACT_EPSILON, LARGEST_EPSILON = 1e-4, 1e-3  # after a cut: up to the first it is exact, beyond the second not made
Library = Literal["fla", "transformers"]


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What makes a cut layer give out what it gave with the dropped channels zeroed.

    Layers scale queries by d_k^-0.5, so a cut multiplies what they read from the state by s = sqrt(width / key dim).
    Behind that stands a norm, and s o / sqrt(s^2 mean(o^2) + s^2 eps) = o / sqrt(mean(o^2) + eps): an `epsilon` (the
    config field) s^2 times as large takes s out. Trained models have mean(o^2) well below eps, so without it the whole
    layer would come out louder. The other norms share the epsilon but see values of a thousand times its size or more:
    of an epsilon e after the cut, logits are off by about e standard deviations.
    Where only linear maps lie before the state, 1/s is `folded` into the query rows instead.
    """

    # what it does, or why nothing is done, in words
    why: str
    # the config field of the norm's epsilon: "norm_eps"
    epsilon: str | None = None
    # whether 1/s goes into the query rows, those of a slot that says `absorbs_query_scale`
    folded: bool = False

    @property
    def possible(self) -> bool:
        """Whether something is changed for it besides the key dim."""
        return self.epsilon is not None or self.folded

    def describe(
        self, width: int, key_dim: int, done: bool, rotated: bool = False, epsilon: float | None = None
    ) -> str:
        """What was done for it, in a sentence; nothing is zeroed where channels were `rotated` first.

        A large `epsilon` after the cut is felt by the other norms too, and that is said.
        """
        if not self.possible:
            return self.why
        if not done:
            return "not corrected: the cut is zeroing the channels and taking the query scale of the new key dim"
        meaning = "" if rotated else ", so that cutting is zeroing"
        if self.folded:
            return f"query weights times {(key_dim / width) ** 0.5:.4g}: {self.why}{meaning}"
        if epsilon is not None and epsilon > EXACT_EPSILON:
            meaning = f"; not exact, because the other norms share an epsilon that is now {epsilon:.2g}"
        return f"{self.epsilon} times {width / key_dim:.4g}: {self.why}{meaning}"


def by_epsilon(field: str) -> Correction:
    return Correction(epsilon=field, why="makes up for the new query scale")


NORM_EPS, RMS_NORM_EPS = by_epsilon("norm_eps"), by_epsilon("rms_norm_eps")
FOLDED = Correction(folded=True, why="makes up for the new query scale exactly")
NOT_NEEDED = Correction(why="these layers do not scale queries: cutting is zeroing, to the last bit")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a linear-attention layer."""

    # H, key heads
    heads: int
    # D, key channels of a head
    width: int
    # G, heads of the state, a multiple of the key heads
    value_heads: int
    # V, value channels of a head
    value_dim: int
    # inputs of the projections, the hidden size
    input_size: int

    @property
    def keys(self) -> int:
        """The key channels of all heads."""
        return self.heads * self.width

    @property
    def values(self) -> int:
        """The value channels of all heads."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True, kw_only=True)
class Caches:
    """What an engine has to keep for a sequence: the sizes of states, of convolutions and of softmax layers."""

    # those of a linear-attention layer
    sizes: Sizes
    # how many of these there are
    linear_layers: int
    # how many have softmax attention; one layer may have both
    softmax_layers: int
    # taps of the convolution over queries, keys and values, all but one of which are kept
    taps: int
    # key and value heads of a softmax layer, and their channels
    kv_heads: int
    kv_dim: int
    # what the config says states are to be kept in: "float32"; None where it says nothing
    state_dtype: str | None = None
    # whether key heads are repeated where there are fewer of them than GPUs, as the groups of Mamba-2 are
    repeated_keys: bool = False
    # whether a prefill hands over the state of a block's end on its way; where states are kept vLLM has one more for it
    state_on_the_way: bool = False


@dataclass(frozen=True, kw_only=True)
class Family(ABC):
    """An architecture: which of its configs can be cut, where their key channels live, what a cut does to a config.

    Architectures that differ in names and rows alone are values of one class; one that differs in more has a class of
    its own.
    """

    # the `model_type` of its configs: "delta_net"
    model_type: str
    # the library that has its stock class
    library: Library
    # what the stock config has where a config says nothing: {"num_heads": 16, "expand_k": 1.0}
    defaults: Config
    # the model type of the class that runs its language model, where it has none for its own type: "qwen3_5_text"
    language: str | None = None
    # which of its configs cannot be cut, in words, and why: {"`norm_q`": "channels of a head are mixed"}
    refused: Mapping[str, str] = field(default_factory=dict)

    @abstractmethod
    def mixers(self, config: Config) -> tuple[Mixer, ...]:
        """Every linear-attention layer of a model with this config."""

    @abstractmethod
    def softmax_layers(self, config: Config) -> frozenset[int]:
        """The layers with softmax attention, which is left alone."""

    @abstractmethod
    def correction(self, config: Config) -> Correction:
        """What makes up for the query scale."""

    @abstractmethod
    def resize(self, config: Config, key_dim: int, *, corrected: bool = True) -> Config:
        """The config of the same model with `key_dim` channels per head.

        `corrected` also changes what must change for the layers to give out what they gave with channels zeroed.
        """

    def epsilon(self, config: Config) -> float | None:
        """The norm epsilon that a cut changes to make up for the query scale, where it changes one."""
        return None

    def published(self, config: Config) -> Config:
        """Fields that published checkpoints have, from what a config of transformers 5 says in another way."""
        return flat_rope(config)

    def refusal(self, config: Config) -> str | None:
        """Why a model with this config cannot be cut, in a line; None where it can."""
        return None

    def caches(self, config: Config) -> Caches | None:
        """What an engine keeps for a sequence; None for families that no such engine runs."""
        return None

    def logit_factor(self, config: Config) -> float:
        """What the logits are multiplied by: a loss made from hidden states and head has to do so too."""
        return 1.0

    def cached_per_token(self, config: Config) -> int | None:
        """Numbers that softmax layers keep for every token, keys and values together; None where it is not said."""
        return cached_numbers(len(self.softmax_layers(config)), {**self.defaults, **config})

    @property
    def stock_config(self) -> Config:
        """A config that says nothing, as the stock class reads it."""
        return {"model_type": self.model_type, **self.defaults}

    @property
    def hook(self) -> HookPoint:
        """The functions that its layers call; the same ones for every config."""
        return self.mixers(self.stock_config)[0].hook

    @property
    def language_type(self) -> str:
        """The model type whose class runs the language model alone."""
        return self.language or self.model_type

    @property
    def loader(self) -> StockClass:
        """The stock class of a model with all that its files hold."""
        alone = self.language_type == self.model_type
        return StockClass(library=self.library, name="AutoModelForCausalLM" if alone else "AutoModelForImageTextToText")


def softmax_sizes(known: Config) -> tuple[int, int]:
    """Key and value heads of softmax attention and their channels, as a config of transformers has them."""
    heads = int(known.get("num_attention_heads") or 1)
    channels = known.get("head_dim") or known.get("attention_head_dim") or int(known["hidden_size"]) // heads
    return int(known.get("num_key_value_heads") or heads), int(channels)


def flat_rope(config: Config) -> dict[str, float]:
    """The rotary embedding as fields of their own, from where it is one object that does not differ by layer."""
    nested = config.get("rope_parameters")
    known = nested if isinstance(nested, Mapping) else {}
    names = ("rope_theta", "partial_rotary_factor")
    return {name: known[name] for name in names if isinstance(known.get(name), (int, float))}


def cached_numbers(layers: int, known: Config) -> int | None:
    """Keys and values of so many softmax layers for a token; None where the config does not say."""
    if not layers or not known.get("num_attention_heads"):
        return None if layers else 0
    heads, channels = softmax_sizes(known)
    return 2 * layers * heads * channels or None


def filter_axis(parameter: str, heads: int, width: int, start: int = 0) -> Axis:
    """The channels that a convolution filters, head by head from row `start` on."""
    return Axis(heads=heads, width=width, slots=(Slot(parameter=parameter, start=start),))


def corrected_epsilon(correction: Correction, known: Config, width: int, key_dim: int) -> dict[str, float]:
    """The changed norm epsilon, where there is one to change; `known` is the config with its defaults."""
    if correction.epsilon is None:
        return {}
    return {correction.epsilon: float(known[correction.epsilon]) * width / key_dim}
