"""A pre-training writes a plain checkpoint, equals a loop written by hand, can be resumed, and streams its text."""

import itertools
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_shared_filters import check_shared
from transformers import get_scheduler

import slimstate
import tiny
from launching import stock_logits
from recoveries import history_of, logits, losses, stop_at, weights_of
from slimstate.checkpoints.reader import Checkpoint
from slimstate.data.corpus import Corpus, Schedule
from slimstate.data.documents import Piece, Reading
from slimstate.families import family_of
from slimstate.models.load import load, load_tokenizer
from slimstate.models.shapes import read_shape, shipped_shapes
from slimstate.models.stock import stock_model
from slimstate.records.training import TrainingRecord
from slimstate.system.errors import DataError, ModelError, OutputError, PlanError
from slimstate.training.initial_model import END_OF_TEXT, InitialModel, train_tokenizer

pytestmark = pytest.mark.slow
SHORT = {"steps": 6, "length": 32, "batch_size": 4, "lr": 1e-2, "min_lr": 1e-3, "save_every": 2, "report_to": "none"}
KINDS = ["delta_net", "gated_deltanet", "head", "all"]
PLAIN = tiny.SHAPES["delta_net"]
EXPERTS = {"model_type": "qwen3_next", "hidden_size": 32, "intermediate_size": 48, "vocab_size": 300}
EXPERTS |= tiny.VARIANTS["qwen3_next-plain"].options


