"""What a family is, and how it makes up for the query scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from slimstate.core.layout import Mixer
from slimstate.kernels.patches import Substitute

Config = Mapping[str, Any]
Library = Literal["fla", "transformers"]


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What makes a cut layer give out what it gave with the dropped channels zeroed.

    Layers scale queries by d_k^-0.5, so a cut multiplies what they read from the state by s = sqrt(width / key dim).
    Behind that stands a norm, and s o / sqrt(s^2 mean(o^2) + s^2 eps) = o / sqrt(mean(o^2) + eps): an `epsilon` (the
    config field) s^2 times as large takes s out. Trained models have mean(o^2) well below eps, so without it the whole
    layer would come out louder. The other norms share the epsilon but see values of a thousand times its size or more.
    Where only linear maps lie before the state, 1/s is `folded` into the query rows instead.
    """

    why: str
    epsilon: str | None = None
    folded: bool = False

    @property
    def possible(self) -> bool:
        """Whether something is changed for it besides the key dim."""
        return self.epsilon is not None or self.folded

    def describe(self, width: int, key_dim: int, done: bool, rotated: bool = False) -> str:
        """What was done for it, in a sentence; nothing is zeroed where channels were `rotated` first."""
        if not self.possible:
            return self.why
        if not done:
            return "not corrected: the cut is zeroing the channels and taking the query scale of the new key dim"
        meaning = "" if rotated else ", so that cutting is zeroing"
        if self.folded:
            return f"query weights times {(key_dim / width) ** 0.5:.4g}: {self.why}{meaning}"
        return f"{self.epsilon} times {width / key_dim:.4g}: {self.why}{meaning}"


def by_epsilon(field: str) -> Correction:
    return Correction(epsilon=field, why="makes up for the new query scale")


NORM_EPS, RMS_NORM_EPS = by_epsilon("norm_eps"), by_epsilon("rms_norm_eps")
FOLDED = Correction(folded=True, why="makes up for the new query scale exactly")
NOT_NEEDED = Correction(why="these layers do not scale queries: cutting is zeroing, to the last bit")


class Family(Protocol):
    @property
    def model_type(self) -> str: ...

    @property
    def library(self) -> Library:
        """Where its stock class is."""

    @property
    def DEFAULTS(self) -> Mapping[str, Any]:  # noqa: N802
        """What the stock config has where a config says nothing."""

    def mixers(self, config: Config) -> tuple[Mixer, ...]:
        """Every linear-attention layer of a model with this config."""

    def softmax_layers(self, config: Config) -> frozenset[int]:
        """The layers with softmax attention, which is left alone."""

    def correction(self, config: Config) -> Correction:
        """What makes up for the query scale."""

    def resize(self, config: Config, key_dim: int, *, corrected: bool = True) -> dict[str, Any]:
        """The config of the same model with `key_dim` channels per head.

        `corrected` also changes what must change for the layers to give out what they gave with channels zeroed.
        """


@runtime_checkable
class ScalesLogits(Protocol):
    """What a family has besides, whose models multiply what their output head gives out; of others the factor is 1."""

    def logit_factor(self, config: Config) -> float:
        """What the logits are multiplied by: a loss made from hidden states and head has to do so too."""


@runtime_checkable
class Refuses(Protocol):
    """What a family has besides, of which only some configs can be cut."""

    @property
    def REFUSED(self) -> Mapping[str, str]:  # noqa: N802
        """Which of its configs cannot be cut, in words, and why."""

    def refusal(self, config: Config) -> str | None:
        """Why this one cannot be cut, in a line; None where it can."""


@runtime_checkable
class BringsSubstitutes(Protocol):
    """What a family of fla has besides, whose layers call functions that only a GPU runs."""

    @property
    def SUBSTITUTES(self) -> tuple[Substitute, ...]:  # noqa: N802
        """The same functions in PyTorch."""


@runtime_checkable
class Encloses(Protocol):
    """What a family has besides, whose models hold a language model that has a class of another model type."""

    @property
    def language(self) -> str | None:
        """The model type of that class; None where there is one for the family's own type."""


def corrected_epsilon(correction: Correction, known: Config, width: int, key_dim: int) -> dict[str, float]:
    """The changed norm epsilon, where there is one to change; `known` is the config with its defaults."""
    if correction.epsilon is None:
        return {}
    return {correction.epsilon: float(known[correction.epsilon]) * width / key_dim}
