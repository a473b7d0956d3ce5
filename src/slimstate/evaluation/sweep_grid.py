"""The candidates of a sweep: every method at every key dim, by every score, in every data type of the state."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from slimstate.core.evidence import Needs
from slimstate.core.state_dtype import TYPES, check_state_dtypes
from slimstate.evaluation.options import GridOptions
from slimstate.pruning.sizes import resolve_key_dim
from slimstate.records.evaluation import UNCUT, UNINFORMED, Row
from slimstate.records.numbers import dims_text
from slimstate.selectors import METHODS, Selector, channel_methods, selector_named, value_selector_named
from slimstate.system.errors import PlanError
from slimstate.system.progress import SILENT, Reporter
from slimstate.system.value import Value

COMPRESSIONS = (0.3, 0.4, 0.5, 0.75)


class Candidate(Value):
    """A cut to measure, and the data type of its states; without a selector nothing is cut."""

    selector: Selector | None
    score: str
    compression: float
    key_dim: int
    value_dim: int | None = None
    state_dtype: str = "float32"

    @property
    def method(self) -> str:
        return UNCUT if self.selector is None else self.selector.name

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.method, self.score, dims_text(self.key_dim, self.value_dim), self.state_dtype

    @property
    def cut(self) -> "Candidate":
        """The same cut with states in float32."""
        return replace(self, state_dtype="float32")


class Grid(Value):
    """A grid for models of these widths: its methods, each once, and the compression of every key dim."""

    options: GridOptions
    width: int
    values: int | None
    selectors: tuple[Selector, ...]
    key_dims: dict[int, float]

    @classmethod
    def of(cls, options: GridOptions, width: int, values: int | None = None, reporter: Reporter = SILENT) -> "Grid":
        """Return the grid of the options; refuse unknown methods. Two compressions may round to one key dim."""
        methods = channel_methods() if options.methods is None else options.methods
        selectors = tuple(dict.fromkeys(map(selector_named, methods)))
        METHODS.index(selectors)  # refuses two of the same name
        check_state_dtypes(options.state_dtypes)
        compressions = options.compressions
        if compressions is None:
            compressions = () if options.key_dims else COMPRESSIONS
        if not (selectors and (compressions or options.key_dims) and options.scores):
            raise PlanError("a sweep needs at least one method, one compression or key dim, and one score")
        key_dims: dict[int, float] = {}
        for compression in compressions:
            key_dim, line = resolve_key_dim(width, compression, None)
            reporter.say(line)
            key_dims.setdefault(key_dim, compression)
        for key_dim in options.key_dims:
            resolve_key_dim(width, None, key_dim, allow_width=bool(options.value_dims))
            key_dims.setdefault(key_dim, 1 - key_dim / width)
        return cls(options=options, width=width, values=values, selectors=selectors, key_dims=key_dims)

    def candidates(self) -> Iterator[Candidate]:
        """Yield every cut in every data type, those of a cut together; without the uncut model in float32."""
        uncut = Candidate(selector=None, score="kq", compression=0.0, key_dim=self.width)
        for cut in (uncut, *self._cuts()):
            for state_dtype in self.options.state_dtypes:
                if (cut, state_dtype) != (uncut, "float32"):
                    yield replace(cut, state_dtype=state_dtype)

    def _cuts(self) -> Iterator[Candidate]:
        for selector in self.selectors:
            for score in dict.fromkeys(self.options.scores) if selector.name not in UNINFORMED else ("kq",):
                for key_dim, value_dim in itertools.product(self.key_dims, self.options.value_dims or (None,)):
                    if (key_dim, value_dim) == (self.width, self.values):
                        continue
                    yield Candidate(
                        selector=selector, score=score, compression=self.key_dims[key_dim], key_dim=key_dim,
                        value_dim=value_dim,
                    )  # fmt: skip

    def needs(self, has_text: bool, cuts_values: bool) -> Needs:
        """Return what one calibration must collect for all methods; nothing without a text.

        Where keys are cut, Gram matrices are among it, for the condition numbers of the keys.
        """
        selectors = self.selectors if any(key_dim < self.width for key_dim in self.key_dims) else ()
        values = [value_selector_named(self.options.value_method)] if cuts_values else []
        calibrated = [selector.name for selector in selectors if selector.calibrated]
        calibrated += [selector.name for selector in values if selector.needs - {"weight"}]
        if calibrated and not has_text:
            raise PlanError(f"{', '.join(calibrated)} need activations: give text to calibrate on with `data`")
        needs = frozenset(need for selector in selectors for need in (*selector.needs, "gram"))
        needs |= frozenset().union(*(selector.needs for selector in values))
        return needs - {"weight"} if has_text else frozenset()


def order_rows(rows: Sequence[Row], candidates: Sequence[Candidate]) -> tuple[Row, ...]:
    """Return the rows in the order of the candidates, other rows of an earlier sweep last.

    Where two compressions round to one key dim, rows show that of the candidates.
    """
    compressions = {candidate.key_dim: candidate.compression for candidate in candidates}
    places = {candidate.key: number for number, candidate in enumerate(candidates)}
    rows = [replace(row, compression=compressions.get(row.key_dim, row.compression)) for row in rows]
    return tuple(sorted(rows, key=lambda row: places.get(row.key, len(places))))


def grid_of(rows: Sequence[Row], width: int) -> GridOptions:
    """Return the grid that contains all these rows."""
    state_dtypes = {row.state_dtype for row in rows}
    rows = [row for row in rows if row.method != UNCUT]
    rounded = [row for row in rows if row.compression != 1 - row.key_dim / width]  # others name their key dim
    columns = {
        "methods": [row.method for row in rows],
        "compressions": [row.compression for row in rounded] or None,
        "key_dims": [row.key_dim for row in rows if row not in rounded],
        "value_dims": [row.value_dim for row in rows if row.value_dim is not None],
        "scores": [row.score for row in rows],
        "state_dtypes": [name for name in TYPES if name in state_dtypes],
    }
    return GridOptions.from_values({name: values and list(dict.fromkeys(values)) for name, values in columns.items()})
