"""An interrupted recovery continues as if nothing had happened, and its run folder belongs to it alone."""

import shutil
from unittest.mock import Mock

import pytest

from launching import options
from recoveries import ALONE, DEFAULT, NAME, PAPER, SHORT, Listener, check_same, interrupt, losses, record_of, stop_at
from slimstate.data.corpus import Corpus
from slimstate.records.training import AdaptationSettings
from slimstate.system.errors import OutputError, PlanError
from slimstate.system.run_folders import locked_folder
from slimstate.training import session
from slimstate.training.run_checkpoints import COMPLETE
from slimstate.training.trainer import StudentTrainer

pytestmark = pytest.mark.slow
RUNS = (
    (NAME, {}, {}), (NAME, {"grad_accum": 4}, {"grad_accum": 1, "save_every": 1}), ("full", DEFAULT, {"full": True}),
    ("controlled", {"control": True}, {}), ("paper", PAPER, {}),
)  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "later"), RUNS)
def test_an_interrupted_recovery_ends_with_the_same_bytes(kind, changes, later, recover, recoveries, tmp_path):
    part, name = "control" if kind == "controlled" else "model", kind if kind == "paper" else NAME
    folder = interrupt(recover, tmp_path / "out", name=name, **changes) / part
    assert (folder / "checkpoint-2" / COMPLETE).exists()
    shutil.copytree(folder / "checkpoint-2", folder / "checkpoint-99")  # as a run that was killed leaves them
    (folder / "checkpoint-99" / COMPLETE).unlink()
    (folder / "checkpoint-98").mkdir()
    listener, expected = Listener(), record_of(recoveries[kind])
    record = recover(name, tmp_path / "out", resume=True, progress=listener, **changes | later)
    assert f"continuing from {folder / 'checkpoint-2'}" in listener.lines
    if "grad_accum" in later:
        assert losses(record) == pytest.approx(losses(expected), rel=1e-5)
        assert record.measured.nats.by_name() == pytest.approx(expected.measured.nats.by_name(), rel=1e-5)
    else:
        check_same(tmp_path / "out", recoveries[kind])
    assert [entry.step for entry in record.log] == [1, 2, 3, 4]
    if kind == "controlled":
        check_same(tmp_path / "out-control", recoveries["control"])
    assert {path.name for path in tmp_path.iterdir()} == {"out", *(["out-control"] if kind == "controlled" else [])}


def test_the_defaults_depend_on_the_model_and_a_plain_resume_continues(pairs, recover, text_file, tmp_path, execute):
    """The record has the numbers that were chosen for the model; given explicitly, they lead to the same weights."""
    folder = interrupt(recover, tmp_path / "out", lr=None, **DEFAULT) / "model"
    words = options(**{**SHORT, "lr": None, "teacher": pairs[NAME][0], "data": text_file, "out": tmp_path / "out"})
    code, out, err = execute("recover", pairs[NAME][1], *words, "--resume")
    assert code == 0, err
    assert all(line in err for line in (f"from {folder / 'checkpoint-2'}", "recovering 4/4  loss ", "kernels: PyTorch"))
    assert "only the mixers" not in err
    record = record_of(tmp_path / "out")
    values = [f"{value:.4f}" for value in record.measured.nats.by_name().values()]
    assert [line in out for line in (*values, f"written to {tmp_path / 'out'}")] == [True] * 4
    settings = record.settings
    assert (settings.lr, settings.min_lr, settings.kd_weight, settings.temperature) == (5e-4, 2.5e-5, 4.0, 2.0)
    assert (settings.full, settings.mixers, settings.lora_targets, settings.unfreeze) == (True, False, None, None)
    assert settings.adaptation == AdaptationSettings(full=True)
    assert record.config.items() >= {"lr": 5e-4, "min_lr": 2.5e-5, "full": True}.items()
    assert "resume" not in record.config
    recover(NAME, tmp_path / "explicit", lr=5e-4, min_lr=2.5e-5, kd_weight=4.0, full=True)
    check_same(tmp_path / "out", tmp_path / "explicit")


def test_it_can_be_interrupted_again_and_again(recover, recoveries, tmp_path):
    """An incomplete checkpoint must not replace a complete one."""
    for step in (1, 2, 3):
        folder = interrupt(recover, tmp_path / "out", step, save_every=1, resume=True) / "model"
        checkpoints = {path.name for path in folder.glob("checkpoint-*")}
        assert checkpoints == {f"checkpoint-{done}" for done in range(max(1, step - 1), step + 1)}
        assert all((folder / name / file).exists() for name in checkpoints for file in (COMPLETE, "model.safetensors"))
        for number in (97, 98, 99):
            (folder / f"checkpoint-{number}").mkdir()
    recover(NAME, tmp_path / "out", resume=True)
    check_same(tmp_path / "out", recoveries[NAME])


