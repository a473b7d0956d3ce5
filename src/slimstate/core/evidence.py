"""The sums of a calibration for each mixer, in memory and as a file.

The file is safetensors, with the fingerprint of the model and of the calibration tokens.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import safetensors.torch
import torch
from torch import Tensor

from slimstate.core.layout import Mixer
from slimstate.system.atomic import staged_file, writing
from slimstate.system.errors import DataError, quoted, reason_of
from slimstate.system.input_files import open_regular
from slimstate.system.json_files import JsonObject, parse_json
from slimstate.system.value import Value

# what a method may need; weights are read, everything else is collected
Need = Literal["weight", "gram", "moments", "input", "gradient", "weighted", "output", "output gradient"]
Needs = frozenset[Need]
NEEDS: tuple[str, ...] = get_args(Need)
FIELDS: dict[str, tuple[str, ...]] = {
    "gram": ("query_gram", "key_gram"),
    "moments": ("query_moments", "key_moments"),
    "input": ("input_square",),
    "gradient": ("query_gradient", "key_gradient"),
    "weighted": ("query_weighted", "key_weighted"),
    "output": ("output_square",),
    "output gradient": ("output_gradient",),
}
BACKWARD: frozenset[str] = frozenset({"gradient", "weighted", "output gradient"})  # what needs a backward pass
KNOWN = frozenset(name for names in FIELDS.values() for name in names)
MARK, FORMAT = "slimstate_evidence", "1"
HEADER_SIZE = 2**16  # bytes at the beginning, in which the mark is
ROUNDING = 1e-6  # of the largest entry; sums of many tokens are far more precise, also on a GPU
MAX_TOKENS = 2**53
MAX_SUM = 1e100  # far more than squares of single precision over so many tokens


class Evidence(Value):
    """Sums over calibration tokens for one mixer. Sums merge: across batches, processes and machines.

    query_gram, key_gram [H, D, D]: sums of outer products of the activations, float64. query_moments, key_moments
    [H, D + 1, D + 1]: the same of activations divided by their length, with a one appended to each: the last row is
    their sum, and its last entry their number. input_square [input size]: sum of squares of the mixer's input.
    query_gradient, key_gradient [H, D, copies * input size]: gradient of the summed language-model loss with respect to
    the projection weights. query_weighted, key_weighted [H, D, D]: query_gram and key_gram with every token of a head
    weighted by the squared length of the gradient of that loss with respect to its activations. output_square
    [value heads, V, copies]: sum of squares of the input of the output projection. output_gradient [value heads, V,
    copies * output size]: gradient of the loss with respect to that projection. What a method does not need is None.
    """

    tokens: int
    query_gram: Tensor | None = None
    key_gram: Tensor | None = None
    query_moments: Tensor | None = None
    key_moments: Tensor | None = None
    input_square: Tensor | None = None
    query_gradient: Tensor | None = None
    key_gradient: Tensor | None = None
    query_weighted: Tensor | None = None
    key_weighted: Tensor | None = None
    output_square: Tensor | None = None
    output_gradient: Tensor | None = None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, value) for name, value in vars(self).items() if isinstance(value, Tensor))

    def merged(self, other: "Evidence") -> "Evidence":
        """Return the evidence of both sets of tokens."""
        mine, theirs = dict(self.tensors()), dict(other.tensors())
        if mine.keys() != theirs.keys():
            raise DataError(f"evidence to merge must have the same sums, got {sorted(mine)} and {sorted(theirs)}")
        sums = {name: tensor + theirs[name] for name, tensor in mine.items()}
        return Evidence(tokens=self.tokens + other.tokens, **sums)

    def extended(self, other: "Evidence") -> "Evidence":
        """Return this evidence with additional sums of `other`, both from the same tokens."""
        if self.tokens != other.tokens:
            raise DataError(f"evidence to join must be of the same tokens, got {self.tokens} and {other.tokens}")
        return Evidence(tokens=self.tokens, **{**dict(self.tensors()), **dict(other.tensors())})


class EvidenceFile(Value):
    """The evidence of every mixer by layer, with the model and the tokens that it was collected on."""

    model: str
    calibration: Mapping[str, Any]
    evidence: Mapping[int, Evidence]

    def missing(self, needs: Needs) -> Needs:
        """Return those of `needs` that were not collected."""
        collected = {name for entry in self.evidence.values() for name, _ in entry.tensors()}
        return frozenset(need for need in needs if need in FIELDS and not set(FIELDS[need]) <= collected)

    def extended(self, other: "EvidenceFile") -> "EvidenceFile":
        joined = {layer: entry.extended(other.evidence[layer]) for layer, entry in self.evidence.items()}
        return EvidenceFile(model=self.model, calibration=self.calibration, evidence=joined)

    def save(self, path: Path) -> None:
        """Write the file, complete or not at all."""
        sums = ((layer, *part) for layer, entry in self.evidence.items() for part in entry.tensors())
        tensors = {f"{layer}.{name}": tensor.contiguous() for layer, name, tensor in sums}
        tokens = next(iter(self.evidence.values())).tokens
        about = {"model": self.model, "calibration": self.calibration, "tokens": tokens}
        with writing(path), staged_file(path) as partial:
            metadata = {MARK: FORMAT, "about": json.dumps(about)}
            safetensors.torch.save_file(tensors, partial, metadata)

    @staticmethod
    def is_one(path: Path) -> bool:
        """Return whether a path is an evidence file, whole or damaged, by its beginning."""
        try:
            with open_regular(path, DataError) as file:
                return MARK.encode() in file.read(HEADER_SIZE)
        except (DataError, OSError):
            return False

    @classmethod
    def open(cls, path: Path) -> "EvidenceFile":
        with open_regular(path, DataError):
            pass
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get(MARK) != FORMAT:
                    raise DataError(f"{quoted(path)} is not a slimstate evidence file")
                about = _check_about(parse_json(metadata["about"], f"{quoted(path)}: `about`", DataError))
                layers: dict[int, dict[str, Tensor]] = {}
                for key in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                    layer, _, name = key.partition(".")
                    if name not in KNOWN:
                        raise ValueError(f"{quoted(key)} is not evidence of a layer")
                    layers.setdefault(int(layer), {})[name] = file.get_tensor(key)
            if not layers:
                raise ValueError("it has no layers")
        except (OSError, safetensors.SafetensorError, ValueError, LookupError, TypeError) as error:
            raise DataError(f"{quoted(path)} is not a slimstate evidence file: {reason_of(error)}") from error
        evidence = {layer: Evidence(tokens=about["tokens"], **entry) for layer, entry in sorted(layers.items())}
        return cls(model=about["model"], calibration=about["calibration"], evidence=evidence)

    def check_fits(self, path: Path, mixers: Sequence[Mixer]) -> None:
        """Raise a `DataError` unless this can be the evidence of a model with these mixers."""
        layers = [mixer.layer for mixer in mixers]
        if sorted(self.evidence) != layers:
            own = quoted(sorted(self.evidence))
            raise DataError(f"{quoted(path)} has evidence of layers {own}, the model has {quoted(layers)}")
        kinds = {frozenset(name for name, _ in entry.tensors()) for entry in self.evidence.values()}
        if len(kinds) > 1:
            raise DataError(f"{quoted(path)} has more evidence of some layers than of others: collect it again")
        for mixer in mixers:
            for name, tensor in self.evidence[mixer.layer].tensors():
                if (problem := find_problem(name, tensor, mixer, self.evidence[mixer.layer].tokens)) is not None:
                    raise DataError(f"{quoted(path)}: {name} of layer {mixer.layer} {problem}")

    def check(self, path: Path, model: str, digest: str | None) -> None:
        """Refuse evidence of another model, or of other tokens than those with this digest."""
        if self.model != model:
            models = f"{quoted(self.model[:19])}…, this one is {model[:19]}…"
            raise DataError(f"{quoted(path)} is evidence of another model ({models}): collect it again")
        if digest is not None and self.calibration["digest"] != digest:
            other = quoted(self.calibration["data"])
            raise DataError(f"{quoted(path)} is of other tokens ({other}): collect it again or leave out `data`")


def _check_about(about: JsonObject) -> JsonObject:
    """Return the description of an evidence file; raise an error unless it names its model, text and tokens."""
    calibration = about["calibration"]
    texts = (about["model"], calibration["data"], calibration["digest"])
    counts = (about["tokens"], calibration["samples"], calibration["length"])
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("it does not name its model and text")
    if not all(type(count) is int and 0 < count < MAX_TOKENS for count in counts):
        raise ValueError("it does not say how many tokens it was collected on")
    if counts[0] != counts[1] * counts[2]:
        raise ValueError(f"it has {counts[0]} tokens, but {counts[1]} windows of {counts[2]}")
    return about


def find_problem(name: str, tensor: Tensor, mixer: Mixer, tokens: int) -> str | None:
    """Return why a tensor cannot be a sum of a calibration of this mixer, or None if it can."""
    is_square = name in FIELDS["gram"] + FIELDS["moments"] + FIELDS["weighted"]
    shape = _shape_of(name, mixer)
    if shape is None:
        return "belongs to values, which cannot be cut in this model"
    pairs = zip(shape, tensor.shape, strict=False)
    fits = len(shape) == tensor.ndim and all(expected in (None, size) for expected, size in pairs)
    dtype = torch.float32 if name.endswith("_gradient") else torch.float64
    if not fits or tensor.dtype != dtype:
        expected = [size or "…" for size in shape]
        return f"is {list(tensor.shape)} of {tensor.dtype}, but must be {expected} of {dtype}"
    if not bool((tensor.abs() < MAX_SUM).all()):  # nor NaN
        return f"has NaN or infinite numbers, or larger ones than {MAX_SUM:g}"
    if not bool(tensor.any()):
        return f"is zero, but is a sum over {tokens:,} tokens"
    if name.endswith("_square") and bool((tensor < 0).any()):
        return "has a negative sum of squares"
    return _find_gram_problem(tensor, tokens if name in FIELDS["moments"] else None) if is_square else None


def _shape_of(name: str, mixer: Mixer) -> tuple[int | None, ...] | None:
    """Return the shape of a sum, None for a size that the layout does not know; None if the mixer has no such sum."""
    axis, values = mixer.axis, mixer.value_axis
    if name.startswith("output_"):
        if values is None:
            return None
        return values.heads, values.width, values.output.copies if name == "output_square" else None
    if name == "input_square":
        return (mixer.input_size,)
    side = axis.width + (name in FIELDS["moments"])
    return (axis.heads, axis.width, None) if name in FIELDS["gradient"] else (axis.heads, side, side)


def _find_gram_problem(gram: Tensor, tokens: int | None) -> str | None:
    """Return why this is not a sum of outer products, or None if it is; moments end with the count `tokens`."""
    diagonal = gram.diagonal(dim1=1, dim2=2)
    scale = diagonal.abs().amax(1).clamp_min(torch.finfo(gram.dtype).tiny).view(-1, 1, 1)
    unit = gram / scale
    if bool((diagonal < 0).any()) or bool(((unit - unit.mT).abs() > ROUNDING).any()):
        return "is not symmetric with a non-negative diagonal"
    if tokens is not None and not bool(((gram[:, -1, -1] - tokens).abs() <= ROUNDING * tokens).all()):
        return f"does not count the {tokens:,} tokens of the file"
    ridge = ROUNDING * torch.eye(gram.shape[1], dtype=gram.dtype)
    if bool(torch.linalg.cholesky_ex(unit + ridge).info.any()):
        return "is not positive semi-definite"
    return None
