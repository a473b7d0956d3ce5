"""Files that 0.1 wrote, one of each kind: today's types read them, lose nothing of them, and write them so again.

All are of one toy model of 10 464 parameters, `toy`, and of what was made of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slimstate.core.evidence import EvidenceFile
from slimstate.core.plan import Basis, Plan, Selection
from slimstate.records.base import Record
from slimstate.records.benchmark import CalibrationRecord, DecodeRecord, MixerRecord, ModelRecord
from slimstate.records.evaluation import EvaluationRecord
from slimstate.records.plan import PlanRecord
from slimstate.records.states import FiltersRecord, TraceRecord
from slimstate.records.sweep import SweepRecord
from slimstate.records.training import RecoveryRecord, TrainingRecord

FOLDER = Path(__file__).parent / "v0_1"
# the type that reads each file
READERS: dict[str, type[Record]] = {
    "plan.json": PlanRecord,
    "plan-copy.json": PlanRecord,
    "plan-directions.json": PlanRecord,
    "sweep.json": SweepRecord,
    "trace.json": TraceRecord,
    "filters.json": FiltersRecord,
    "evaluation.json": EvaluationRecord,
    "recovery.json": RecoveryRecord,
    "training.json": TrainingRecord,
    "bench-mixer.json": MixerRecord,
    "bench-model.json": ModelRecord,
    "bench-decode.json": DecodeRecord,
    "bench-calibrate.json": CalibrationRecord,
}


def lost(old: Any, new: Any, place: str = "") -> list[str]:
    """Where what was written then is not there any more; what is null may be missing."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [words for name, value in old.items() for words in lost(value, new.get(name), f"{place}.{name}")]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [words for number, (a, b) in pairs for words in lost(a, b, f"{place}[{number}]")]
    return [] if old == new else [f"{place}: {old} is now {new}"]


def test_there_is_a_reader_for_every_file():
    assert READERS.keys() == {path.name for path in FOLDER.glob("*.json")}


@pytest.mark.parametrize("name", READERS)
def test_a_file_of_0_1_is_read_and_written_again_with_all_it_held(tmp_path, name):
    record = READERS[name].read(FOLDER / name)
    record.write(tmp_path / name)
    again = READERS[name].read(tmp_path / name)
    assert again.to_json() == record.to_json()
    assert lost(json.loads((FOLDER / name).read_text()), json.loads((tmp_path / name).read_text())) == []


def test_every_kind_says_what_it_said():
    """By attribute: a number of each file."""
    sweep, trace = SweepRecord.read(FOLDER / "sweep.json"), TraceRecord.read(FOLDER / "trace.json")
    assert (sweep.width, sweep.rows[sweep.recommended.row].method, len(sweep.rows)) == (8, "l1", 5)
    assert (trace.cut.method, trace.capacity, trace.bounds.states, trace.bounds.violations) == ("drrqr", 4, 16, 0)
    assert FiltersRecord.read(FOLDER / "filters.json").filters["1"]["key"][0][0][0] == -0.0155
    evaluation = EvaluationRecord.read(FOLDER / "evaluation.json")
    assert evaluation.baseline.lm_eval.tasks["lambada_openai"].samples == 2
    names = [measure.name for measure in evaluation.measures()]
    names.remove("bits per byte")  # which 0.1 measured and did not compare
    assert names == [row.measure for row in evaluation.compared]
    assert (evaluation.word_perplexity, evaluation.words, sweep.uncut.word_perplexity) == (None, None, None)
    recovery = RecoveryRecord.read(FOLDER / "recovery.json")
    assert (recovery.teacher.model, recovery.settings.adaptation.full, len(recovery.log)) == ("toy", False, 4)
    assert TrainingRecord.read(FOLDER / "training.json").parameters == 10464
    assert [row.key_dim for row in DecodeRecord.read(FOLDER / "bench-decode.json").rows] == [8, 8, 4, 4]


def test_a_copy_of_a_plan_says_where_the_cut_model_lies():
    whole, copy = PlanRecord.read(FOLDER / "plan.json"), PlanRecord.read(FOLDER / "plan-copy.json")
    assert (whole.folder, copy.folder) == (None, "slim")
    assert copy.same_cut(whole)
    assert not PlanRecord.read(FOLDER / "plan-directions.json").same_cut(whole)
    assert (copy.model.source, copy.model.loader.library, copy.calibration.samples) == ("toy", "fla", 4)


@pytest.mark.parametrize(("name", "choice"), [("plan.json", Selection), ("plan-directions.json", Basis)])
def test_a_plan_of_0_1_gives_the_same_bytes_again(name, choice):
    text = (FOLDER / name).read_text()
    plan = Plan.from_json(text)
    assert {type(entry) for entry in plan.selections.values()} == {choice}
    assert plan.to_json() + "\n" == text


def test_evidence_of_0_1_is_read_and_written_again(tmp_path):
    found = EvidenceFile.open(FOLDER / "evidence.safetensors")
    assert (sorted(found.evidence), found.evidence[0].tokens, found.calibration["data"]) == ([0, 1], 128, "text.txt")
    found.save(tmp_path / "evidence.safetensors")
    again = EvidenceFile.open(tmp_path / "evidence.safetensors")
    assert (again.model, again.calibration) == (found.model, found.calibration)
    for layer, evidence in found.evidence.items():
        tensors = dict(again.evidence[layer].tensors())
        assert tensors.keys() == {"query_gram", "key_gram", "input_square"}
        for name, tensor in evidence.tensors():
            assert torch.equal(tensors[name], tensor)
