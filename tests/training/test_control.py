"""A control is the uncut model with the same training: trained once, used again, and perhaps the teacher."""

import math

import pytest
from safetensors.torch import load_file, save_file

import slimstate
from recoveries import ALONE, NAME, Listener, check_same, interrupt, record_of, weights_of
from slimstate.checkpoints.reader import Checkpoint
from slimstate.records.training import Teacher
from slimstate.system.errors import OutputError, PlanError
from slimstate.training import tokens
from slimstate.training.run_checkpoints import COMPLETE

pytestmark = pytest.mark.slow
IMPOSSIBLE = [
    ({"control_teaches": True, "kd_weight": 0.0}, "`control_teaches` needs a `kd_weight` above 0"),
    ({"control_teaches": True, "cache_teacher": "cache"}, "`cache_teacher` needs a teacher that exists"),
    ({"control_teaches": True, **ALONE}, "`control_teaches` trains the uncut model too: give it with `teacher`"),
    ({"control_teaches": True, "model": "UNCUT"}, "`control_teaches` needs a cut model, and .* is the uncut one"),
    ({"control_out": "control"}, "`control_out` needs `control` or `control_teaches`"),
]


def test_the_uncut_model_gets_the_same_training(recoveries, recover, pairs, tmp_path):
    """Beside the cut model, or alone: the same control."""
    record, control = record_of(recoveries["controlled"]), record_of(recoveries["control"])
    assert control.fingerprint == record.teacher.fingerprint == control.teacher.fingerprint
    assert (control.settings, control.corpus) == (record.settings, record.corpus)
    assert record.measured.nats.control == control.measured.nats.after
    assert record.measured.nats.uncut == control.measured.nats.before
    assert record.measured.closed.keys() == {"uncut", "control"}
    assert weights_of(recoveries["controlled"]) == weights_of(recoveries[NAME])
    recover(NAME, tmp_path / "alone", model=pairs[NAME][0], control=True)
    check_same(tmp_path / "alone", recoveries["control"])
    assert [path.name for path in tmp_path.iterdir()] == ["alone"]


def test_recall_is_compared_over_the_same_sequences(recover, unseen_text, tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "recall_tokens", lambda: 0)  # also on little text
    measured = recover(NAME, tmp_path / "out", eval_text=unseen_text, eval_tokens=640, control=True).measured
    parts, card = measured.recall_residuals, (tmp_path / "out" / "README.md").read_text()
    for stage in ("before", "uncut", "control"):
        difference, error = measured.recall_difference(stage)
        assert difference == measured.recall["after"][0] - measured.recall[stage][0]
        pairs = zip(parts["after"], parts[stage], strict=True)
        assert error == pytest.approx(math.hypot(*(after - before for after, before in pairs)))
        assert f"± {error:.2g}" in card
    assert "Beside the uncut model its associative recall is at" in card
    assert " in recall" in measured.gain


def test_a_control_with_the_same_settings_is_used_again(recoveries, recover, unseen_text, tmp_path):
    control, listener = recoveries["control"], Listener()
    before = {path: path.stat().st_mtime_ns for path in control.iterdir()}
    record = recover(NAME, tmp_path / "out", control=True, control_out=control, progress=listener)
    assert f"control: {control}, trained before with the same settings" in listener.lines
    assert record.measured == record_of(recoveries["controlled"]).measured
    others = {"lr 0.01, now 0.005": {"lr": 5e-3}, "steps 4, now 5": {"steps": 5}}
    others["tokens sha256:.*, now sha256:"] = {"eval_text": unseen_text}
    others["kd_weight 4.0, now 0.5"] = {"kd_weight": 0.5}
    for difference, changes in others.items():
        with pytest.raises(OutputError, match=f"is a control with other settings: {difference}"):
            recover(NAME, tmp_path / "other", control=True, control_out=control, **changes)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert before == {path: path.stat().st_mtime_ns for path in control.iterdir()}


