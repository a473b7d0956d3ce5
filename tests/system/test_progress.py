"""Progress: messages are logged, shown as lines or as bars, with an estimate of the remaining time."""

import io
import logging
from contextlib import contextmanager

import pytest

import recoveries
import slimstate
from slimstate.evaluation.associative_recall import recall_tokens
from slimstate.system import console, progress, tested_versions
from slimstate.system.console import TerminalReporter
from slimstate.system.progress import Pace, Reporter, TimedReporter


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(progress.Pace.__init__, "__defaults__", (0, 0, None, (), 0, lambda: now[0]))
    return now


def test_without_a_reporter_messages_are_logged(caplog):
    reporter = Reporter()
    with caplog.at_level(logging.INFO, logger="slimstate"):
        reporter.say("reading")
        with reporter.table(("a", "b")) as add_row:
            add_row(("1", "2"))
    assert [record.message for record in caplog.records] == ["reading", "a  b", "1  2"]
    assert list(reporter.track("abc", "letters")) == list("abc")


def test_the_remaining_time_counts_the_steps_of_this_run_only(clock):
    pace = Pace("training", 100)
    for clock[0], done, left in ((5, 40, ""), (15, 50, "0:00:50 left"), (25, 100, "")):
        pace.update(done)
        assert pace.left() == left
    assert pace.line("loss 1") == "training 100/100  loss 1"
    assert Pace("reading", None).line("") == "reading 0"
    layer = Pace("layer 0", 10, 30, clock=iter((0.0, 5.0, 5.0)).__next__)
    layer.update(0)
    layer.update(5)
    assert layer.left() == "0:00:35 left"


def test_the_remaining_time_within_other_work_is_that_of_the_other_work(clock):
    outer = Pace("models", 3)
    for clock[0], done in ((0, 0), (20, 1)):
        outer.update(done)
    inner = Pace("windows", 10, outer=outer)
    for clock[0], done in ((20, 0), (25, 5)):
        inner.update(done)
    assert inner.left() == outer.left() == "0:00:35 left"


def test_the_remaining_time_includes_work_that_follows_once_a_token_was_timed(clock, capsys):
    reporter = TerminalReporter()
    with reporter.then("the tasks"), reporter.then("the distillation", 100):
        for count, tokens in ((4, 5), (2, 0)):  # 3 seconds for a token, and steps that say nothing about tokens
            for _ in reporter.track(range(count), "windows", count, tokens):
                clock[0] += 15
    assert capsys.readouterr().err.splitlines() == [
        "windows 1/4  0:05:45 left, then the tasks", "windows 2/4  0:05:30 left, then the tasks",
        "windows 3/4  0:05:15 left, then the tasks", "windows 4/4",
        "windows 1/2  0:05:15 left, then the tasks", "windows 2/2",
    ]  # fmt: skip


class Recorder(TimedReporter):
    def __init__(self) -> None:
        super().__init__()
        self.paces: list[Pace] = []
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    @contextmanager
    def shown(self, pace: Pace):
        self.paces.append(pace)
        yield lambda done, note: pace.update(done)

    def tokens(self, label: str) -> float:
        return sum(pace.total * pace.tokens for pace in self.paces if pace.label.startswith(label))


def test_what_follows_a_calibration_costs_what_was_announced(folders, text_file, tmp_path):
    reporter, options = Recorder(), {"reconstruct_steps": 4, "reconstruct_samples": 8, "reconstruct_length": 64}
    options |= {"reconstruct": True, "distill": 3, "eval_text": text_file, "eval_tokens": 512, "progress": reporter}
    slimstate.prune(folders["delta_net-plain"], tmp_path / "slim", key_dim=8, data=text_file, **options)
    assert reporter.paces[0].label == "calibrating"
    announced = dict(reporter.paces[0].follows)
    assert announced["the distillation"] == reporter.tokens("distilling")
    assert announced["the measurement"] == reporter.tokens("evaluating") + 2 * recall_tokens(max_tokens=512)
    assert announced["the reconstruction"] == pytest.approx(reporter.tokens("layer"), rel=0.75)


