"""What a sweep judges: every method at every key dim, by every score; and its rows in the order asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from slimstate.core.evidence import Need
from slimstate.core.state_dtype import TYPES, check_state_dtypes
from slimstate.pruning.budget import resolve_key_dim
from slimstate.records.sweep import UNCUT, UNINFORMED, Row
from slimstate.selectors import METHODS, Method, Request, Selector, channel_methods, selector_named
from slimstate.system.errors import PlanError
from slimstate.system.progress import SILENT, Reporter

COMPRESSIONS = (0.3, 0.4, 0.5, 0.75)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A cut to be judged, and the type that its states are kept in; without a selector nothing is cut."""

    selector: Selector | None
    score: str
    compression: float
    key_dim: int
    state_dtype: str = "float32"

    @property
    def method(self) -> str:
        return UNCUT if self.selector is None else self.selector.name

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.method, self.score, self.key_dim, self.state_dtype

    @property
    def cut(self) -> Candidate:
        """The same whatever its states are kept in."""
        return replace(self, state_dtype="float32")

    def request(self, seed: int, f: float) -> Request:
        return Request(keep=self.key_dim, score=self.score, seed=seed, f=f)


@dataclass(frozen=True, kw_only=True)
class SweepGrid:
    """What a sweep tries. Where neither compressions nor key dims are given, four usual compressions are.

    Parameters:
        methods: names of methods, or `Selector`s of your own; by default all that keep channels.
        compressions: shares of the channels to remove, rounded as a cut rounds them.
        key_dims: channels to keep, exactly.
        scores: what channels are judged by: "kq", "k", "q".
        state_dtypes: what states are kept in; every cut, and the uncut model, is judged with each.

    Examples:
        >>> slimstate.SweepGrid(methods=("drrqr", "l1"), key_dims=(96, 64, 32))
    """

    methods: Sequence[Method] | None = None
    compressions: Sequence[float] | None = None
    key_dims: Sequence[int] = ()
    scores: Sequence[str] = ("kq",)
    state_dtypes: Sequence[str] = ("float32",)

    def __post_init__(self) -> None:
        if not (self.selectors and (self.shares or self.key_dims) and self.scores):
            raise PlanError("a sweep needs at least one method, one compression or key dim, and one score")
        METHODS.index(self.selectors)
        for score in self.scores:
            Request(keep=1, score=score)
        check_state_dtypes(self.state_dtypes)

    @property
    def selectors(self) -> list[Selector]:
        """The methods, each once."""
        return list(dict.fromkeys(map(selector_named, channel_methods() if self.methods is None else self.methods)))

    @property
    def shares(self) -> Sequence[float]:
        """The compressions to try."""
        return (() if self.key_dims else COMPRESSIONS) if self.compressions is None else self.compressions

    def resolve(self, width: int, reporter: Reporter = SILENT) -> dict[int, float]:
        """The key dims, and the compression that asked for each first, or that it is: two may round to one."""
        found: dict[int, float] = {}
        for compression in self.shares:
            key_dim, line = resolve_key_dim(width, compression, None)
            reporter.say(line)
            found.setdefault(key_dim, compression)
        for key_dim in self.key_dims:
            resolve_key_dim(width, None, key_dim)
            found.setdefault(key_dim, 1 - key_dim / width)
        return found

    def candidates(self, key_dims: Mapping[int, float], width: int) -> Iterator[Candidate]:
        """Every cut in every type of state, those of a cut together; the uncut model in float32 is no candidate."""
        whole = Candidate(selector=None, score="kq", compression=0.0, key_dim=width)
        for cut in (whole, *self._cuts(key_dims)):
            for state_dtype in self.state_dtypes:
                if (cut, state_dtype) != (whole, "float32"):
                    yield replace(cut, state_dtype=state_dtype)

    def _cuts(self, key_dims: Mapping[int, float]) -> Iterator[Candidate]:
        """Every method at every key dim, with the compression that asked for it, and by every score."""
        for selector in self.selectors:
            for score in dict.fromkeys(self.scores) if selector.name not in UNINFORMED else ("kq",):
                for key_dim, compression in key_dims.items():
                    yield Candidate(selector=selector, score=score, compression=compression, key_dim=key_dim)

    def needs(self, calibrated: bool) -> frozenset[Need]:
        """What one calibration must collect for all methods; the Gram matrices always, for the condition of the keys.

        Nothing where there is no text to calibrate on, which some methods can do without.
        """
        looking = [selector.name for selector in self.selectors if selector.calibrated]
        if looking and not calibrated:
            raise PlanError(f"{', '.join(looking)} look at activations: give text to calibrate on with `calibration`")
        needs = frozenset(need for selector in self.selectors for need in selector.needs)
        return (needs - {"weight"}) | {"gram"} if calibrated else frozenset()


def still_to_do(candidates: Sequence[Candidate], rows: Sequence[Row]) -> list[Candidate]:
    """The candidates without a row."""
    done = {row.key for row in rows}
    return [candidate for candidate in candidates if candidate.key not in done]


def as_asked(rows: Sequence[Row], candidates: Sequence[Candidate]) -> tuple[Row, ...]:
    """Rows in the order of the candidates, those of an earlier sweep last.

    Where two compressions round to one key dim, rows go by the one asked for now.
    """
    asked = {candidate.key_dim: candidate.compression for candidate in candidates}
    places = {candidate.key: number for number, candidate in enumerate(candidates)}
    named = [replace(row, compression=asked.get(row.key_dim, row.compression)) for row in rows]
    return tuple(sorted(named, key=lambda row: places.get(row.key, len(places))))


def covering(rows: Sequence[Row], width: int) -> dict[str, tuple[object, ...] | None]:
    """What makes all these rows, by the names of the grid; an older version may have known other methods."""
    kept = tuple(name for name in TYPES if any(row.state_dtype == name for row in rows))
    rows = [row for row in rows if row.method != UNCUT]
    rounded = [row for row in rows if resolve_key_dim(width, row.compression, None)[0] == row.key_dim]
    exact = [row for row in rows if row not in rounded]
    return {
        "methods": tuple(dict.fromkeys(row.method for row in rows)),
        "compressions": tuple(dict.fromkeys(row.compression for row in rounded)) or None,
        "key_dims": tuple(dict.fromkeys(row.key_dim for row in exact)) or None,
        "scores": tuple(dict.fromkeys(row.score for row in rows)),
        "state_dtypes": None if kept == ("float32",) else kept,
    }
