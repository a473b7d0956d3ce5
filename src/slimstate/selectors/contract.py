"""The interface of a selector: what it gets, and how it describes itself."""

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from slimstate.core.evidence import NEEDS, Evidence, Needs
from slimstate.core.selection import Choice
from slimstate.system.errors import PlanError, quoted
from slimstate.system.value import Value

SCORES = ("kq", "k", "q")


class Case(Value):
    """What is known about the channels of one mixer, those of keys and queries or those of values.

    Weights are [H, D, input size]; `value_weight` and `output_weight`, the rows that compute the values and the columns
    that read them, are [value heads, V, size].
    """

    heads: int
    width: int
    query_weight: Tensor | None = None
    key_weight: Tensor | None = None
    value_weight: Tensor | None = None
    output_weight: Tensor | None = None
    evidence: Evidence | None = None


class Request(Value):
    """How many channels or directions to keep in every head, by keys, queries or both; `device` is where to compute."""

    keep: int
    score: str = "kq"
    seed: int = 0
    f: float = 1.5
    swaps: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise PlanError(f"unknown score {self.score!r}; there are {', '.join(SCORES)}")
        if not self.f >= 1:
            raise PlanError(f"f of strong RRQR must be at least 1, got {self.f}")


class Selector(Value):
    """A way to choose channels, or with `rotates` directions: a `Basis` instead of a `Selection`.

    Parameters:
        name: Its name in plans, records and `method`.
        summary: A line for lists of methods.
        needs: What must be collected for it: "weight", "gram", "moments", "input", "gradient", "weighted"; for values
            "weight", "output", "output gradient".
        choose: A function of the mixers, each a `Case`, and the `Request`, which returns a choice for every mixer.
            `best_of` turns a function that scores every channel of a mixer into one.
        options: Fields of the request that a plan stores.
        rotates: Whether it keeps directions.
        order: Its place in lists.

    Examples:
        >>> from slimstate.selectors import best_of
        >>> def loud(case, request):
        ...     return case.evidence.key_gram.diagonal(dim1=-2, dim2=-1)
        >>> loudest = slimstate.Selector(name="loudest", needs={"gram"}, choose=best_of(loud))
        >>> slimstate.prune(model, "slim", key_dim=64, method=loudest, data="text.txt")
    """

    name: str
    summary: str = ""
    needs: Needs
    choose: Callable[[Iterable[Case], Request], Sequence[Choice]]
    options: tuple[str, ...] = ()
    rotates: bool = False
    order: int = 1000

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs", frozenset(self.needs))
        if unknown := sorted(self.needs - frozenset(NEEDS)):
            raise PlanError(f"`needs` of {self.name} has {quoted(', '.join(unknown))}; there are {', '.join(NEEDS)}")

    @property
    def calibrated(self) -> bool:
        return bool(self.needs - {"weight"})


def scored(score: str, query: Tensor | None, key: Tensor | None) -> list[Tensor]:
    """Return the query tensor, the key tensor or both, as `score` says: q, k or kq."""
    tensors = [tensor for name, tensor in (("q", query), ("k", key)) if name in score and tensor is not None]
    if len(tensors) < len(score):
        raise ValueError(f"score {score} needs tensors of {' and '.join(score)}, got {len(tensors)}: check `needs`")
    return tensors
