"""A recovery trains as a loop written by hand, measures as `evaluate` does, and stops where the loss is not finite."""

import itertools
import math
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import slimstate
import tiny
from recoveries import GATED, NAME, TIED, Listener, check_same, interrupt, losses, record_of, weights_of
from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.standard_errors import standard_error
from slimstate.data.corpus import Corpus, Schedule
from slimstate.kernels.distillation import distilled_loss
from slimstate.models.load import load
from slimstate.records.parts import Text
from slimstate.records.schema import from_json
from slimstate.system.errors import DataError, TrainingError
from slimstate.training import trainer
from slimstate.training.adaptation import adaptation_of, trainable
from slimstate.training.options import RecoverOptions
from slimstate.training.progress import TrainingProgress
from slimstate.training.run_checkpoints import COMPLETE
from slimstate.training.tokens import MIN_GAP
from slimstate.workflows.options import RecoverConfig

pytestmark = pytest.mark.slow
MEASURED = (  # weights of bfloat16 are rounded for the file, those of a tied model stored once and used twice
    (NAME, 32, 500, {"control": True}), (NAME, 1030, None, {}), ("bfloat16", 32, 256, {}),
    ("bfloat16", 32, 256, {"full": True}), (TIED[0], 32, 256, {"full": True}),
)  # fmt: skip


@pytest.mark.parametrize(("name", "full"), [(NAME, True), (GATED, False)])
def test_training_equals_a_loop_written_by_hand(name, full, pairs, recover, text_file, tmp_path):
    """Losses, learning rates and weights; and the text, of which there is much to learn, is learnt."""
    steps, lr, least, weight, temperature = 13, 5e-3, 1e-3, 0.5, 3.0
    options = {"lr": lr, "min_lr": least, "warm_up": 0.1, "kd_weight": weight, "temperature": temperature}
    record = recover(name, tmp_path / "out", steps=steps, full=full, **options)
    uncut, source = (load(folder, device="cpu").model for folder in pairs[name])
    corpus = Corpus.collect(tiny.tokenizer(), str(text_file), 32, 4 * steps, 1, tmp_path / "tokens")
    schedule = Schedule(corpus, 4 * steps, seed=0)
    config = RecoverConfig.from_values({"full": full, "lora": not full})
    adaptation = adaptation_of(config, Checkpoint.open(pairs[name][1]))
    torch.manual_seed(0)
    model = adaptation.attach(source).train()
    optimizer = torch.optim.AdamW(trainable(model).values(), lr=lr, weight_decay=0.0)
    warm = int(0.1 * steps)
    for step, entry in enumerate(record.log):
        ids = torch.stack([schedule[4 * step + number]["input_ids"] for number in range(4)])
        with torch.no_grad():
            theirs = (uncut(input_ids=ids, use_cache=False).logits[:, :-1] / temperature).softmax(-1)
        ours = model(input_ids=ids, use_cache=False).logits[:, :-1]
        cross_entropy = F.cross_entropy(ours.flatten(0, 1), ids[:, 1:].flatten())
        apart = theirs * (theirs.log() - (ours / temperature).log_softmax(-1))
        divergence = temperature**2 * apart.sum(-1).mean()
        loss = cross_entropy + weight * divergence
        expected = [float(part.detach()) for part in (loss, cross_entropy, divergence)]
        # Adam amplifies the rounding of a gradient that is almost zero, so the two drift apart slowly
        tolerance = 1e-3 if step else 1e-5
        assert [entry.loss, entry.cross_entropy, entry.distillation] == pytest.approx(expected, rel=tolerance)
        cosine = (1 + math.cos(math.pi * (step - warm) / (steps - warm))) / 2
        rate = lr * step / warm if step < warm else least + (lr - least) * cosine
        assert entry.learning_rate == pytest.approx(rate, rel=1e-5)
        optimizer.param_groups[0]["lr"] = rate
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable(model).values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    trained = {part: parameter.detach() for part, parameter in trainable(model).items()}
    weights = adaptation.merge(load(pairs[name][1], device="cpu").model, trained)
    before, after = Checkpoint.open(pairs[name][1]), Checkpoint.open(tmp_path / "out")
    for part, tensor in weights.items():
        assert (after.read(part) - tensor).norm() < 0.05 * (tensor - before.read(part)).norm(), part
    assert sum(losses(record)[-4:]) < sum(losses(record)[:4]) - 1
    assert record.measured.nats.after < record.measured.nats.before