def test_what_follows_in_a_recovery_and_a_sweep_costs_what_was_announced(folders, text_file, tmp_path):
    cut, reporter = recoveries.cut(folders["delta_net-plain"], tmp_path / "slim"), Recorder()
    brief = {**recoveries.SHORT, "data": text_file, "control": True}
    slimstate.recover(cut, tmp_path / "out", **brief, cache_teacher=tmp_path / "cache", progress=reporter)
    first = reporter.paces[0]
    assert first.label.startswith("caching")
    assert [work for work, _ in first.follows] == ["the training", "the measurement", "the recovery"]
    announced = dict(first.follows)
    assert announced["the training"] + announced["the recovery"] == reporter.tokens("recovering")
    reporter = Recorder()
    options = {"samples": 4, "length": 64, "text_length": 64, "max_tokens": 256, "recall": 0, "progress": reporter}
    options |= {"text": text_file, "data": text_file, "methods": ["drrqr"], "key_dims": [8]}
    slimstate.sweep(folders["delta_net-plain"], tmp_path / "sweep", **options)
    assert dict(reporter.paces[0].follows)["the measurement"] == reporter.tokens("uncut") + reporter.tokens("row")


def test_the_time_left_of_an_evaluation_includes_the_baseline_unless_states_are_rounded(folders, text_file):
    for state_dtype, is_slow in (("float32", False), ("bfloat16", True)):
        reporter, (model, other) = Recorder(), (folders[f"delta_net-{name}"] for name in ("plain", "tied"))
        options = {"length": 64, "max_tokens": 128, "state_dtype": state_dtype, "progress": reporter}
        slimstate.evaluate(model, text_file, baseline=other, **options)
        first, second = reporter.paces
        assert first.follows == (("the baseline", 0 if is_slow else second.total * second.tokens),)
        assert any("`state_every`" in line for line in reporter.lines) == is_slow


def test_work_that_follows_is_named_beside_the_remaining_time(clock, capsys):
    reporter = TerminalReporter()
    with reporter.then("the measurement"), reporter.then("the distillation"):
        for _ in reporter.track(range(4), "windows", 4):
            clock[0] += 11
    for _ in reporter.track(range(4), "windows", 4):
        clock[0] += 11
    first, *_ = lines = capsys.readouterr().err.splitlines()
    assert first == "windows 1/4  0:00:33 left, then the distillation, then the measurement"
    assert [line for line in lines if "then" in line] == lines[: len(lines) // 2 - 1]


@pytest.mark.parametrize(("verbosity", "count"), [(-1, 0), (0, 4), (1, 4)])
def test_outside_of_a_terminal_there_is_a_line_now_and_then(verbosity, count, clock, capsys):
    reporter = TerminalReporter(verbosity)
    for _ in reporter.track(range(50), "batches", 50):
        clock[0] += 0.3  # a line after ten seconds
    with reporter.meter("training", 10) as update:
        for step in range(8, 11):
            update(step, "loss 1.0")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == count - (count > 0), lines
    if verbosity == 0:
        assert lines == ["batches 34/50  0:00:05 left", "training 8/10  loss 1.0", "training 10/10  loss 1.0"]
    assert all(line[2] == ":" for line in lines) == (verbosity != 0)


def test_in_a_terminal_bars_are_shown_below_the_table():
    reporter, output = TerminalReporter(), io.StringIO()
    reporter.console = console.Console(file=output, force_terminal=True, width=100)
    with reporter.table(("model", "nats")) as add_row, reporter.meter("training", 2) as update:
        add_row(("slim", "1.5"))
        update(1, "loss 1.0")
        assert [task.description for task in reporter.bars.tasks] == ["training"]
        assert list(reporter.track(range(3), "measuring", 3)) == [0, 1, 2]
        assert len(reporter.bars.tasks) == 1
    with reporter.waiting("loading"):
        pass
    assert "slim" in output.getvalue()
    assert reporter.bars is None


def test_packages_newer_than_tested_are_named_once(monkeypatch, recwarn):
    monkeypatch.setattr(tested_versions, "version", lambda name: "2.99.1+cpu" if name == "torch" else "0.1")
    tested_versions.warn_about_untested.cache_clear()
    for _ in range(2):
        tested_versions.warn_about_untested()
    assert [str(warning.message)[:32] for warning in recwarn] == ["torch 2.99.1+cpu is newer than 2"]
    tested_versions.warn_about_untested.cache_clear()