@pytest.fixture(scope="module")
def configs(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("configs")
    return {name: tiny.write_shape(root / f"{name}.json", name) for name in tiny.SHAPES}


def train(*args, **options) -> TrainingRecord:
    return slimstate.train(*args, progress=False, **options)


@pytest.fixture(scope="module")
def models(configs, text_file, tmp_path_factory) -> dict[str, Path]:
    """Models of both families and with shared filters, with the logits of the stock class in a fresh process."""
    root = tmp_path_factory.mktemp("trained")
    folders = {kind: root / kind for kind in (*KINDS, "further", "cut")}
    for kind in KINDS:
        sharing = kind if kind in ("head", "all") else None
        config = configs.get(kind, configs["delta_net"])
        train(config, folders[kind], data=text_file, shared_filters=sharing, **SHORT)
    train(folders["head"], folders["further"], data=text_file, seed=1, **SHORT)
    slimstate.prune(folders["head"], folders["cut"], method="l1", key_dim=8)
    torch.save(tiny.token_ids(), root / "ids.pt")
    stock_logits(root / "ids.pt", folders.values())
    return folders


def record_of(folder: Path) -> TrainingRecord:
    return TrainingRecord.read(folder / TrainingRecord.FILE)


@pytest.mark.parametrize("kind", [*KINDS, "further", "cut"])
def test_the_stock_class_loads_a_trained_model_in_a_fresh_process(kind, models):
    here = logits(load(models[kind], device="cpu").model)
    torch.testing.assert_close(torch.load(models[kind] / "logits.pt"), here, rtol=1e-5, atol=1e-5)
    assert not list(models[kind].parent.glob("*.training"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_record_has_the_losses_and_the_measurements(kind, models):
    record = record_of(models[kind])
    assert record.to_json()["kind"] == "training"
    assert [entry.step for entry in record.log] == [1, 2, 3, 4, 5, 6]
    assert record.measured.nats.after < record.measured.nats.before
    assert record.tokens == 6 * 4 * 32
    assert record.tokens_per_second > 0
    assert record.parameters == Checkpoint.open(models[kind]).parameters
    assert f"perplexity {record.measured.perplexity['after']:.2f}" in (models[kind] / "README.md").read_text()
    (entry,) = history_of(models[kind])["trained"]
    assert entry["corpus"]["digest"] == record.corpus.digest
    assert entry["settings"]["lora_rank"] is None


@pytest.mark.parametrize("kind", ["head", "all", "further", "cut"])
def test_shared_filters_are_trained_as_one_and_remembered(kind, models):
    sharing = "all" if kind == "all" else "head"
    check_shared(models[kind], sharing)
    assert history_of(models[kind])["shared_filters"] == sharing
    if kind != "cut":
        assert record_of(models[kind]).shared_filters == sharing
        own = record_of(models["delta_net"]).trained_parameters
        assert record_of(models[kind]).trained_parameters < own


def test_training_further_starts_from_the_weights_of_the_model(models):
    nats = [record_of(models[name]).measured.nats for name in ("head", "further")]
    assert nats[1].before == pytest.approx(nats[0].after, rel=0.05)
    assert len(history_of(models["further"])["trained"]) == 2
    assert not (models["cut"] / TrainingRecord.FILE).exists()  # it is of the uncut weights
    assert "Trained before on 768 tokens" in (models["cut"] / "README.md").read_text()


def test_training_equals_a_loop_written_by_hand(configs, text_file, tmp_path):
    """AdamW, a warm-up, a cosine, gradients clipped at one, the windows in the order of the schedule."""
    options = {**SHORT, "weight_decay": 0.1, "adam_eps": 1e-4, "warm_up": 0.34}
    record = train(configs["delta_net"], tmp_path / "out", data=text_file, **options)
    config = read_shape(str(configs["delta_net"]))
    InitialModel(config=config).create(tmp_path / "start", str(text_file), seed=0, dtype="float32")
    tokenizer = load_tokenizer(tmp_path / "start")
    corpus = Corpus.collect(tokenizer, str(text_file), 32, 24, 1, tmp_path)
    model = load(tmp_path / "start", device="cpu").model.train()
    decayed = [p for name, p in model.named_parameters() if "norm" not in name and "bias" not in name]
    rest = [p for name, p in model.named_parameters() if "norm" in name or "bias" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-4)
    steps = {"num_warmup_steps": 2, "num_training_steps": 6, "scheduler_specific_kwargs": {"min_lr": 1e-3}}
    scheduler = get_scheduler("cosine_with_min_lr", optimizer, **steps)
    schedule, expected = Schedule(corpus, 24, 0), []
    for step in range(6):
        ids = torch.stack([schedule[4 * step + n]["input_ids"] for n in range(4)])
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        expected.append(float(loss))
    assert losses(record) == pytest.approx(expected, rel=1e-4)


def test_an_interrupted_training_ends_with_the_same_bytes(configs, models, text_file, tmp_path):
    options = {"data": text_file, "shared_filters": "head", **SHORT}
    with stop_at(5):
        train(configs["delta_net"], tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    with pytest.raises(OutputError, match="holds unfinished training"):
        train(configs["delta_net"], tmp_path / "out", **options)
    with pytest.raises(PlanError, match=r"started with other settings: shared_filters head, now all"):
        train(configs["delta_net"], tmp_path / "out", **{**options, "shared_filters": "all"}, resume=True)
    record = train(configs["delta_net"], tmp_path / "out", **options, resume=True)
    assert losses(record) == losses(record_of(models["head"]))
    assert weights_of(tmp_path / "out") == weights_of(models["head"])


def test_text_is_read_as_a_stream(configs, tmp_path, monkeypatch):
    """From a text without an end: no more of it is read than is trained on."""

    def endless(reading, render=None):
        for number in itertools.count():
            assert number < 2000
            yield Piece(text=tiny.text(4000, seed=number), ends=True)

    monkeypatch.setattr(Reading, "pieces", endless)
    monkeypatch.setattr("slimstate.training.initial_model.MAX_CHARACTERS", 20_000)
    record = train(configs["delta_net"], tmp_path / "out", data="endless", **SHORT)
    assert record.corpus.windows == 25
    assert record.epochs == 1


def test_a_trained_tokenizer_decodes_every_text(text_file, tmp_path):
    words = train_tokenizer(str(text_file), 300)
    assert len(words) <= 300
    text = "Ein Zustand, 状態 \x00 and a tab\t."
    assert words.decode(words(text)["input_ids"]) == text
    assert words(f"state{END_OF_TEXT}key")["input_ids"].count(words.eos_token_id) == 1
    with pytest.raises(DataError, match="vocab_size must be at least 257 for a tokenizer of bytes, got 100"):
        train_tokenizer(str(text_file), 100)


@pytest.mark.parametrize("name", shipped_shapes())
def test_a_shipped_shape_is_as_large_as_its_name_says(name):
    config = read_shape(name)
    family, size = name.removesuffix("-wide").split("-")
    assert family_of(config).model_type == family
    model = stock_model({**config, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0})
    parameters = sum(weight.numel() for weight in model.parameters())
    assert parameters == pytest.approx(float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]], rel=0.15)


def test_a_hybrid_without_experts_is_trained(text_file, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS | {"mlp_only_layers": list(range(8))}))
    record = train(tmp_path / "config.json", tmp_path / "out", data=text_file, **{**SHORT, "steps": 2})
    assert record.tokens == 2 * 4 * 32
    assert load(tmp_path / "out").model.config.model_type == "qwen3_next"


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ("delta_net-9t", {}, "no config delta_net-9t: give a file, a model folder, or one of delta_net-1.3b"),
        ("MODEL", {"shared_filters": "all"}, "leave out `tokenizer` and `shared_filters`"),
        (PLAIN, {"shared_filters": "layer"}, "unknown `shared_filters` layer; there are head, all"),
        (PLAIN, {"second_beta": 1.0}, "`second_beta` must be less than 1, got 1"),
        (PLAIN, {"tokenizer": "no/such"}, "no tokenizer at no/such"),
        (PLAIN, {"tokenizer": "~nobody-at-all/x"}, r"^no "),
        (PLAIN, {"data": None}, "a training needs text: give it with `data`"),
        (PLAIN, {"data": "missing.txt"}, r"^no "),
        (PLAIN, {"eval_text": "missing.txt"}, r"^no "),
        (PLAIN, {"out": "MODEL"}, "exists already"),
        (PLAIN | {"vocab_size": 260}, {"tokenizer": "MODEL"}, "the config says vocab_size 260"),
        (PLAIN | {"vocab_size": "many"}, {"tokenizer": "MODEL"}, "vocab_size must be a positive number, got many"),
        (PLAIN | {"use_short_conv": False}, {"shared_filters": "all"}, "delta_net with this config has no filters"),
        ({"model_type": "qwen3_next"}, {"shared_filters": "head"}, "qwen3_next with this config has no filters to"),
        ({"model_type": "qwen3_5", "text_config": {}}, {}, "qwen3_5 is more than a language model"),
        (EXPERTS, {}, r"experts.* cannot be trained.*choose a config"),
        ({"model_type": "minicpmv4_6"}, {}, "minicpmv4_6 is more than a language model"),
        ({"model_type": "qwen3_next", "quantization_config": "fp8"}, {}, "quantization_config must have the settings"),
        ({"model_type": "qwen3_next", "quantization_config": {"quant_method": "fp8"}}, {}, r"quantised model \(fp8\)"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_any_work(config, options, message, models, text_file, tmp_path):
    if isinstance(config, dict):
        (tmp_path / "config.json").write_text(json.dumps(config))
        config = tmp_path / "config.json"
    options = {"config": config, "data": text_file, "out": tmp_path / "new" / "out", **SHORT, **options}
    options = {name: str(models["head"]) if value == "MODEL" else value for name, value in options.items()}
    before = sorted(tmp_path.iterdir())
    with pytest.raises((DataError, ModelError, OutputError, PlanError), match=message):
        train(options.pop("config"), **options)
    assert sorted(tmp_path.iterdir()) == before
