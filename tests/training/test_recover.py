"""A recovery ends as a plain checkpoint, trains as one would by hand, survives what stops it, and refuses in words."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import itertools
import json
import math
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import typer
from safetensors.torch import load_file, save_file
from slimstate.cli.flags import as_flags, flags_of

import slimstate
import tiny
import training_calls
from command import run
from launching import stock_logits
from slimstate.checkpoints.reader import Checkpoint
from slimstate.cli import app
from slimstate.cli import training as commands
from slimstate.core.file_names import PLAN
from slimstate.data.corpus import Corpus, Schedule
from slimstate.kernels.distillation import distilled_loss
from slimstate.models.load import load, load_tokenizer
from slimstate.models.options import RunOptions
from slimstate.records.parts import Text
from slimstate.records.schema import from_json, to_json
from slimstate.records.training import (
    RECOVERY,
    AdaptationSettings,
    RecoveryRecord,
    RecoverySettings,
    Teacher,
)
from slimstate.system.errors import DataError, ModelError, OutputError, PlanError, TrainingError
from slimstate.system.run_folders import locked_folder
from slimstate.training import options, session, teacher
from slimstate.training.adaptation import trainable
from slimstate.training.options import PretrainOptions, RecoverOptions, TrainerOptions, TrainingText
from slimstate.training.recover import Preview
from slimstate.training.run_checkpoints import COMPLETE
from slimstate.training.session import LEAST_GAP
from slimstate.training.trainer import StudentTrainer
from training_calls import Listener

pytestmark = pytest.mark.slow

NAME, GATED = tiny.PLAIN
TIED = ("delta_net-tied", "gated_deltanet-tied")
ALONE = {"teacher": None, "no_teacher": True}
BRIEF = {"steps": 4, "length": 32, "batch_size": 4, "lr": 1e-2}
PAPER = {"lora_targets": "q_proj,k_proj,v_proj", "unfreeze": "norms,biases"}
SHORT = {**BRIEF, "save_every": 2, "report_to": "none"}
DEFAULT = {"lora": False}  # nothing is said of what is trained
SAYS_WHAT = {"full", "mixers", "lora", "lora_targets", "lora_rank", "lora_alpha", "unfreeze"}


@pytest.fixture(scope="module", autouse=True)
def quick_collection():
    """Every recovery collects garbage twice; what all the imports brought need not be looked through each time."""
    gc.freeze()
    yield
    gc.unfreeze()


def confident(name: str, **changes) -> torch.nn.Module:
    """A model whose predictions are far from uniform, so that its cut one has something to learn from it."""
    model = tiny.build(tiny.VARIANTS[name], **changes)
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(std=0.25)
    return model


def cut(folder: Path, out: Path, key_dim: int = 8) -> Path:
    slimstate.prune(folder, out, method="l1", key_dim=key_dim)
    return out


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """Models and what is left of them."""
    root = tmp_path_factory.mktemp("pairs")
    uncut = {name: tiny.save(confident(name), root / name, "100KB") for name in (NAME, GATED, *TIED)}
    uncut["bfloat16"] = tiny.save(confident(NAME).to(torch.bfloat16), root / "bfloat16", "100KB")
    found = {name: (folder, cut(folder, root / f"{name}-cut")) for name, folder in uncut.items()}
    return {**found, "paper": found[GATED]}


@pytest.fixture(scope="module")
def unseen_text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("unseen") / "unseen.txt"
    path.write_text(tiny.text(1500, seed=9))
    return path


@pytest.fixture(scope="module")
def recover(pairs, text_file):
    """Recovers the cut model of a pair, shortly, with the uncut one as its teacher; with adapters by default."""

    def shortly(name: str, out: Path, model: Path | None = None, **changes) -> RecoveryRecord:
        given = {"teacher": pairs[name][0], "data": str(text_file), **SHORT, **changes}
        if not given.get("full") and not SAYS_WHAT & (changes.keys() - {"full"}):
            given["lora"] = True
        return training_calls.recover(pairs[name][1] if model is None else model, out, **given)

    return shortly


@pytest.fixture(scope="module")
def made(pairs, recover, tmp_path_factory) -> dict[str, Path]:
    """Recoveries of every kind; a fresh process in which PEFT cannot be imported has left its logits in each."""
    root = tmp_path_factory.mktemp("made")
    folders = {kind: root / kind for kind in (NAME, GATED, "bfloat16", "full", *TIED, "alone", "controlled", "twice")}
    folders["paper"] = root / "paper"
    recover("paper", folders["paper"], **PAPER)
    for name in (NAME, GATED, "bfloat16"):
        recover(name, folders[name])
    recover(NAME, folders["full"], **DEFAULT)
    for name in TIED:
        recover(name, folders[name], full=True)
    recover(NAME, folders["alone"], teacher=None, no_teacher=True)
    recover(NAME, folders["controlled"], control=True)
    folders["control"] = root / "controlled-control"
    recover(NAME, folders["twice"], model=folders[NAME], seed=1)
    folders["cut again"] = cut(folders[NAME], root / "cut again", 6)
    folders["cut control"] = cut(folders["control"], root / "cut control")
    torch.save(tiny.token_ids(), root / "ids.pt")
    stock_logits(root / "ids.pt", folders.values(), "--without-peft")
    return folders


RECOVERED = (NAME, GATED, "bfloat16", "full", *TIED, "alone", "controlled", "twice", "control", "paper")


def source_of(kind: str, pairs, made) -> Path:
    """What a recovery was made from."""
    if kind == "twice":
        return made[NAME]
    return pairs[NAME][0] if kind == "control" else pairs.get(kind, pairs[NAME])[1]


def record_of(folder: Path) -> RecoveryRecord:
    return RecoveryRecord.read(folder / RECOVERY)


def history_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["slimstate"]


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != "logits.pt"}


def weights_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=tiny.token_ids(), use_cache=False).logits


def losses(record: RecoveryRecord) -> list[float]:
    return [entry.loss for entry in record.log]


@pytest.mark.parametrize("kind", [*RECOVERED, "cut again", "cut control"])
def test_the_stock_class_loads_it_in_a_fresh_process_without_peft(kind, made):
    here = logits(load(made[kind], device="cpu").model)
    torch.testing.assert_close(torch.load(made[kind] / "logits.pt"), here, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", RECOVERED)
def test_only_what_is_trained_changes(kind, pairs, made):
    source = source_of(kind, pairs, made)
    before, after = Checkpoint.open(source), Checkpoint.open(made[kind])
    new = {RECOVERY, "README.md"} if kind == "control" else {RECOVERY}
    assert files_of(made[kind]) == files_of(source) | new
    assert before.tensors.keys() == after.tensors.keys()
    assert {name: list(file.tensors) for name, file in before.files.items()} == {
        name: list(file.tensors) for name, file in after.files.items()
    }
    assert {info.dtype for info in after.tensors.values()} == {"BF16" if kind == "bfloat16" else "F32"}
    projections = [
        f"{mixer.path}.{part}"
        for mixer in before.mixers
        for part in mixer.projections
        if kind != "paper" or part in ("q_proj", "k_proj", "v_proj")
    ]
    parts = {*projections, *(f"{mixer.path}.{part}" for mixer in before.mixers for part in mixer.convolutions)}
    everything = kind in ("full", *TIED)
    for name in before.tensors:
        unfrozen = kind == "paper" and ("norm" in name or "bias" in name)
        trained = everything or unfrozen or name.rpartition(".")[0] in parts
        assert torch.equal(before.read(name), after.read(name)) != trained, name
    same = files_of(source) - before.files.keys() - {"config.json", "README.md", RECOVERY, "notes"}
    for name in same:
        assert (source / name).read_bytes() == (made[kind] / name).read_bytes()
    ours, theirs = dict(after.config), dict(before.config)
    ours.pop("slimstate")
    theirs.pop("slimstate", None)
    assert ours == theirs


@pytest.mark.parametrize("kind", RECOVERED)
def test_what_was_done_is_written_after_what_was_done_before(kind, pairs, made):
    source = Checkpoint.open(source_of(kind, pairs, made))
    before, now = dict(source.config.get("slimstate", {})), history_of(made[kind])
    *earlier, last = now.pop("recovered")
    assert earlier == before.pop("recovered", [])
    assert now == before
    record, uncut = record_of(made[kind]), Checkpoint.open(pairs.get(kind, pairs[NAME])[0])
    assert (last["model"], last["fingerprint"]) == (source.source, source.fingerprint)
    assert (last["model"], last["fingerprint"]) == (record.model, record.fingerprint)
    teacher = (None, None) if kind == "alone" else (uncut.source, uncut.fingerprint)
    assert (last["teacher"], last["teacher_fingerprint"]) == teacher
    assert last["tokens"] == record.tokens == 4 * 4 * 32
    assert (last["settings"], last["corpus"]) == (to_json(record.settings), to_json(record.corpus))
    assert last["settings"].items() >= {"lr": 1e-2, "steps": 4, "full": kind in ("full", *TIED)}.items()
    assert (record.cut is None) == ("key_dim" not in now) == (kind == "control")


def test_a_cut_after_a_recovery_keeps_both_in_the_history(made):
    """The control was never cut, and says so."""
    (earlier,) = history_of(made["cut again"])["history"]
    assert earlier == {name: value for name, value in history_of(made[NAME]).items() if name != "history"}
    assert (earlier["key_dim"], len(earlier["recovered"])) == (8, 1)
    assert (history_of(made["cut again"])["width"], history_of(made["cut again"])["key_dim"]) == (8, 6)
    assert json.loads((made["cut again"] / PLAN).read_text())["parent"]["key_dim"] == 8
    assert history_of(made["control"]).keys() == {"recovered"}
    assert slimstate.inspect(made["control"]).already_cut is None
    assert slimstate.inspect(made["twice"]).already_cut.key_dim == 8
    (earlier,) = history_of(made["cut control"])["history"]
    assert earlier == history_of(made["control"])
    assert json.loads((made["cut control"] / PLAN).read_text())["parent"] is None
    assert slimstate.inspect(made["cut control"]).already_cut.width == 24


def test_every_card_says_what_was_done(made, pairs):
    cards = {kind: (folder / "README.md").read_text() for kind, folder in made.items()}
    assert not [kind for kind, card in cards.items() if "{" in card or "None" in card]
    recovered = "key dim 8 instead of 24, recovered"
    titles = dict.fromkeys(made, recovered) | {"control": "fine-tuned, not cut"}
    titles |= {"cut again": "key dim 6 instead of 8", "cut control": "key dim 8 instead of 24"}
    for kind, card in cards.items():
        assert f"\n# {made[kind].name}: {titles[kind]}\n" in card
    for kind in RECOVERED:
        assert ("all weights" in cards[kind]) == (kind in ("full", *TIED))
        assert ("distillation from" in cards[kind]) == (kind != "alone")
        assert ("Cut: key dim 24 to 8 by `l1`." in cards[kind]) == (kind != "control")
        assert ("with the same fine-tuning" in cards[kind]) == (kind == "controlled")
        assert cards[kind].count("Fine-tuned on 512 tokens.") == (kind == "twice")
        assert "slimstate recover" in cards[kind]
    assert "Cut before: key dim 24 to 8 by `l1`.\nFine-tuned before on 512 tokens." in cards["cut again"]
    assert "\nFine-tuned before on 512 tokens." in cards["cut control"]
    assert "Cut before" not in cards["cut control"]


def test_by_default_all_weights_are_trained_at_the_models_own_rate_and_a_bare_resume_goes_on(
    pairs, recover, text_file, tmp_path, capsys, monkeypatch
):
    """The record has the numbers that the model was given, and they give the same when they are spelled out."""
    usual = {"lr": None, **DEFAULT}
    folder = interrupt(recover, tmp_path / "out", **usual) / "model"
    given = {**SHORT, "lr": None, "teacher": pairs[NAME][0], "data": text_file, "out": tmp_path / "out"}
    code, _, err = run(capsys, monkeypatch, "recover", pairs[NAME][1], *words(given), "--resume")
    assert code == 0, err
    assert f"going on from {folder / 'checkpoint-2'}" in err
    assert "the mixers alone" not in err
    settings = record_of(tmp_path / "out").settings
    assert (settings.lr, settings.min_lr, settings.kd_weight, settings.temperature) == (5e-4, 2.5e-5, 4.0, 2.0)
    assert (settings.full, settings.mixers, settings.lora_targets, settings.unfreeze) == (True, False, None, None)
    assert settings.adaptation == AdaptationSettings(full=True)
    assert "--lr 0.0005 --min-lr 2.5e-05 --full" in record_of(tmp_path / "out").command
    recover(NAME, tmp_path / "spelled out", lr=5e-4, min_lr=2.5e-5, kd_weight=4.0, full=True)
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "spelled out")


@pytest.mark.parametrize(("width", "rate"), [(64, 5e-4), (512, 5e-4), (640, 4e-4), (1024, 2.5e-4)])
def test_the_rate_is_in_inverse_proportion_to_a_width_above_512(width, rate, tmp_path):
    model = tiny.build(tiny.VARIANTS[NAME], hidden_size=width, intermediate_size=32, num_hidden_layers=1)
    student = Checkpoint.open(tiny.save(model, tmp_path / "model"))
    assert options.rate_for(student) == pytest.approx(rate)
    for given in (RecoverOptions(), RecoverOptions(lora=True)):
        found = given.for_model(student)
        assert (found.lr, found.min_lr) == (options.rate_for(student), pytest.approx(rate / 20))
        assert (found.full, found.mixers) == (not given.lora, False)
        assert found.for_model(student) == found
    assert RecoverOptions(lr=1e-3).for_model(student).min_lr == pytest.approx(5e-5)
    assert RecoverOptions(min_lr=0.0).for_model(student).min_lr == 0
    with pytest.raises(PlanError, match=r"`min_lr` 0.00051: a learning rate falls from"):
        RecoverOptions(min_lr=5.1e-4).for_model(student)
    assert RecoverOptions.paper().for_model(student) == RecoverOptions.paper()


@pytest.mark.parametrize(
    "changes",
    [{"lora": True}, {"lora_targets": "q_proj"}, {"unfreeze": "norms"}, {"lora_rank": 5}, {"lora_alpha": 5}],
    ids=str,
)
def test_adapters_are_trained_where_something_is_said_of_them(changes, pairs):
    found = RecoverOptions(**changes).for_model(Checkpoint.open(pairs[NAME][1]))
    assert (found.full, found.mixers) == (False, False)
    assert found.adaptation(Checkpoint.open(pairs[NAME][1])).targets != ()


@pytest.mark.parametrize(("name", "full"), [(NAME, True), (GATED, False)])
def test_training_is_the_loop_one_would_write_by_hand(name, full, pairs, recover, text_file, tmp_path):
    """Losses, rates and weights; and the text, of which there is much to learn, is learnt."""
    steps, lr, least, weight, temperature = 21, 5e-3, 1e-3, 0.5, 3.0
    record = recover(
        name, tmp_path / "out", steps=steps, lr=lr, min_lr=least, kd_weight=weight, temperature=temperature, full=full
    )
    uncut, source = (load(folder, device="cpu").model for folder in pairs[name])
    corpus = Corpus.collect(tiny.tokenizer(), str(text_file), 32, 4 * steps, 1, tmp_path / "tokens")
    schedule = Schedule(corpus, 4 * steps, seed=0)
    adaptation = RecoverOptions(full=full, lora=not full).adaptation(Checkpoint.open(pairs[name][1]))
    torch.manual_seed(0)
    model = adaptation.attach(source).train()
    optimizer = torch.optim.AdamW(trainable(model).values(), lr=lr, weight_decay=0.0)
    warm = int(0.05 * steps)
    for step, entry in enumerate(record.log):
        ids = torch.stack([schedule[4 * step + number]["input_ids"] for number in range(4)])
        with torch.no_grad():
            theirs = (uncut(input_ids=ids, use_cache=False).logits[:, :-1] / temperature).softmax(-1)
        ours = model(input_ids=ids, use_cache=False).logits[:, :-1]
        cross_entropy = F.cross_entropy(ours.flatten(0, 1), ids[:, 1:].flatten())
        apart = theirs * (theirs.log() - (ours / temperature).log_softmax(-1))
        divergence = temperature**2 * apart.sum(-1).mean()
        loss = cross_entropy + weight * divergence
        found = [entry.loss, entry.cross_entropy, entry.distillation]
        expected = [float(part.detach()) for part in (loss, cross_entropy, divergence)]
        # Adam blows up what float32 makes of a gradient that is almost zero, so the two drift apart slowly
        assert found == pytest.approx(expected, rel=1e-3 if step else 1e-5)
        cosine = (1 + math.cos(math.pi * (step - warm) / (steps - warm))) / 2
        rate = lr * step / warm if step < warm else least + (lr - least) * cosine
        assert entry.learning_rate == pytest.approx(rate, rel=1e-5)
        optimizer.param_groups[0]["lr"] = rate
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable(model).values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    trained = {part: parameter.detach() for part, parameter in trainable(model).items()}
    merged = adaptation.merged(load(pairs[name][1], device="cpu").model, trained)
    before, after = Checkpoint.open(pairs[name][1]), Checkpoint.open(tmp_path / "out")
    for part, tensor in merged.items():
        assert (after.read(part) - tensor).norm() < 0.05 * (tensor - before.read(part)).norm(), part
    assert sum(losses(record)[-4:]) < sum(losses(record)[:4]) - 1
    assert record.measured.nats.after < record.measured.nats.before


@pytest.mark.parametrize(("length", "tokens"), [(32, 500), (1030, None)])
def test_the_numbers_are_those_that_evaluate_gives(length, tokens, pairs, recover, unseen_text, tmp_path):
    options = {"batch_size": 1, "steps": 2, "length": length, "eval_text": str(unseen_text), "eval_tokens": tokens}
    record = recover(NAME, tmp_path / "out", control=True, **options)
    folders = {"before": pairs[NAME][1], "after": tmp_path / "out"}
    folders |= {"uncut": pairs[NAME][0], "control": tmp_path / "out-control"}
    measured, nats = record.measured, record.measured.nats.known()
    assert nats.keys() == folders.keys()
    for kind, folder in folders.items():
        found = slimstate.evaluate(folder, unseen_text, length=min(1024, length), max_tokens=tokens)
        assert nats[kind] == pytest.approx(found.nats_per_token, rel=1e-6)
        assert measured.perplexity[kind] == pytest.approx(found.perplexity, rel=1e-6)
        assert measured.word_perplexity[kind] == pytest.approx(found.word_perplexity, rel=1e-4)
        assert measured.bits_per_byte[kind] == pytest.approx(found.bits_per_byte, rel=1e-6)
        assert (measured.text, measured.tokens) == (found.text, found.tokens)
        assert (measured.words, measured.bytes) == (found.words, found.bytes)
    for goal, share in measured.closed.items():
        gap = nats["before"] - nats[goal]
        assert (share is None) == (gap <= LEAST_GAP)
        assert share is None or share * gap == pytest.approx(nats["before"] - nats["after"])
    assert record.corpus.held_out == 0


@pytest.mark.parametrize(("name", "full"), [("bfloat16", False), ("bfloat16", True), (TIED[0], True)])
def test_what_is_measured_is_what_is_written(name, full, recover, unseen_text, tmp_path):
    """The weights as they are rounded for the file, and those that are stored once and used twice."""
    record = recover(name, tmp_path / "out", full=full, eval_text=str(unseen_text), eval_tokens=256)
    found = slimstate.evaluate(tmp_path / "out", unseen_text, length=32, max_tokens=256)
    assert record.measured.nats.after == pytest.approx(found.nats_per_token, rel=1e-6)


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
        assert record.measured.nats.known()[kind] == pytest.approx(nats, rel=1e-5)


def test_training_in_half_precision_is_training_with_some_noise(recover, made, tmp_path):
    record = recover(NAME, tmp_path / "out", dtype="bfloat16")
    assert losses(record) == pytest.approx(losses(record_of(made[NAME])), rel=0.02)
    assert {info.dtype for info in Checkpoint.open(tmp_path / "out").tensors.values()} == {"F32"}
    assert record.settings.dtype == "bfloat16"


def test_a_teacher_without_weight_is_no_teacher(recover, made, tmp_path):
    record = recover(NAME, tmp_path / "out", kd_weight=0)
    alone = record_of(made["alone"])
    assert losses(record) == losses(alone)
    assert weights_of(tmp_path / "out") == weights_of(made["alone"])
    assert all(entry.loss == entry.cross_entropy for entry in record.log)
    assert record.measured.nats.known().keys() - alone.measured.nats.known().keys() == {"uncut"}


def test_work_in_pieces_gives_the_same(recover, made, tmp_path):
    record = recover(GATED, tmp_path / "out", grad_accum=2)
    whole = record_of(made[GATED])
    for part in ("loss", "cross_entropy", "distillation", "grad_norm"):
        found, expected = ([getattr(entry, part) for entry in each.log] for each in (record, whole))
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert record.measured.nats.after == pytest.approx(whole.measured.nats.after, abs=1e-5)


def test_a_cached_teacher_teaches_the_same_and_is_loaded_only_to_measure(recover, pairs, made, tmp_path, monkeypatch):
    loaded = []

    def counting(folder, **options):
        loaded.append(Path(folder))
        return load(folder, **options)

    monkeypatch.setattr(session, "load", counting)
    monkeypatch.setattr(teacher, "load", counting)
    found = []
    for out in ("first", "second"):
        loaded.clear()
        options = {"cache_teacher": tmp_path / "cache", "cache_top_k": 257}
        found.append((recover(NAME, tmp_path / out, **options), loaded.count(pairs[NAME][0])))
    (first, loads), (second, fewer_loads) = found
    assert (loads, fewer_loads) == (2, 1)
    assert losses(first) == losses(second)
    assert weights_of(tmp_path / "first") == weights_of(tmp_path / "second")
    assert losses(first) == pytest.approx(losses(record_of(made[NAME])), rel=1e-3)
    assert first.settings.top_k == 257
    few = recover(NAME, tmp_path / "few", cache_teacher=tmp_path / "few guesses", cache_top_k=4)
    assert losses(few)[0] < losses(first)[0]  # what is lumped together hides some of the difference
    with pytest.raises(DataError, match="a teacher cache of another top_k: 4, not 257"):
        recover(NAME, tmp_path / "third", cache_teacher=tmp_path / "few guesses", cache_top_k=257)


@pytest.mark.parametrize("name", [*tiny.PLAIN, "paper"])
def test_a_kept_adapter_on_the_cut_model_is_the_recovered_one(name, recover, pairs, made, tmp_path):
    from peft import PeftModel

    changes = PAPER if name == "paper" else {}
    recover(name, tmp_path / "out", keep_adapter=True, **changes)
    adapted = PeftModel.from_pretrained(load(pairs[name][1], device="cpu").model, tmp_path / "out" / "adapter")
    recovered = load(tmp_path / "out", device="cpu").model
    torch.testing.assert_close(logits(adapted), logits(recovered), rtol=1e-4, atol=1e-4)
    assert (logits(recovered) - logits(load(pairs[name][1], device="cpu").model)).abs().max() > 0.1
    assert weights_of(tmp_path / "out") == weights_of(made[name])


@pytest.mark.parametrize("name", tiny.PLAIN)
def test_chosen_linear_maps_are_trained_instead(name, recover, pairs, tmp_path):
    record = recover(name, tmp_path / "out", lora_targets="mlp.up_proj,o_proj", lora_rank=3, lora_alpha=5)
    before, after = Checkpoint.open(pairs[name][1]), Checkpoint.open(tmp_path / "out")
    changed = {part for part in before.tensors if not torch.equal(before.read(part), after.read(part))}
    convolutions = {part for part in before.tensors if "conv1d" in part}
    chosen = {part for part in before.tensors if part.endswith(("mlp.up_proj.weight", ".o_proj.weight"))}
    assert changed == convolutions | chosen
    for part in chosen:
        assert torch.linalg.matrix_rank(after.read(part) - before.read(part), rtol=1e-4) <= 3
    assert record.settings.adaptation.targets == ("o_proj", "up_proj")


def test_the_uncut_model_gets_the_same_training(made, recover, pairs, tmp_path):
    """Beside the cut one, and by itself: the same control."""
    record, control = record_of(made["controlled"]), record_of(made["control"])
    assert control.fingerprint == record.teacher.fingerprint == control.teacher.fingerprint
    assert (control.settings, control.corpus) == (record.settings, record.corpus)
    assert record.measured.nats.control == control.measured.nats.after
    assert record.measured.nats.uncut == control.measured.nats.before
    assert record.measured.closed.keys() == {"uncut", "control"}
    assert weights_of(made["controlled"]) == weights_of(made[NAME])
    alone = recover(NAME, tmp_path / "alone", model=pairs[NAME][0], control=True)
    assert weights_of(tmp_path / "alone") == weights_of(made["control"])
    assert (alone.log, alone.measured) == (control.log, control.measured)
    assert [path.name for path in tmp_path.iterdir()] == ["alone"]


def test_a_control_is_used_again_where_it_fits(made, recover, unseen_text, tmp_path):
    control = made["control"]
    before = {path: path.stat().st_mtime_ns for path in control.iterdir()}
    said = Listener()
    record = recover(NAME, tmp_path / "out", control=True, control_out=control, progress=said)
    assert f"control: {control}, made before with the same settings" in said.lines
    assert record.measured == record_of(made["controlled"]).measured
    others = {
        "lr 0.01, now 0.005": {"lr": 5e-3},
        "steps 4, now 5": {"steps": 5},
        "kd_weight 4.0, now 0.5": {"kd_weight": 0.5},
        "tokens sha256:.*, now sha256:": {"eval_text": str(unseen_text)},
    }
    for difference, changes in others.items():
        with pytest.raises(OutputError, match=f"is a control of other settings: {difference}"):
            recover(NAME, tmp_path / "other", control=True, control_out=control, **changes)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert before == {path: path.stat().st_mtime_ns for path in control.iterdir()}


def test_a_control_that_teaches_is_two_commands_in_one(pairs, recover, tmp_path):
    """The uncut model learns from the text alone, as without a teacher; then it is the teacher."""
    tuned = recover(NAME, tmp_path / "tuned", model=pairs[NAME][0], teacher=None, no_teacher=True, full=True)
    taught = recover(NAME, tmp_path / "taught", teacher=tmp_path / "tuned", full=True)
    said = Listener()
    record = recover(NAME, tmp_path / "out", control_teaches=True, full=True, progress=said)
    control = record_of(tmp_path / "out-control")
    assert f"control: the uncut model is trained on the text alone, into {control.out}; then it teaches" in said.lines
    assert (record.control_teaches, control.control_teaches, taught.control_teaches) == (True, False, False)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "of the gap to the uncut model fine-tuned on the text alone, which taught." in card
    assert "with the same fine-tuning" not in card
    assert (control.teacher, control.log, control.measured) == (None, tuned.log, tuned.measured)
    assert weights_of(tmp_path / "out-control") == weights_of(tmp_path / "tuned")
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "taught")
    assert (record.log, record.teacher.fingerprint) == (taught.log, taught.teacher.fingerprint)
    assert record.teacher == Teacher(model=control.out, fingerprint=Checkpoint.open(control.out).fingerprint)
    assert record.measured.nats.uncut == tuned.measured.nats.before
    assert record.measured.nats.control == tuned.measured.nats.after == taught.measured.nats.uncut
    assert [word for word in shlex.split(record.command) if word.startswith("--control")] == ["--control-teaches"]
    again = interrupt(recover, tmp_path / "again", control_teaches=True, control_out=tmp_path / "tuned", full=True)
    assert not (again / "control").exists()
    with pytest.raises(PlanError, match="was started with other settings: control teaches, now True"):
        recover(NAME, tmp_path / "again", control=True, full=True, resume=True)
    recover(NAME, tmp_path / "again", control_teaches=True, control_out=tmp_path / "tuned", full=True, resume=True)
    assert weights_of(tmp_path / "again") == weights_of(tmp_path / "out")
    with pytest.raises(OutputError, match="is a control of other settings: taught False, now True"):
        recover(NAME, tmp_path / "other", control=True, control_out=tmp_path / "tuned", full=True)
    assert {path.name for path in tmp_path.iterdir()} == {"tuned", "taught", "out", "out-control", "again"}
    with pytest.raises(OutputError, match=r"is a control of other settings: lr 0.01, now 0.02; remove it, or choose"):
        recover(NAME, tmp_path / "other", control_teaches=True, control_out=tmp_path / "tuned", full=True, lr=2e-2)
    softer = {"kd_weight": 1.0, "temperature": 1.0}  # which the control had nothing to do with
    recover(NAME, tmp_path / "soft", control_teaches=True, control_out=tmp_path / "tuned", full=True, **softer)
    assert weights_of(tmp_path / "soft") != weights_of(tmp_path / "out")


def test_a_control_without_a_teacher_of_weight_is_as_good_as_one_without_a_teacher(pairs, recover, tmp_path):
    alone = recover(NAME, tmp_path / "alone", model=pairs[NAME][0], teacher=None, no_teacher=True)
    record = recover(NAME, tmp_path / "out", control=True, control_out=tmp_path / "alone", kd_weight=0.0)
    assert record.measured.nats.control == alone.measured.nats.after


def test_a_control_that_became_another_does_not_teach_the_rest(recover, tmp_path):
    taught = {"control_teaches": True, "control_out": tmp_path / "control"}
    recover(NAME, tmp_path / "first", **taught)
    interrupt(recover, tmp_path / "out", **taught)
    for path in (tmp_path / "control").glob("*.safetensors"):
        save_file({name: weight + 1 for name, weight in load_file(path).items()}, path, {"format": "pt"})
    with pytest.raises(PlanError, match=r"was started with another control as the teacher; `force` starts over$"):
        recover(NAME, tmp_path / "out", resume=True, **taught)
    recover(NAME, tmp_path / "out", force=True, **taught)


def test_an_unfinished_run_outlives_the_refusal_of_a_control(made, recover, tmp_path):
    kept = interrupt(recover, tmp_path / "out")
    with pytest.raises(OutputError, match="is a control of other settings"):
        recover(NAME, tmp_path / "out", control=True, control_out=made["control"], lr=2e-2, force=True)
    assert (kept / "model" / "checkpoint-2" / COMPLETE).exists()


@pytest.mark.parametrize("place", ["out", "out/control", "out.training", "out.training/control", "."])
def test_a_control_has_a_place_of_its_own(place, recover, tmp_path):
    with pytest.raises(OutputError, match=r"is, holds or lies in .*: choose another `control_out`"):
        recover(NAME, tmp_path / "out", control=True, control_out=tmp_path / place)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kd_weight": 0.0}, "`control_teaches` with a `kd_weight` of 0: nothing would be learnt from it"),
        ({"cache_teacher": "guesses"}, "`cache_teacher` keeps the guesses of a teacher that is there"),
        (
            {"teacher": None, "no_teacher": True},
            "`control_teaches` fine-tunes the uncut model too: give it with `teacher`",
        ),
    ],
)
def test_a_control_that_cannot_teach_is_refused(changes, message, recover, pairs, tmp_path):
    """By a dry run too."""
    with pytest.raises(PlanError, match=message):
        recover(NAME, tmp_path / "out", control_teaches=True, **changes)
    with pytest.raises(PlanError, match=message):
        training_calls.preview(pairs[NAME][1], **{"teacher": pairs[NAME][0], "control_teaches": True, **changes})
    assert not list(tmp_path.iterdir())


def test_a_folder_for_a_control_that_is_not_wanted_is_refused(recover, tmp_path):
    with pytest.raises(
        PlanError, match="`control_out` is the folder of a control: give `control` or `control_teaches`"
    ):
        recover(NAME, tmp_path / "out", control_out=tmp_path / "control")
    assert not list(tmp_path.iterdir())


def test_the_uncut_model_cannot_be_taught_by_its_own_control(pairs, recover, tmp_path):
    with pytest.raises(PlanError, match="is the uncut model; give one cut from it"):
        recover(NAME, tmp_path / "out", model=pairs[NAME][0], control_teaches=True)
    with pytest.raises(PlanError, match="is the uncut model; give one cut from it"):
        training_calls.preview(pairs[NAME][0], teacher=pairs[NAME][0], control_teaches=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({"control": True}, "control: the uncut model would be trained as well, in the same way"),
        (
            {"control_teaches": True},
            "control: the uncut model would be trained as well first, on the text alone, and then teach",
        ),
    ],
)
def test_a_dry_run_tells_of_the_control(wanted, told, pairs):
    said = Listener()
    training_calls.preview(pairs[NAME][1], teacher=pairs[NAME][0], progress=said, **wanted)
    assert told in said.lines


def test_the_teacher_is_by_default_what_the_model_was_cut_from(pairs, recover, made, tmp_path):
    said = Listener()
    record = recover(NAME, tmp_path / "out", teacher=None, progress=said)
    assert f"teacher: {pairs[NAME][0]}, which the model was cut from" in said.lines
    assert record.teacher.fingerprint == Checkpoint.open(pairs[NAME][0]).fingerprint
    assert losses(record) == losses(record_of(made[NAME]))


def stop_at(monkeypatch, step: int) -> None:
    """The next training is interrupted when so many steps are done."""
    go_on = StudentTrainer.training_step

    def stop(self, *args, **kwargs):
        if self.state.global_step == step:
            raise KeyboardInterrupt
        return go_on(self, *args, **kwargs)

    monkeypatch.setattr(StudentTrainer, "training_step", stop)


def interrupt(recover, out: Path, step: int = 3, name: str = NAME, **changes) -> Path:
    """A recovery that was interrupted; returns the folder of the training."""
    with pytest.MonkeyPatch.context() as patched:
        stop_at(patched, step)
        with pytest.raises(KeyboardInterrupt):
            recover(name, out, **changes)
    assert not out.exists()
    return out.with_name(f"{out.name}.training")


@pytest.mark.parametrize(
    ("kind", "changes", "later"),
    [
        (NAME, {}, {}),
        (NAME, {"grad_accum": 4}, {"grad_accum": 1, "save_every": 1}),
        ("full", {"full": True}, {}),
        ("full", DEFAULT, {"full": True}),
        ("controlled", {"control": True}, {}),
        ("paper", PAPER, {}),
    ],
)
def test_an_interrupted_recovery_goes_on_as_if_nothing_had_happened(kind, changes, later, recover, made, tmp_path):
    part, name = "control" if kind == "controlled" else "model", kind if kind == "paper" else NAME
    folder = interrupt(recover, tmp_path / "out", name=name, **changes) / part
    assert (folder / "checkpoint-2" / COMPLETE).exists()
    shutil.copytree(folder / "checkpoint-2", folder / "checkpoint-99")  # as a run that was killed leaves them
    (folder / "checkpoint-99" / COMPLETE).unlink()
    (folder / "checkpoint-98").mkdir()
    said = Listener()
    record, expected = (
        recover(name, tmp_path / "out", resume=True, progress=said, **changes | later),
        record_of(made[kind]),
    )
    assert f"going on from {folder / 'checkpoint-2'}" in said.lines
    if "grad_accum" in later:
        assert losses(record) == pytest.approx(losses(expected), rel=1e-5)
        assert record.measured.nats.known() == pytest.approx(expected.measured.nats.known(), rel=1e-5)
    else:
        assert losses(record) == losses(expected)
        assert record.measured == expected.measured
        assert weights_of(tmp_path / "out") == weights_of(made[kind])
    assert [entry.step for entry in record.log] == [1, 2, 3, 4]
    if kind == "controlled":
        assert weights_of(tmp_path / "out-control") == weights_of(made["control"])
    assert {path.name for path in tmp_path.iterdir()} == {"out", *(["out-control"] if kind == "controlled" else [])}


def test_it_can_be_interrupted_again_and_again(recover, made, tmp_path):
    """What was left half-written must not push out what is whole."""
    for step in (1, 2, 3):
        folder = interrupt(recover, tmp_path / "out", step, save_every=1, resume=True) / "model"
        checkpoints = {path.name for path in folder.glob("checkpoint-*")}
        assert checkpoints == {f"checkpoint-{done}" for done in range(max(1, step - 1), step + 1)}
        assert all((folder / name / file).exists() for name in checkpoints for file in (COMPLETE, "model.safetensors"))
        for number in (97, 98, 99):
            (folder / f"checkpoint-{number}").mkdir()
    record = recover(NAME, tmp_path / "out", resume=True)
    assert losses(record) == losses(record_of(made[NAME]))
    assert weights_of(tmp_path / "out") == weights_of(made[NAME])


def test_what_was_not_saved_is_done_again(recover, made, tmp_path, monkeypatch):
    """Interrupted before the first checkpoint, and before there were tokens; and with nothing to go on from."""
    interrupt(recover, tmp_path / "early", step=1)
    recover(NAME, tmp_path / "early", resume=True)
    with monkeypatch.context() as patched:
        patched.setattr(Corpus, "collect", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            recover(NAME, tmp_path / "earlier")
    recover(NAME, tmp_path / "earlier", resume=True)
    said = Listener()
    recover(NAME, tmp_path / "new", resume=True, progress=said)
    assert f"nothing to resume in {tmp_path / 'new.training'}: starting" in said.lines
    for out in ("early", "earlier", "new"):
        assert weights_of(tmp_path / out) == weights_of(made[NAME])
    assert {path.name for path in tmp_path.iterdir()} == {"early", "earlier", "new"}


def test_an_unfinished_recovery_is_not_overwritten_or_mistaken_for_another(recover, pairs, made, unseen_text, tmp_path):
    folder = interrupt(recover, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.raises(OutputError, match=r"out.training holds .* `resume` continues it, `force` starts over"):
        recover(NAME, tmp_path / "out")
    others = {
        "lr 0.01, now 0.02": {"lr": 2e-2},
        "data .*text.txt, now .*unseen.txt": {"data": str(unseen_text)},
        "model sha256:.*, now sha256:": {"model": made[NAME]},
        "teacher sha256:.*, now None": ALONE,
        "full False, now True": {"full": True},
        "steps 4, now 5": {"steps": 5},
        "seed 0, now 1": {"seed": 1},
        "eval_text None, now .*unseen.txt": {"eval_text": str(unseen_text)},
        "control False, now True": {"control": True},
    }
    for difference, changes in others.items():
        with pytest.raises(PlanError, match=f"out.training was started with other settings: {difference}"):
            recover(NAME, tmp_path / "out", resume=True, **changes)
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    said = Listener()
    recover(NAME, tmp_path / "out", force=True, lr=2e-2, progress=said)
    assert not [line for line in said.lines if "going on" in line]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_is_one_line_and_costs_the_steps_since_the_last_checkpoint(recover, made, tmp_path, monkeypatch):
    save = StudentTrainer._save_checkpoint

    def full_at_four(self, *arguments):
        save(self, *arguments)
        if self.state.global_step == 4:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")

    with monkeypatch.context() as patched:
        patched.setattr(StudentTrainer, "_save_checkpoint", full_at_four)
        with pytest.raises(RuntimeError, match="unexpected pos"):  # there was room: something else is wrong
            recover(NAME, tmp_path / "out")
        patched.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))
        told = r"no space left for .*: free some; .*out.training keeps checkpoint-2; `resume` continues it"
        with pytest.raises(OutputError, match=told):
            recover(NAME, tmp_path / "out", resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out.training"]
    assert losses(recover(NAME, tmp_path / "out", resume=True)) == losses(record_of(made[NAME]))


@pytest.mark.parametrize("way", ["resume", "force"])
def test_a_folder_that_is_no_recovery_is_left_alone(way, recover, tmp_path):
    (tmp_path / "out.training").mkdir()
    (tmp_path / "out.training" / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputError, match="is in the way: it has no"):
        recover(NAME, tmp_path / "out", **{way: True})
    assert (tmp_path / "out.training" / "thesis.txt").exists()


@pytest.mark.parametrize("way", ["resume", "force"])
def test_a_second_process_is_told_that_another_one_works_there(way, recover, tmp_path):
    folder = tmp_path / "out.training"
    folder.mkdir()
    with locked_folder(folder), pytest.raises(OutputError, match=r"another process works in .*out.training"):
        recover(NAME, tmp_path / "out", **{way: True})
    assert list(tmp_path.rglob("*")) == [folder]


def test_settings_of_another_program_are_no_unfinished_training(recover, tmp_path):
    folder = tmp_path / "out.training"
    folder.mkdir()
    (folder / "settings.json").write_text('{"theme": "dark"}')
    with pytest.raises(OutputError, match="is in the way: it has no"):
        recover(NAME, tmp_path / "out", force=True)
    assert (folder / "settings.json").read_text() == '{"theme": "dark"}'


@pytest.mark.parametrize("control", [False, True])
def test_a_result_that_could_not_be_written_is_written_later_without_training(
    control, recover, made, tmp_path, monkeypatch
):
    def full_disk(*_):
        raise OutputError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(session.Session, "_write", full_disk)
        with pytest.raises(OutputError, match="no space left"):
            recover(NAME, tmp_path / "out", control=control)
    assert [path.name for path in tmp_path.iterdir()] == ["out.training"]
    if not control:
        stop_at(monkeypatch, 4)  # not one step more
    record = recover(NAME, tmp_path / "out", control=control, resume=True)
    assert weights_of(tmp_path / "out") == weights_of(made[NAME])
    assert losses(record) == losses(record_of(made[NAME]))
    assert (record.tokens_per_second is None) != control
    assert {path.name for path in tmp_path.iterdir()} == {"out", *({"out-control"} if control else {})}


def test_an_existing_folder_is_kept_until_force_has_a_whole_new_one(recover, made, tmp_path):
    shutil.copytree(made[NAME], tmp_path / "out")
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(OutputError, match="exists already"):
        recover(NAME, tmp_path / "out")
    with pytest.MonkeyPatch.context() as patched:
        stop_at(patched, 1)
        with pytest.raises(KeyboardInterrupt):
            recover(NAME, tmp_path / "out", force=True)
    assert (tmp_path / "out" / "precious").read_text() == "x"
    recover(NAME, tmp_path / "out", force=True)
    assert files_of(tmp_path / "out") == files_of(made[NAME])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def last_good(folder: Path) -> int:
    """The number of the last checkpoint marked as whole, after a look at its tensors."""
    last = max(int(path.parent.name.partition("-")[2]) for path in folder.glob(f"*/{COMPLETE}"))
    tensors = load_file(folder / f"checkpoint-{last}" / "model.safetensors")
    assert tensors
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert not (folder / f"checkpoint-{last + 1}").exists()
    return last


@pytest.mark.parametrize("full", [True, False])
def test_a_loss_that_is_no_number_stops_it_and_leaves_the_last_good_checkpoint(full, recover, tmp_path):
    with pytest.raises(TrainingError) as stopped:
        recover(NAME, tmp_path / "out", lr=1e30, full=full, save_every=1, steps=6)
    folder = tmp_path / "out.training" / "model"
    last = last_good(folder)
    where = f"at step {last + 1}: the last good checkpoint is {folder / f'checkpoint-{last}'}; try a lower `lr`"
    assert f"the loss is NaN or infinite {where}" in str(stopped.value)
    assert not (tmp_path / "out").exists()


def test_weights_that_are_no_numbers_are_not_saved(recover, tmp_path, monkeypatch):
    """Though the loss does not show it yet."""
    taken = itertools.count(1)

    def steep(hidden, *args, **options):
        loss, *parts = distilled_loss(hidden, *args, **options)
        return (loss + (hidden * 0).sum().sqrt() if next(taken) == 3 else loss), *parts  # zero, of infinite slope

    monkeypatch.setattr("slimstate.training.trainer.distilled_loss", steep)
    with pytest.raises(TrainingError, match=r"infinite at step 3: the last good checkpoint is .*checkpoint-2;"):
        recover(NAME, tmp_path / "out", save_every=1)
    assert last_good(tmp_path / "out.training" / "model") == 2


@pytest.mark.parametrize("pieces", [1, 2])
def test_the_step_of_a_bad_loss_is_named_though_it_is_looked_at_later(pieces, recover, tmp_path, monkeypatch):
    taken = itertools.count(1)

    def spoilt(*args, **options):
        loss, *parts = distilled_loss(*args, **options)
        return loss * (math.nan if next(taken) == 3 * pieces else 1), *parts

    monkeypatch.setattr("slimstate.training.trainer.distilled_loss", spoilt)
    options = {"steps": 400, "batch_size": 2, "length": 16, "save_every": 8, "grad_accum": pieces}
    with pytest.raises(TrainingError, match="at step 3: no checkpoint was made before it; try a lower `lr`"):
        recover(NAME, tmp_path / "out", **options)
    assert next(taken) == 4 * pieces + 1  # it is looked at every other step
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def places(pairs, text_file, tmp_path_factory) -> dict[str, Path]:
    """What bad input is made of."""
    root = tmp_path_factory.mktemp("places")
    uncut, source = pairs[NAME]
    found = {"UNCUT": uncut, "CUT": source, "TEXT": text_file, "INSIDE": source / "inside", "ABOVE": source.parent}
    found["COPY"] = Path(shutil.copytree(source, root / "copy"))
    found["MORE TOKENS"] = tiny.save(confident(NAME, vocab_size=300), root / "more")
    found["OTHER TOKENS"] = Path(shutil.copytree(uncut, root / "other"))
    tokenizer = (uncut / "tokenizer.json").read_text()
    swapped = tokenizer.replace('"a": ', '"_": ').replace('"b": ', '"a": ').replace('"_": ', '"b": ')
    assert swapped != tokenizer
    (found["OTHER TOKENS"] / "tokenizer.json").write_text(swapped)
    found["ORPHAN"] = Path(shutil.copytree(source, root / "orphan"))
    config = json.loads((source / "config.json").read_text())
    config["slimstate"]["base_model"] = str(root / "gone")
    (found["ORPHAN"] / "config.json").write_text(json.dumps(config))
    for name, characters in {"LITTLE": 20, "SOME": 32 * 11}.items():
        found[name] = root / f"{name.lower()}.txt"
        found[name].write_text(tiny.text(characters))
    found["FILE"], found["BLOCKED"] = found["LITTLE"], root / "blocked"
    (root / "blocked.training").write_text("in the way")
    return found


BAD = {
    "more tokens": ({"teacher": "MORE TOKENS"}, ModelError, "a vocabulary of 258, the teacher .*more one of 300"),
    "other tokens": ({"teacher": "OTHER TOKENS"}, ModelError, "have different tokenizers"),
    "itself": ({"teacher": "CUT"}, PlanError, "is the model itself; it must be the uncut one"),
    "a copy": ({"teacher": "COPY"}, PlanError, "copy is the model itself"),
    "nobody": ({"teacher": "/nowhere/model"}, ModelError, "no model at /nowhere/model"),
    "no model": ({"model": "/nowhere/cut"}, ModelError, "no model at /nowhere/cut"),
    "orphan": ({"model": "ORPHAN", "teacher": None}, PlanError, "give the uncut model with --teacher, or --no-teacher"),
    "uncut alone": ({"model": "UNCUT", "teacher": None}, PlanError, "give the uncut model with --teacher"),
    "uncut": ({"model": "UNCUT"}, PlanError, r"is the model itself.*\(or give --control\)"),
    "control alone": ({**ALONE, "control": True}, PlanError, "--control fine-tunes the uncut model too"),
    "cache alone": ({**ALONE, "cache_teacher": "OUT"}, PlanError, "--cache-teacher without a teacher"),
    "no guesses": ({"cache_teacher": "CACHE", "cache_top_k": 0}, PlanError, "--cache-top-k 0: it must be at least 1"),
    "cache in a file": ({"cache_teacher": "FILE"}, OutputError, "little.txt is a file"),
    "targets": ({"lora_targets": "x_proj"}, PlanError, "--lora-targets x_proj matches no linear map; there are q_proj"),
    "targets of all": ({"lora_targets": "q_proj", "full": True}, PlanError, "--full trains all weights"),
    "adapters and all": ({"lora": True, "full": True}, PlanError, "give either --lora or --full"),
    "adapters and mixers": ({"lora": True, "mixers": True}, PlanError, "give either --lora or --mixers"),
    "all and mixers": ({"full": True, "mixers": True}, PlanError, "give either --full or --mixers"),
    "no adapter": ({"keep_adapter": True}, PlanError, "--keep-adapter: there is none, .*; give --lora"),
    "no adapter of all": ({"keep_adapter": True, "full": True}, PlanError, "--keep-adapter: there is none"),
    "rank": ({"lora_rank": 0}, PlanError, "LoRA of rank 0"),
    "both": ({"steps": 4, "tokens": 999}, PlanError, "give either --steps or --tokens"),
    "few tokens": ({"steps": None, "tokens": 127}, PlanError, "--tokens 127: one step alone takes 128"),
    "no batch": ({"steps": None, "tokens": 128, "batch_size": 0}, PlanError, "--batch-size 0: it must be at least 1"),
    "no steps": ({"steps": 0}, PlanError, "--steps 0: it must be at least 1"),
    "one token": ({"length": 1}, PlanError, "--length 1: it must be at least 2"),
    "pieces": ({"grad_accum": 3}, PlanError, "--batch-size 4 cannot be split evenly .*with --grad-accum 3"),
    "no pieces": ({"grad_accum": 0}, PlanError, "--grad-accum 0: it must be at least 1"),
    "saves": ({"save_every": 0}, PlanError, "--save-every 0: it must be at least 1"),
    "lr": ({"lr": -1e-4}, PlanError, "--lr -0.0001: a learning rate is a finite number above 0"),
    "no lr": ({"lr": "nan"}, PlanError, "--lr nan: a learning rate is a finite number above 0"),
    "endless lr": ({"lr": "inf"}, PlanError, "--lr inf: a learning rate is a finite number above 0"),
    "rising lr": ({"lr": 1e-4, "min_lr": 1e-3}, PlanError, "--min-lr 0.001: a learning rate falls from 0.0001, and"),
    "above the model's lr": ({"lr": None, "min_lr": 1e-3}, PlanError, "0.001: a learning rate falls from 0.0005, and"),
    "min lr": ({"min_lr": -1e-3}, PlanError, "--min-lr -0.001: a learning rate falls from 0.01, and ends at 0"),
    "min lr alone": ({"lr": None, "min_lr": -1e-3}, PlanError, "--min-lr -0.001: a learning rate falls, and ends at 0"),
    "warm-up": ({"warm_up": 1.0}, PlanError, "--warm-up 1: it is a share of the steps"),
    "temperature": ({"temperature": 0.0}, PlanError, "--temperature 0 must be positive"),
    "hot": ({"temperature": "inf"}, PlanError, "--temperature inf must be positive"),
    "weight": ({"kd_weight": -1.0}, PlanError, "--kd-weight -1 not negative"),
    "missing data": ({"data": "/nowhere/x.txt"}, DataError, "no data at /nowhere/x.txt"),
    "little data": ({"data": "LITTLE"}, DataError, "has 0 windows of 32 tokens; at least 2 are needed"),
    "repeated data": (
        {"data": "SOME", "no_repeat": True}, DataError,
        "10 windows of 32 tokens to train on, 16 are wanted: 1.60 epochs; with --no-repeat at most --steps 2",
    ),
    "missing text": ({"eval_text": "/nowhere/y.txt"}, DataError, "no data at /nowhere/y.txt"),
    "little text": ({"eval_text": "LITTLE"}, DataError, "fewer than a window of 32"),
    "eval tokens": ({"eval_text": "TEXT", "eval_tokens": 1}, PlanError, "--eval-tokens 1: at least 2 are needed"),
    "the teacher": ({"out": "UNCUT", "force": True}, OutputError, "output folder overlaps the model folder"),
    "inside": ({"out": "INSIDE"}, OutputError, "output folder overlaps the model folder"),
    "above": ({"out": "ABOVE"}, OutputError, "output folder overlaps the model folder"),
    "exists": ({"out": "COPY"}, OutputError, "copy exists already; choose another folder or use --force"),
    "a file": ({"out": "FILE"}, OutputError, "little.txt is a file"),
    "below a file": ({"out": "FILE/out"}, OutputError, "cannot write"),
    "no run folder": ({"out": "BLOCKED", "force": True}, OutputError, "blocked.training is a file"),
    "control there": ({"control": True, "control_out": "COPY"}, OutputError, "copy exists already"),
    "control over it": ({"control": True, "control_out": "OUT"}, OutputError, "is, holds or lies in"),
    "fsdp": ({"fsdp": True}, PlanError, "--fsdp shards a model over GPUs: start one process for each with torchrun"),
    "log": ({"report_to": "none,wishes"}, PlanError, "--report-to wishes: wishes is not supported"),
    "device": ({"device": "cuda"}, PlanError, "no CUDA device here"),
    "dtype": ({"dtype": "int4"}, PlanError, "unknown dtype 'int4'"),
    "half": ({"dtype": "float16"}, PlanError, "--dtype float16 cannot be trained in"),
}  # fmt: skip


def words(changes: dict) -> list[str]:
    found = []
    for name, value in changes.items():
        flag = f"--{name.replace('_', '-')}"
        found += [] if value is None else [flag] if value is True else [flag, str(value)]
    return found


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_input_gets_one_line_and_writes_nothing(name, places, pairs, tmp_path, capsys, monkeypatch):
    changes, kind, message = BAD[name]
    places = places | {"OUT": tmp_path / "out", "CACHE": tmp_path / "cache", "FILE/out": places["FILE"] / "out"}
    given = {"model": "CUT", "out": "OUT", "teacher": "UNCUT", "data": "TEXT", **SHORT, **changes}
    given = {option: places.get(value, value) for option, value in given.items()}
    given |= {option: str(given[option]) for option in ("data", "eval_text") if given.get(option) is not None}
    model = given.pop("model")
    roots = (tmp_path, places["COPY"].parent, pairs[NAME][0].parent)
    before = {path for root in roots for path in root.rglob("*")}
    numbers = {option: float(value) for option, value in given.items() if value in ("nan", "inf")}
    with pytest.raises(kind) as refused:
        training_calls.recover(model, **{**given, **numbers})
    code, out, err = run(capsys, monkeypatch, "recover", model, *words(given))
    assert (code, out) == (2, "")
    assert re.search(message, err)
    assert err == f"slimstate: {as_flags(str(refused.value), flags_of(typer.main.get_command(app)))}\n"
    assert before == {path for root in roots for path in root.rglob("*")}


def without(package: str, monkeypatch) -> None:
    """As if it were not installed."""
    find_spec = options.find_spec
    monkeypatch.setattr(options, "find_spec", lambda name: None if name == package else find_spec(name))


@pytest.mark.parametrize(
    ("missing", "given", "way_out"),
    [
        ("peft", {"lora": True}, r"pip install 'slimstate\[recover\]'$"),
        ("accelerate", {}, r"pip install 'slimstate\[recover\]'$"),
        ("tensorboard", {"report_to": "tensorboard"}, r"pip install 'slimstate\[recover\]', or `report_to` none$"),
        ("wandb", {"report_to": "tensorboard, wandb"}, "pip install wandb, or `report_to` none$"),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_way_to_get_it(
    missing, given, way_out, recover, tmp_path, monkeypatch
):
    without(missing, monkeypatch)
    with pytest.raises(PlanError, match=f"^{missing} cannot be imported: {way_out}"):
        recover(NAME, tmp_path / "out", **given)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["full", "mixers"])
def test_peft_is_not_needed_without_adapters(what, recover, tmp_path, monkeypatch):
    without("peft", monkeypatch)
    recover(NAME, tmp_path / "out", **{what: True})


def test_text_that_runs_out_is_read_again_and_the_epochs_are_said(recover, places, tmp_path):
    said = Listener()
    record = recover(NAME, tmp_path / "out", data=str(places["SOME"]), progress=said)
    line = f"{places['SOME']} has 10 windows of 32 tokens to train on, 16 are wanted: 1.60 epochs"
    assert said.lines.count(line) == 1
    assert record.epochs == 1.6
    again = recover(NAME, tmp_path / "again", data=str(places["SOME"]), no_repeat=True, steps=2)  # as the refusal says
    assert again.epochs == 1


@pytest.mark.parametrize(
    ("name", "changes", "kind"),
    [
        (NAME, {"lora_rank": 5}, None),
        (GATED, {"lora": True}, GATED),
        (NAME, {"lora_targets": "all-linear"}, None),
        (GATED, {"lora_targets": "all-linear", "tokens": 700, "steps": None}, None),
        (GATED, PAPER, "paper"),
        (NAME, {}, "full"),
        (NAME, {"full": True}, "full"),
        (NAME, {"mixers": True}, None),
        (TIED[1], {"full": True}, TIED[1]),
    ],
)
def test_a_dry_run_says_what_training_trains_and_writes_nothing(name, changes, kind, pairs, recover, made, tmp_path):
    preview = training_calls.preview(pairs[name][1], teacher=pairs[name][0], **{**BRIEF, **changes})
    assert list(tmp_path.iterdir()) == []
    checkpoint, whole = Checkpoint.open(pairs[name][1]), not changes or {"full", "mixers"} & changes.keys()
    chosen = {option: value for option, value in changes.items() if option in SAYS_WHAT}
    adaptation = RecoverOptions(**chosen).adaptation(checkpoint)
    assert preview.unfrozen == (*adaptation.norms, *adaptation.biases)
    assert (preview.targets, preview.convolutions) == (adaptation.targets, adaptation.convolutions)
    assert (preview.targets == ()) == bool(whole)
    assert (preview.parameters, preview.out) == (checkpoint.parameters, None)
    record = recover(name, tmp_path / "out", **changes) if kind is None else record_of(made[kind])
    assert preview.trained_parameters == record.trained_parameters
    assert (preview.steps, preview.tokens) == (record.settings.steps, record.tokens)
    assert preview.settings == record.settings


def test_a_dry_run_needs_neither_text_nor_a_place(pairs, capsys, monkeypatch):
    given = ["recover", pairs[NAME][1], "--teacher", pairs[NAME][0], "--dry-run"]
    code, out, err = run(capsys, monkeypatch, *given, "--lora")
    assert (code, err) == (0, "")
    assert "adapters on:\n  model.layers.0.attn.q_proj\n" in out
    assert "trained whole:\n  model.layers.0.attn.q_conv1d\n" in out
    assert "2,000 steps, 65,536,000 tokens; dry run: nothing was trained" in out
    for words_for_all in ((), ("--full",)):
        code, out, err = run(capsys, monkeypatch, *given, *words_for_all)
        assert (code, err) == (0, "")
        assert out.startswith("all weights are trained\n")
    code, out, _ = run(capsys, monkeypatch, *given, "--json")
    assert json.loads(out) == slimstate.preview(pairs[NAME][1], teacher=pairs[NAME][0]).to_json()


def test_the_papers_recovery_is_what_it_says_and_what_its_code_trains():
    found = RecoverOptions.paper()
    assert found.samples == 32_000
    assert (found.batch_size, found.length, found.warm_up, found.lr, found.min_lr) == (16, 2048, 0.05, 1e-4, 1e-5)
    assert (found.lora_rank, found.lora_alpha, found.no_teacher) == (16, 32, False)
    assert (found.lora_targets, found.unfreeze) == (PAPER["lora_targets"], PAPER["unfreeze"])
    assert (found.kd_weight, found.temperature, found.seed) == (1.0, 2.0, 0)
    assert (found.full, found.mixers) == (False, False)


def test_a_preset_sets_defaults_and_what_is_given_beside_it_counts(pairs, capsys, monkeypatch):
    """Also where what is given is the usual default."""

    def asked(*options: object) -> Preview:
        given = ["recover", pairs[GATED][1], "--teacher", pairs[GATED][0], "--dry-run", "--json", *options]
        code, out, err = run(capsys, monkeypatch, *given)
        assert (code, err) == (0, "")
        return from_json(Preview, json.loads(out))

    paper = asked("--preset", "paper")
    assert paper == slimstate.preview(pairs[GATED][1], teacher=pairs[GATED][0], options=RecoverOptions.paper())
    assert {name.rpartition(".")[2] for name in paper.targets} == {"q_proj", "k_proj", "v_proj"}
    assert {name.rpartition(".")[2] for name in paper.unfrozen} == {
        "attn_norm",
        "mlp_norm",
        "o_norm",
        "norm",
        "dt_bias",
    }
    assert paper.settings == RecoverySettings(
        adaptation=paper.settings.adaptation, steps=2000, batch_size=16, length=2048, lr=1e-4, min_lr=1e-5,
        warm_up=0.05, seed=0, dtype="float32", kd_weight=1.0, temperature=2.0, full=False, mixers=False, lora_rank=16,
        lora_alpha=32, **PAPER,
    )  # fmt: skip
    default = asked()
    assert (default.unfrozen, default.targets, default.settings.full) == ((), (), True)
    assert asked("--lora-rank", 16) == asked("--lora") != default  # of adapters, so there are some
    assert asked("--lora-alpha", 32, "--full") == default
    mine = asked("--preset", "paper", "--lora-targets", "q_proj", "--lr", "3e-4", "--lora-rank", "16")
    assert (mine.settings.lora_targets, mine.settings.lr, mine.settings.lora_rank) == ("q_proj", 3e-4, 16)
    assert (mine.settings.unfreeze, mine.steps) == ("norms,biases", 2000)
    monkeypatch.setitem(options.PRESETS, "paper", lambda: RecoverOptions(lora_rank=5, steps=7))
    assert asked("--preset", "paper").settings.lora_rank == 5
    usual = asked("--preset", "paper", "--lora-rank", "16")
    assert (usual.settings.lora_rank, usual.settings.full) == (16, False)
    assert asked("--preset", "paper", "--tokens", "327680").steps == 10
    assert asked("--preset", "paper", "--full").settings.full
    code, _, err = run(capsys, monkeypatch, "recover", pairs[GATED][1], "--preset", "mine", "--dry-run")
    assert (code, err) == (2, "slimstate: unknown --preset 'mine'; there are paper\n")


def test_a_dry_run_and_the_card_name_norms_and_biases(pairs, made, capsys, monkeypatch):
    given = ["recover", pairs[GATED][1], "--teacher", pairs[GATED][0], "--preset", "paper", "--dry-run"]
    lines = run(capsys, monkeypatch, *given)[1].split()
    assert {"model.layers.0.attn.o_norm", "model.norm", "model.layers.1.attn.dt_bias"} <= {*lines}
    assert "norms and biases unfrozen" in (made["paper"] / "README.md").read_text()
    record = record_of(made["paper"])
    assert record.settings.adaptation.unfrozen == ("attn_norm", "dt_bias", "mlp_norm", "norm", "o_norm")
    assert f"--lora-targets {PAPER['lora_targets']} --unfreeze {PAPER['unfreeze']}" in record.command


def test_the_command_that_is_recorded_does_it_again(made, tmp_path, capsys, monkeypatch):
    record = record_of(made["controlled"])
    again = shlex.split(record.command.replace(str(made["controlled"]), str(tmp_path / "out")))
    code, out, err = run(capsys, monkeypatch, *again[1:])
    assert code == 0
    assert weights_of(tmp_path / "out") == weights_of(made["controlled"])
    assert weights_of(tmp_path / "out-control") == weights_of(made["control"])
    nats = record.measured.nats.known()
    assert [f"{value:.4f}" in out for value in nats.values()] == [True] * 4
    assert f"written to {tmp_path / 'out'}" in out
    assert "recovering 4/4  loss " in err
    assert "kernels: PyTorch" in err


@pytest.mark.parametrize("missing", ["data", "out"])
def test_the_command_asks_for_a_text_and_a_place(missing, pairs, text_file, tmp_path, capsys, monkeypatch):
    given = {"data": text_file, "out": tmp_path / "out", missing: None}
    code, out, err = run(capsys, monkeypatch, "recover", pairs[NAME][1], *words(given))
    assert (code, out) == (2, "")
    assert err == "slimstate: give --data TEXT and --out DIR, or --dry-run to train nothing\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("verb", "options"), [("recover", RecoverOptions), ("train", PretrainOptions)])
def test_the_command_and_the_function_have_the_same_options_and_defaults(verb, options):
    function = inspect.signature(getattr(slimstate, verb)).parameters
    theirs = {name: each.default for name, each in function.items()}
    assert theirs.pop("progress") is True
    for name in ("options", "trainer", "run"):
        assert theirs.pop(name) is None
    for value in (options, TrainingText, TrainerOptions, RunOptions):
        theirs |= {item.name: item.default for item in dataclasses.fields(value)}
    ours = {name: each.default for name, each in inspect.signature(getattr(commands, verb)).parameters.items()}
    assert ours.pop("as_json") is False
    if verb == "recover":
        del theirs["tokenizer"]  # of models in memory
    ours.pop("push_to_hub", None)
    if verb == "recover":
        assert (ours.pop("context"), ours.pop("preset")) == (inspect.Parameter.empty, None)  # which sets the others
        assert (ours.pop("dry_run"), ours.pop("out"), ours.pop("data")) == (False, None, None)  # a dry run needs none
        del theirs["out"], theirs["data"]
    else:
        del theirs["keep_adapter"]
        theirs["data"] = inspect.Parameter.empty
    assert ours == theirs


def test_a_misspelt_option_fails(pairs, tmp_path):
    with pytest.raises(TypeError, match="learning_rate"):
        RecoverOptions(learning_rate=1e-3)
    with pytest.raises(TypeError, match="step"):
        slimstate.recover(pairs[NAME][1], tmp_path / "out", data="text.txt", step=3)


def test_the_losses_are_written_for_tensorboard(recover, made, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    interrupt(recover, tmp_path / "out", report_to="tensorboard")
    record = recover(NAME, tmp_path / "out", report_to="tensorboard", resume=True)
    found = {}
    for path in (tmp_path / "out" / "runs").rglob("events*"):
        events = EventAccumulator(str(path)).Reload()
        for tag in ("train/loss", "train/distillation"):
            found |= {(tag, event.step): event.value for event in events.Scalars(tag)}
    for entry in record.log:
        assert found["train/loss", entry.step] == pytest.approx(entry.loss, rel=1e-5)
        assert found["train/distillation", entry.step] == pytest.approx(entry.distillation, rel=1e-5)
    assert weights_of(tmp_path / "out") == weights_of(made[NAME])


def test_another_seed_is_another_recovery(recover, made, tmp_path):
    other = recover(NAME, tmp_path / "other", seed=1)
    assert weights_of(tmp_path / "other") != weights_of(made[NAME])
    assert losses(other)[0] != losses(record_of(made[NAME]))[0]  # other windows come first


def test_the_tokenizer_goes_with_the_model(made):
    for folder in made.values():
        assert load_tokenizer(folder).get_vocab() == tiny.tokenizer().get_vocab()