@pytest.mark.parametrize(("name", "length", "tokens", "changes"), MEASURED)
def test_the_numbers_are_those_of_evaluate(name, length, tokens, changes, pairs, recover, unseen_text, tmp_path):
    options = {"batch_size": 1, "steps": 2, "length": length, "eval_text": unseen_text, "eval_tokens": tokens}
    record = recover(name, tmp_path / "out", **options, **changes)
    folders = {"before": pairs[name][1], "after": tmp_path / "out", "uncut": pairs[name][0]}
    folders |= {"control": tmp_path / "out-control"} if "control" in changes else {}
    measured, nats = record.measured, record.measured.nats.by_name()
    assert nats.keys() == folders.keys()
    for kind, folder in folders.items():
        sizes = {"length": min(1024, length), "max_tokens": tokens}
        evaluation = slimstate.evaluate(folder, unseen_text, progress=False, **sizes)
        assert nats[kind] == pytest.approx(evaluation.nats_per_token, rel=1e-6)
        assert standard_error(evaluation.window_nats) == evaluation.nats_error
        assert measured.window_nats[kind] == pytest.approx(evaluation.window_nats, rel=1e-5)
        assert measured.perplexity[kind] == pytest.approx(evaluation.perplexity, rel=1e-6)
        assert measured.word_perplexity[kind] == pytest.approx(evaluation.word_perplexity, rel=1e-4)
        assert measured.bits_per_byte[kind] == pytest.approx(evaluation.bits_per_byte, rel=1e-6)
        for count in ("text", "tokens", "words", "bytes"):
            assert getattr(measured, count) == getattr(evaluation, count)
    for goal, share in measured.closed.items():
        gap = nats["before"] - nats[goal]
        error = standard_error(measured.window_nats["before"], measured.window_nats[goal]) or 0
        assert (share is None) == (gap <= max(MIN_GAP, 2 * error))
        assert share is None or share * gap == pytest.approx(nats["before"] - nats["after"])
    assert record.corpus.held_out == 0


def test_without_a_text_to_measure_on_windows_are_held_out(pairs, recover, text_file, tmp_path):
    record = recover(NAME, tmp_path / "out", steps=16, batch_size=8, length=16)
    corpus = Corpus.collect(tiny.tokenizer(), str(text_file), 16, 128, 2, tmp_path / "tokens")
    assert record.corpus == from_json(Text, corpus.describe())
    ids = corpus.held_out_windows.long()
    assert record.measured.tokens == ids.numel() == 32
    for kind, folder in {"before": pairs[NAME][1], "after": tmp_path / "out", "uncut": pairs[NAME][0]}.items():
        with torch.inference_mode():
            predicted = load(folder, device="cpu").model(input_ids=ids, use_cache=False).logits[:, :-1]
        nats = float(F.cross_entropy(predicted.flatten(0, 1), ids[:, 1:].flatten()))
        assert record.measured.nats.by_name()[kind] == pytest.approx(nats, rel=1e-5)


def test_training_in_bfloat16_differs_by_rounding_only(recover, recoveries, tmp_path):
    record = recover(NAME, tmp_path / "out", dtype="bfloat16")
    assert losses(record) == pytest.approx(losses(record_of(recoveries[NAME])), rel=0.02)
    assert {info.dtype for info in Checkpoint.open(tmp_path / "out").tensors.values()} == {"F32"}
    assert record.settings.dtype == "bfloat16"


def test_a_teacher_of_weight_zero_is_only_measured(recover, recoveries, tmp_path):
    record, alone = recover(NAME, tmp_path / "out", kd_weight=0), record_of(recoveries["alone"])
    assert losses(record) == losses(alone)
    assert weights_of(tmp_path / "out") == weights_of(recoveries["alone"])
    assert all(entry.loss == entry.cross_entropy for entry in record.log)
    assert record.measured.nats.by_name().keys() - alone.measured.nats.by_name().keys() == {"uncut"}


