"""A recovered model is a plain checkpoint: only what was trained differs, and its files describe the recovery."""

import json

import pytest
import torch

import slimstate
import tiny
from launching import stock_logits
from recoveries import GATED, NAME, PAPER, TIED, files_of, history_of, logits, record_of, weights_of
from slimstate.checkpoints.reader import Checkpoint
from slimstate.core.file_names import CONFIG, PLAN
from slimstate.models.load import load, load_tokenizer
from slimstate.records.schema import to_json
from slimstate.records.training import RecoveryRecord

pytestmark = pytest.mark.slow
RECOVERED = (NAME, GATED, "bfloat16", "full", *TIED, "alone", "controlled", "twice", "control", "paper")
ALL_WEIGHTS = ("full", *TIED)


def sources_of(kind, pairs, recoveries) -> tuple[Checkpoint, Checkpoint]:
    """Return the uncut model, and the model that was recovered."""
    uncut, cut = pairs[NAME if kind in ("full", "alone", "controlled", "twice", "control") else kind]
    return Checkpoint.open(uncut), Checkpoint.open({"twice": recoveries[NAME], "control": uncut}.get(kind, cut))


@pytest.fixture(scope="module")
def loaded(recoveries, tmp_path_factory):
    """All recoveries, with the logits of the stock class from a fresh process that cannot import PEFT in each."""
    folders = {kind: recoveries[kind] for kind in (*RECOVERED, "cut again", "cut control")}
    ids = tmp_path_factory.mktemp("ids") / "ids.pt"
    torch.save(tiny.token_ids(), ids)
    stock_logits(ids, folders.values(), "--without-peft")
    return folders


@pytest.mark.parametrize("kind", [*RECOVERED, "cut again", "cut control"])
def test_the_stock_class_loads_it_in_a_fresh_process_without_peft(kind, loaded):
    expected = logits(load(loaded[kind], device="cpu").model)
    torch.testing.assert_close(torch.load(loaded[kind] / "logits.pt"), expected, rtol=1e-5, atol=1e-5)
    assert load_tokenizer(loaded[kind]).get_vocab() == tiny.tokenizer().get_vocab()


@pytest.mark.parametrize("kind", RECOVERED)
def test_only_what_is_trained_changes(kind, pairs, recoveries):
    before, after = sources_of(kind, pairs, recoveries)[1], Checkpoint.open(recoveries[kind])
    source, folder = before.folder, recoveries[kind]
    assert files_of(folder) == files_of(source) | {RecoveryRecord.FILE, CONFIG, "README.md"}
    assert before.tensors.keys() == after.tensors.keys()
    files = [{name: list(file.tensors) for name, file in each.files.items()} for each in (before, after)]
    assert files[0] == files[1]
    assert {info.dtype for info in after.tensors.values()} == {"BF16" if kind == "bfloat16" else "F32"}
    projections = ("q_proj", "k_proj", "v_proj") if kind == "paper" else before.mixers[0].projections
    modules = {f"{mixer.path}.{part}" for mixer in before.mixers for part in (*projections, *mixer.convolutions)}
    for name in before.tensors:
        unfrozen = kind == "paper" and ("norm" in name or "bias" in name)
        is_trained = kind in ALL_WEIGHTS or unfrozen or name.rpartition(".")[0] in modules
        assert torch.equal(before.read(name), after.read(name)) != is_trained, name
    changed = {"config.json", "README.md", RecoveryRecord.FILE, CONFIG, "notes"}
    for name in files_of(source) - before.files.keys() - changed:
        assert (source / name).read_bytes() == (folder / name).read_bytes()
    configs = [{key: value for key, value in each.config.items() if key != "slimstate"} for each in (before, after)]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("kind", RECOVERED)
def test_the_config_lists_the_recovery_after_everything_before_it(kind, pairs, recoveries):
    uncut, source = sources_of(kind, pairs, recoveries)
    before, now = dict(source.config.get("slimstate", {})), history_of(recoveries[kind])
    *earlier, last = now.pop("recovered")
    assert earlier == before.pop("recovered", [])
    assert now == before
    record = record_of(recoveries[kind])
    assert (last["model"], last["fingerprint"]) == (source.source, source.fingerprint)
    assert (last["model"], last["fingerprint"]) == (record.model, record.fingerprint)
    teacher = (None, None) if kind == "alone" else (uncut.source, uncut.fingerprint)
    assert (last["teacher"], last["teacher_fingerprint"]) == teacher
    assert last["tokens"] == record.tokens == 4 * 4 * 32
    assert (last["settings"], last["corpus"]) == (to_json(record.settings), to_json(record.corpus))
    assert last["settings"].items() >= {"lr": 1e-2, "steps": 4, "full": kind in ALL_WEIGHTS}.items()
    assert (record.cut is None) == ("key_dim" not in now) == (kind == "control")