def test_what_was_not_saved_is_done_again(recover, recoveries, tmp_path, monkeypatch):
    """Interrupted before the first checkpoint, before there were tokens, and with nothing to continue."""
    interrupt(recover, tmp_path / "early", step=1)
    recover(NAME, tmp_path / "early", resume=True)
    with monkeypatch.context() as patch:
        patch.setattr(Corpus, "collect", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            recover(NAME, tmp_path / "earlier")
    recover(NAME, tmp_path / "earlier", resume=True)
    listener = Listener()
    recover(NAME, tmp_path / "new", resume=True, progress=listener)
    assert f"nothing to resume in {tmp_path / 'new.training'}: starting" in listener.lines
    for out in ("early", "earlier", "new"):
        check_same(tmp_path / out, recoveries[NAME])
    assert {path.name for path in tmp_path.iterdir()} == {"early", "earlier", "new"}


def test_an_unfinished_run_is_not_replaced_or_continued_with_other_settings(recover, recoveries, unseen_text, tmp_path):
    folder = interrupt(recover, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.raises(OutputError, match=r"out.training holds .* `resume` continues it, `force` starts over"):
        recover(NAME, tmp_path / "out")
    for difference, changes in {
        "lr 0.01, now 0.02": {"lr": 2e-2},
        "data .*text.txt, now .*unseen.txt": {"data": unseen_text},
        "model sha256:.*, now sha256:": {"model": recoveries[NAME]},
        "teacher sha256:.*, now None": ALONE,
        "full False, now True": {"full": True},
        "steps 4, now 5": {"steps": 5},
        "seed 0, now 1": {"seed": 1},
        "eval_text None, now .*unseen.txt": {"eval_text": unseen_text},
        "control False, now True": {"control": True},
    }.items():
        with pytest.raises(PlanError, match=f"out.training was started with other settings: {difference}"):
            recover(NAME, tmp_path / "out", resume=True, **changes)
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    listener = Listener()
    recover(NAME, tmp_path / "out", force=True, lr=2e-2, progress=listener)
    assert not [line for line in listener.lines if "continuing" in line]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_costs_the_steps_since_the_last_checkpoint(recover, recoveries, tmp_path, monkeypatch):
    save = StudentTrainer._save_checkpoint

    def full_at_four(self, *arguments):
        save(self, *arguments)
        if self.state.global_step == 4:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")

    with monkeypatch.context() as patch:
        patch.setattr(StudentTrainer, "_save_checkpoint", full_at_four)
        with pytest.raises(RuntimeError, match="unexpected pos"):  # there was space: something else is wrong
            recover(NAME, tmp_path / "out")
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))
        message = r"no space left for .*: free some disk .*; .*out.training keeps checkpoint-2; `resume` continues it"
        with pytest.raises(OutputError, match=message):
            recover(NAME, tmp_path / "out", resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out.training"]
    recover(NAME, tmp_path / "out", resume=True)
    check_same(tmp_path / "out", recoveries[NAME])


@pytest.mark.parametrize("option", ["resume", "force"])
def test_a_folder_of_another_process_or_of_something_else_is_left_alone(option, recover, tmp_path):
    folder = tmp_path / "out.training"
    folder.mkdir()
    with locked_folder(folder), pytest.raises(OutputError, match=r"another process works in .*out.training"):
        recover(NAME, tmp_path / "out", **{option: True})
    assert list(tmp_path.rglob("*")) == [folder]
    for file, content in (("settings.json", '{"theme": "dark"}'), ("thesis.txt", "years of work")):
        (folder / file).write_text(content)
        with pytest.raises(OutputError, match="cannot be used: it has no"):
            recover(NAME, tmp_path / "out", **{option: True})
        assert (folder / file).read_text() == content
        (folder / file).unlink()


@pytest.mark.parametrize("control", [False, True])
def test_a_result_that_was_not_written_is_written_without_training(control, recover, recoveries, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(session.Session, "_write", Mock(side_effect=OutputError("no space left")))
        with pytest.raises(OutputError, match="no space left"):
            recover(NAME, tmp_path / "out", control=control)
    assert [path.name for path in tmp_path.iterdir()] == ["out.training"]
    if not control:
        monkeypatch.setattr(StudentTrainer, "training_step", None)  # not one step more
    record = recover(NAME, tmp_path / "out", control=control, resume=True)
    check_same(tmp_path / "out", recoveries["controlled" if control else NAME])
    assert (record.tokens_per_second is None) != control
    assert {path.name for path in tmp_path.iterdir()} == {"out", *({"out-control"} if control else {})}


def test_an_existing_folder_stays_until_force_has_a_complete_new_one(recover, recoveries, tmp_path):
    shutil.copytree(recoveries[NAME], tmp_path / "out")
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(OutputError, match="exists already"):
        recover(NAME, tmp_path / "out")
    with stop_at(1):
        recover(NAME, tmp_path / "out", force=True)
    assert (tmp_path / "out" / "precious").read_text() == "x"
    recover(NAME, tmp_path / "out", force=True)
    check_same(tmp_path / "out", recoveries[NAME])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