def test_a_control_that_teaches_is_two_commands_in_one(pairs, recover, tmp_path):
    """The uncut model learns from the text alone, as without a teacher; then it is the teacher."""
    tuned = recover(NAME, tmp_path / "tuned", model=pairs[NAME][0], full=True, **ALONE)
    taught = recover(NAME, tmp_path / "taught", teacher=tmp_path / "tuned", full=True)
    listener = Listener()
    record = recover(NAME, tmp_path / "out", control_teaches=True, full=True, progress=listener)
    control, card = record_of(tmp_path / "out-control"), (tmp_path / "out" / "README.md").read_text()
    line = f"control: the uncut model is trained on the text alone, into {control.out}; then it teaches"
    assert line in listener.lines
    assert (record.control_teaches, control.control_teaches, taught.control_teaches) == (True, False, False)
    titles = {"uncut": "the uncut model", "control": "the uncut model fine-tuned on the text alone, which taught"}
    lines = list(record.measured.gaps(titles))
    assert len(lines) == 2
    assert all(f"\n{line[0].upper()}{line[1:]}.\n" in card for line in lines)
    assert "with the same fine-tuning" not in card
    assert (control.teacher, record.teacher.fingerprint) == (None, taught.teacher.fingerprint)
    check_same(tmp_path / "out-control", tmp_path / "tuned")
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "taught")
    assert record.teacher == Teacher(model=control.out, fingerprint=Checkpoint.open(control.out).fingerprint)
    assert record.measured.nats.uncut == tuned.measured.nats.before
    assert record.measured.nats.control == tuned.measured.nats.after == taught.measured.nats.uncut
    assert {name for name in record.config if name.startswith("control")} == {"control_teaches"}

    options = {"control_out": tmp_path / "tuned", "full": True}
    folder = interrupt(recover, tmp_path / "again", control_teaches=True, **options)
    assert not (folder / "control").exists()
    with pytest.raises(PlanError, match="was started with other settings: control teaches, now True"):
        recover(NAME, tmp_path / "again", control=True, full=True, resume=True)
    recover(NAME, tmp_path / "again", control_teaches=True, resume=True, **options)
    assert weights_of(tmp_path / "again") == weights_of(tmp_path / "out")
    with pytest.raises(OutputError, match="is a control with other settings: teacher False, now True"):
        recover(NAME, tmp_path / "other", control=True, **options)
    assert {path.name for path in tmp_path.iterdir()} == {"tuned", "taught", "out", "out-control", "again"}
    with pytest.raises(OutputError, match=r"is a control with other settings: lr 0.01, now 0.02; remove it, or choose"):
        recover(NAME, tmp_path / "other", control_teaches=True, lr=2e-2, **options)
    softer = {"kd_weight": 1.0, "temperature": 1.0}  # without effect on the control
    recover(NAME, tmp_path / "soft", control_teaches=True, **options, **softer)
    assert weights_of(tmp_path / "soft") != weights_of(tmp_path / "out")


def test_a_control_with_a_teacher_of_weight_zero_can_have_been_trained_without_one(pairs, recover, tmp_path):
    alone = recover(NAME, tmp_path / "alone", model=pairs[NAME][0], **ALONE)
    record = recover(NAME, tmp_path / "out", control=True, control_out=tmp_path / "alone", kd_weight=0.0)
    assert record.measured.nats.control == alone.measured.nats.after


def test_a_control_that_changed_does_not_teach_the_rest(recover, tmp_path):
    options = {"control_teaches": True, "control_out": tmp_path / "control"}
    recover(NAME, tmp_path / "first", **options)
    interrupt(recover, tmp_path / "out", **options)
    for path in (tmp_path / "control").glob("*.safetensors"):
        save_file({name: weight + 1 for name, weight in load_file(path).items()}, path, {"format": "pt"})
    with pytest.raises(PlanError, match=r"was started with another control as the teacher; `force` starts over$"):
        recover(NAME, tmp_path / "out", resume=True, **options)
    recover(NAME, tmp_path / "out", force=True, **options)


def test_an_unfinished_run_survives_the_refusal_of_a_control(recoveries, recover, tmp_path):
    folder = interrupt(recover, tmp_path / "out")
    with pytest.raises(OutputError, match="is a control with other settings"):
        recover(NAME, tmp_path / "out", control=True, control_out=recoveries["control"], lr=2e-2, force=True)
    assert (folder / "model" / "checkpoint-2" / COMPLETE).exists()


@pytest.mark.parametrize("place", ["out", "out/control", "out.training", "out.training/control", "."])
def test_a_control_needs_a_folder_of_its_own(place, recover, tmp_path):
    with pytest.raises(OutputError, match=r"the control.s folder .* overlaps .*: choose another `control_out`"):
        recover(NAME, tmp_path / "out", control=True, control_out=tmp_path / place)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("options", "message"), IMPOSSIBLE)
def test_a_control_that_cannot_be_trained_or_teach_is_refused(options, message, recover, pairs, tmp_path):
    """Also by a dry run."""
    options = {"teacher": pairs[NAME][0], **options}
    model = pairs[NAME][0 if options.pop("model", None) else 1]
    with pytest.raises(PlanError, match=message):
        recover(NAME, tmp_path / "out", model=model, **options)
    with pytest.raises(PlanError, match=message):
        slimstate.preview(model, progress=False, **options)
    assert not list(tmp_path.iterdir())


def test_a_dry_run_mentions_the_control(pairs):
    ways = {"control": "in the same way", "control_teaches": "first, on the text alone, and then teach"}
    for option, how in ways.items():
        listener = Listener()
        slimstate.preview(pairs[NAME][1], teacher=pairs[NAME][0], progress=listener, **{option: True})
        assert f"control: the uncut model would also be trained {how}" in listener.lines


def test_the_teacher_is_by_default_the_model_before_the_cut(pairs, recover, recoveries, tmp_path):
    listener = Listener()
    record = recover(NAME, tmp_path / "out", teacher=None, progress=listener)
    assert f"teacher: {pairs[NAME][0]}, which the model was cut from" in listener.lines
    assert record.teacher.fingerprint == Checkpoint.open(pairs[NAME][0]).fingerprint
    check_same(tmp_path / "out", recoveries[NAME])