def test_gradient_accumulation_changes_nothing(recover, recoveries, tmp_path):
    record, expected = recover(GATED, tmp_path / "out", grad_accum=2), record_of(recoveries[GATED])
    for part in ("loss", "cross_entropy", "distillation", "grad_norm"):
        values = [[getattr(entry, part) for entry in each.log] for each in (record, expected)]
        assert values[0] == pytest.approx(values[1], rel=1e-5, abs=1e-5)
    assert record.measured.nats.after == pytest.approx(expected.measured.nats.after, abs=1e-5)


@pytest.mark.parametrize("free", [0, 2**40])
def test_a_batch_that_does_not_fit_is_halved_and_changes_nothing(free, recover, recoveries, tmp_path, monkeypatch):
    """By the measured size before the first step, or because memory runs out in the second one."""
    listener, forward, calls = Listener(), trainer.Student.forward, []

    class Memory(trainer.DeviceMemory):
        def __init__(self, device):
            self.device, self.is_measured = device, True

        def free_bytes(self):
            return free

        def peak_bytes(self, work):
            work()
            return 2**20

    monkeypatch.setattr(trainer, "DeviceMemory", Memory)

    def run(self, input_ids, place):
        calls.append(len(input_ids))
        if len(calls) > 3 and len(input_ids) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, input_ids, place)

    monkeypatch.setattr(trainer.Student, "forward", run)
    monkeypatch.setattr(RecoverOptions, "windows_at_once", 4)
    record, expected = recover(GATED, tmp_path / "out", progress=listener), record_of(recoveries[GATED])
    assert calls[:4] == ([1, 1, 1, 1] if not free else [1, 1, 4, 4])
    assert ("out of memory: from here on at most 1 window at once" in listener.lines) == bool(free)
    assert losses(record) == pytest.approx(losses(expected), rel=1e-5)
    assert record.measured.nats.after == pytest.approx(expected.measured.nats.after, abs=1e-5)


def test_the_time_of_the_rest_is_announced_once_some_steps_were_timed():
    times, listener = iter([0, 100, 200, 203, 205]), Listener()  # at the start, after two slow steps, and later
    options, updates = RecoverOptions(steps=102), []
    progress = TrainingProgress(options, lambda done, note: updates.append(note), listener, lambda: next(times))
    progress.begin(0)
    for done in range(1, 6):
        progress.end_step(done)
    assert listener.lines == ["the remaining 97 steps will take about 0:01:37"]
    progress.log(6, 1.0)
    assert updates == [f"loss 1.0000  {4 * options.tokens_per_step / 5:,.0f} tokens/s"]


def test_another_seed_is_another_recovery(recover, recoveries, tmp_path):
    other = recover(NAME, tmp_path / "other", seed=1)
    assert weights_of(tmp_path / "other") != weights_of(recoveries[NAME])
    assert losses(other)[0] != losses(record_of(recoveries[NAME]))[0]  # other windows come first


def test_a_cached_teacher_is_loaded_only_to_measure(recover, pairs, recoveries, tmp_path, monkeypatch):
    """And it teaches the same."""
    loading = Mock(wraps=load)
    for module in ("training.session", "training.teacher", "models.load"):
        monkeypatch.setattr(f"slimstate.{module}.load", loading)
    for out, loads in (("first", 2), ("second", 1)):
        loading.reset_mock()
        record = recover(NAME, tmp_path / out, cache_teacher=tmp_path / "cache", cache_top_k=257)
        assert [Path(call.args[0]) for call in loading.call_args_list].count(pairs[NAME][0]) == loads
    check_same(tmp_path / "first", tmp_path / "second")
    assert losses(record) == pytest.approx(losses(record_of(recoveries[NAME])), rel=1e-3)
    assert record.settings.top_k == 257
    few = recover(NAME, tmp_path / "few", cache_teacher=tmp_path / "few tokens", cache_top_k=4)
    assert losses(few)[0] < losses(record)[0]  # the tokens beyond the top four count as one
    with pytest.raises(DataError, match="a teacher cache of another top_k: 4, not 257"):
        recover(NAME, tmp_path / "third", cache_teacher=tmp_path / "few tokens", cache_top_k=257)