def test_a_cut_after_a_recovery_keeps_both_in_the_history(recoveries):
    """The control was never cut, and its history has no cut."""
    again, cut_control = history_of(recoveries["cut again"]), history_of(recoveries["cut control"])
    (earlier,) = again["history"]
    assert earlier == {name: value for name, value in history_of(recoveries[NAME]).items() if name != "history"}
    assert (earlier["key_dim"], len(earlier["recovered"]), again["width"], again["key_dim"]) == (8, 1, 8, 6)
    assert json.loads((recoveries["cut again"] / PLAN).read_text())["parent"]["key_dim"] == 8
    assert history_of(recoveries["control"]).keys() == {"recovered"}
    assert cut_control["history"] == [history_of(recoveries["control"])]
    assert json.loads((recoveries["cut control"] / PLAN).read_text())["parent"] is None
    cuts = {kind: slimstate.inspect(recoveries[kind]).already_cut for kind in ("control", "twice", "cut control")}
    assert (cuts["control"], cuts["twice"].key_dim, cuts["cut control"].width) == (None, 8, 24)


def test_every_card_describes_the_recovery(recoveries):
    cards = {kind: (recoveries[kind] / "README.md").read_text() for kind in (*RECOVERED, "cut again", "cut control")}
    assert not [kind for kind, card in cards.items() if "{" in card or "None" in card]
    titles = dict.fromkeys(RECOVERED, "key dim 8 instead of 24, recovered") | {"control": "fine-tuned, not cut"}
    titles |= {"cut again": "key dim 6 instead of 8", "cut control": "key dim 8 instead of 24"}
    for kind, card in cards.items():
        assert f"\n# {recoveries[kind].name}: {titles[kind]}\n" in card
    for kind in RECOVERED:
        assert ("all weights" in cards[kind]) == (kind in ALL_WEIGHTS)
        assert ("distillation from" in cards[kind]) == (kind != "alone")
        assert ("Cut: key dim 24 to 8 by `l1`." in cards[kind]) == (kind != "control")
        assert ("with the same fine-tuning" in cards[kind]) == (kind == "controlled")
        assert cards[kind].count("Fine-tuned on 512 tokens.") == (kind == "twice")
        assert ("norms and biases unfrozen" in cards[kind]) == (kind == "paper")
        assert "slimstate recover" in cards[kind]
    assert "Cut before: key dim 24 to 8 by `l1`.\nFine-tuned before on 512 tokens." in cards["cut again"]
    assert "\nFine-tuned before on 512 tokens." in cards["cut control"]
    assert "Cut before" not in cards["cut control"]
    paper = record_of(recoveries["paper"])
    assert f"--lora-targets {PAPER['lora_targets']} --unfreeze {PAPER['unfreeze']}" in paper.command
    assert paper.settings.adaptation.unfrozen == ("attn_norm", "dt_bias", "mlp_norm", "norm", "o_norm")


@pytest.mark.parametrize("name", [*tiny.PLAIN, "paper"])
def test_the_cut_model_with_a_kept_adapter_is_the_recovered_model(name, recover, pairs, recoveries, tmp_path):
    from peft import PeftModel

    recover(name, tmp_path / "out", keep_adapter=True, **(PAPER if name == "paper" else {}))
    adapted = PeftModel.from_pretrained(load(pairs[name][1], device="cpu").model, tmp_path / "out" / "adapter")
    recovered = load(tmp_path / "out", device="cpu").model
    torch.testing.assert_close(logits(adapted), logits(recovered), rtol=1e-4, atol=1e-4)
    assert (logits(recovered) - logits(load(pairs[name][1], device="cpu").model)).abs().max() > 0.1
    assert weights_of(tmp_path / "out") == weights_of(recoveries[name])
