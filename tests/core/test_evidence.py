"""Evidence is what calibration can give, or it is refused with what is wrong."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from slimstate.core.evidence import Evidence, EvidenceFile
from slimstate.families import FAMILIES
from slimstate.system.errors import DataError

MIXERS = FAMILIES["delta_net"].mixers({"hidden_size": 12, "num_heads": 2, "num_hidden_layers": 2})
CALIBRATION = {"data": "text", "samples": 4, "length": 16, "seed": 0, "digest": "sha256:0"}
ABOUT = {"model": "m", "tokens": 64, "calibration": CALIBRATION}
OTHERS = ({"model": 5}, {"tokens": 65}, {"tokens": "64"}, {"calibration": {**CALIBRATION, "digest": None}})
FILES = [(about, None) for about in ({}, [], {"model": "m", "tokens": 64}, *(ABOUT | other for other in OTHERS))]
FILES += [(ABOUT, name) for name in ("x.key_gram", "0.other", "0", "-.key_gram")]


def evidence(seed: int = 0, dead: int | None = None) -> Evidence:
    drawn = torch.randn(2, 64, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if dead is not None:
        drawn[:, :, dead] = 0
    ones = torch.cat([drawn / drawn.norm(dim=-1, keepdim=True), torch.ones(2, 64, 1)], -1)
    rows = {"gram": drawn, "moments": ones}
    sums = {f"{role}_{name}": each.mT @ each for role in ("query", "key") for name, each in rows.items()}
    sums |= {f"{role}_gradient": torch.ones(2, 6, 12) for role in ("query", "key")}
    return Evidence(tokens=64, input_square=torch.ones(12, dtype=torch.float64), **sums)


def whole(path, **changes) -> EvidenceFile:
    both = {0: evidence(0), 1: replace(evidence(1), **changes)}
    file = EvidenceFile(model="sha256:m", calibration=CALIBRATION, evidence=both)
    file.save(path)
    return EvidenceFile.open(path)


def test_evidence_of_a_calibration_fits(tmp_path):
    """Also with a dead channel, and where few tokens give singular Gram matrices."""
    whole(tmp_path / "e").check_fits(tmp_path / "e", MIXERS)
    few = torch.randn(2, 2, 6, dtype=torch.float64)
    singular = Evidence(tokens=2, query_gram=few.mT @ few, key_gram=1e12 * few.mT @ few)
    for one in (evidence(dead=3), singular):
        EvidenceFile(model="m", calibration=CALIBRATION, evidence={0: one, 1: one}).check_fits(tmp_path, MIXERS)


def spoiled(value: float, at: tuple[int, ...] = (1, 2, 3)) -> torch.Tensor:
    gram = evidence().key_gram.clone()
    gram[at] = value
    return gram


WRONG = {
    "nan": ({"key_gram": spoiled(torch.nan)}, "key_gram of layer 1 has NaN"),
    "infinity": ({"query_gram": spoiled(torch.inf)}, "query_gram of layer 1 has NaN"),
    "huge": ({"key_gram": torch.eye(6).double().expand(2, 6, 6) * 1e308}, "or larger ones than 1e"),
    "zero": ({"key_gram": torch.zeros(2, 6, 6, dtype=torch.float64)}, "is zero, but is a sum over 64 tokens"),
    "random": ({"key_gram": torch.randn(2, 6, 6, dtype=torch.float64)}, "not symmetric"),
    "negative": ({"key_gram": spoiled(-1.0, (0, 1, 1))}, "not symmetric with a non-negative diagonal"),
    "indefinite": ({"key_gram": torch.eye(6).double().flip(0).expand(2, 6, 6) + 1}, "positive semi-definite"),
    "count": ({"key_moments": evidence().key_moments * 2}, "does not count the 64 tokens"),  # type: ignore[operator]
    "shape": ({"key_gram": torch.ones(2, 5, 5, dtype=torch.float64)}, r"is \[2, 5, 5\] .* must be \[2, 6, 6\]"),
    "dtype": ({"key_gram": torch.ones(2, 6, 6)}, "torch.float32, but must be"),
    "squares": ({"input_square": -torch.ones(12, dtype=torch.float64)}, "negative sum of squares"),
    "kinds": ({"key_gram": None}, "more evidence of some layers than of others"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_no_calibration_gives_is_refused(kind, tmp_path):
    changes, words = WRONG[kind]
    with pytest.raises(DataError, match=words):
        whole(tmp_path / "e", **changes).check_fits(tmp_path / "e", MIXERS)


def test_a_missing_layer_is_named(tmp_path):
    file = EvidenceFile(model="m", calibration=CALIBRATION, evidence={1: evidence()})
    with pytest.raises(DataError, match=r"has evidence of layers \[1\], the model has \[0, 1\]"):
        file.check_fits(tmp_path, MIXERS)


@pytest.mark.parametrize(("about", "name"), FILES)
def test_a_file_of_something_unsaid_or_with_a_tensor_that_is_no_evidence_is_refused(about, name, tmp_path):
    whole(tmp_path / "e")
    tensors = load_file(tmp_path / "e") if name is None else {name: torch.ones(1)}
    save_file(tensors, tmp_path / "e", {"slimstate_evidence": "1", "about": json.dumps(about)})
    with pytest.raises(DataError, match=r"evidence file|is not a JSON object"):
        EvidenceFile.open(tmp_path / "e")