def test_text_that_runs_out_is_read_again_in_epochs_and_eval_tokens_are_held_out_of_it_exactly(recover, tmp_path):
    text, listener = tmp_path / "some.txt", Listener()
    text.write_text(tiny.text(32 * 11))
    record = recover(NAME, tmp_path / "out", data=text, progress=listener)
    line = f"{text} has 10 windows of 32 tokens to train on, the training takes 16: 1.60 epochs"
    assert listener.lines.count(line) == 1
    assert record.epochs == 1.6
    with pytest.raises(DataError, match=f"{line}; with `no_repeat` at most `steps` 2"):
        recover(NAME, tmp_path / "again", data=text, no_repeat=True)
    assert "measuring on 32 held-out tokens, too few to compare models: hold out more (`eval_tokens`)" in listener.lines
    once = recover(NAME, tmp_path / "again", data=text, no_repeat=True, steps=2)
    assert once.epochs == 1
    assert "no window twice" in (tmp_path / "again" / "README.md").read_text()
    assert recover(NAME, tmp_path / "held", data=text, eval_tokens=70).measured.tokens == 96
    with pytest.raises(DataError, match="has 11 of the 12 windows of 32 tokens that are needed"):
        recover(NAME, tmp_path / "more", data=text, eval_tokens=32 * 11)


def test_the_losses_are_written_for_tensorboard(recover, recoveries, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    interrupt(recover, tmp_path / "out", report_to="tensorboard")
    record = recover(NAME, tmp_path / "out", report_to="tensorboard", resume=True)
    values = {}
    for path in (tmp_path / "out" / "runs").rglob("events*"):
        events = EventAccumulator(str(path)).Reload()
        for tag in ("train/loss", "train/distillation"):
            values |= {(tag, event.step): event.value for event in events.Scalars(tag)}
    for entry in record.log:
        assert values["train/loss", entry.step] == pytest.approx(entry.loss, rel=1e-5)
        assert values["train/distillation", entry.step] == pytest.approx(entry.distillation, rel=1e-5)
    assert weights_of(tmp_path / "out") == weights_of(recoveries[NAME])


def last_good(folder: Path) -> int:
    """Return the step of the last complete checkpoint, after checking that its tensors are finite."""
    last = max(int(path.parent.name.partition("-")[2]) for path in folder.glob(f"*/{COMPLETE}"))
    tensors = load_file(folder / f"checkpoint-{last}" / "model.safetensors")
    assert tensors
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert not (folder / f"checkpoint-{last + 1}").exists()
    return last


@pytest.mark.parametrize("full", [True, False])
def test_a_loss_that_is_not_finite_stops_it_and_leaves_the_last_good_checkpoint(full, recover, tmp_path):
    with pytest.raises(TrainingError) as error:
        recover(NAME, tmp_path / "out", lr=1e30, full=full, save_every=1, steps=6)
    folder = tmp_path / "out.training" / "model"
    last = last_good(folder)
    place = f"at step {last + 1}: the last good checkpoint is {folder / f'checkpoint-{last}'}; try a lower `lr`"
    assert f"the loss is NaN or infinite {place}" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_weights_that_are_not_finite_are_not_saved(recover, tmp_path, monkeypatch):
    """Although the loss does not show it yet."""
    calls = itertools.count(1)

    def steep(hidden, *args, **options):
        loss, *parts = distilled_loss(hidden, *args, **options)
        return (loss + (hidden * 0).sum().sqrt() if next(calls) == 3 else loss), *parts  # zero, with infinite slope

    monkeypatch.setattr("slimstate.training.trainer.distilled_loss", steep)
    with pytest.raises(TrainingError, match=r"infinite at step 3: the last good checkpoint is .*checkpoint-2;"):
        recover(NAME, tmp_path / "out", save_every=1)
    assert last_good(tmp_path / "out.training" / "model") == 2


@pytest.mark.parametrize("parts", [1, 2])
def test_the_step_of_a_bad_loss_is_named_although_it_is_checked_later(parts, recover, tmp_path, monkeypatch):
    calls = itertools.count(1)

    def spoil(*args, **options):
        loss, *losses = distilled_loss(*args, **options)
        return loss * (math.nan if next(calls) == 3 * parts else 1), *losses

    monkeypatch.setattr("slimstate.training.trainer.distilled_loss", spoil)
    options = {"steps": 400, "batch_size": 2, "length": 16, "save_every": 8, "grad_accum": parts}
    with pytest.raises(TrainingError, match="at step 3: there is no checkpoint before it; try a lower `lr`"):
        recover(NAME, tmp_path / "out", **options)
    assert next(calls) == 4 * parts + 1  # losses are checked every other step
    assert not (tmp_path / "out").exists()
