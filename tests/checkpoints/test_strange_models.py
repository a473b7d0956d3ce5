"""Models of strangers: what is not a plain model folder is refused in one line, and nothing outside it is touched."""

import importlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import slimstate
import tiny
from slimstate.checkpoints.model_card import code, fenced, prose
from slimstate.checkpoints.reader import INDEX, Checkpoint
from slimstate.checkpoints.safetensors_io import TensorFile, TensorFileWriter
from slimstate.system.errors import MAX_LINE, ModelError

NAME, GATED = tiny.PLAIN
DRRQR = {"method": "drrqr", "samples": 2, "length": 64}
NO_MAP = ({"weight_map": 5}, {"weight_map": {}})
BAD_METADATA = ({"metadata": []}, {"metadata": {"total_parameters": "x"}})
DEEP = ("[" * 100_000, '{"a":' * 3000 + "1" + "}" * 3000, '{"a": ' + "[" * 500 + "]" * 500 + "}")
NOT_WRITTEN = "config.json (is not JSON|is nested|holds text|is not a JSON object)"
ENTRY = {"key_dim": 8, "width": 16, "method": "l1", "correction": 1}
CODE = {
    "attn_implementation": "owner/kernel", "_attn_implementation": "owner/kernel@main:f",
    "_attn_implementation_internal": {"": "owner/kernel"}, "experts_implementation": "owner/experts",
    "configuration_files": ["config.5.0.0.json"], "transformers_weights": "other.safetensors",
    "kernel_config": {"x": "owner/kernel"}, "dtype": "load", "num_hidden_layers": 10**7, "hidden_size": 10**30,
    "norm_eps": float("inf"), "num_labels": 10**9, "slimstate": {"key_dim": 8},
}  # fmt: skip


@pytest.fixture
def model(folders, tmp_path) -> Path:
    return Path(shutil.copytree(folders[NAME], tmp_path / "model"))


def cut(folder: Path, out: Path | None, **options: Any) -> Any:
    return slimstate.prune(folder, out, **{"method": "l1", "key_dim": 8, **options})


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def refused(model: Path, words: str, **options: Any) -> None:
    """The cut is refused, and nothing but the model is there before and after."""
    before = {path: path.lstat().st_mtime_ns for path in model.parent.rglob("*")}
    with pytest.raises(slimstate.SlimstateError, match=words) as found:
        cut(model, model.parent / "cut", **options)
    assert len(str(found.value)) <= MAX_LINE
    assert before == {path: path.lstat().st_mtime_ns for path in model.parent.rglob("*")}


@pytest.mark.parametrize("name", ["../victim/x.safetensors", "{root}/victim/x.safetensors", "./{shard}", "", 5, None])
def test_an_index_names_files_in_its_folder(name, model):
    victim = model.parent / "victim"
    victim.mkdir()
    index = json.loads((model / INDEX).read_text())
    shard = index["weight_map"]["lm_head.weight"]
    shutil.copyfile(model / shard, victim / "x.safetensors")
    given = name.format(root=model.parent, shard=shard) if isinstance(name, str) else name
    change_json(model / INDEX, lambda data: data["weight_map"].update({"lm_head.weight": given}))
    refused(model, "not the name of a file in that folder")


def change(name: str, **values: Any) -> Callable[[Path], None]:
    return lambda model: change_json(model / name, lambda data: data.update(values))


def misplace(model: Path) -> None:
    shards = json.loads((model / INDEX).read_text())["weight_map"].values()
    change_json(model / INDEX, lambda data: data["weight_map"].update({"lm_head.weight": min(shards)}))


def pipe_in_place_of(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    # transformers takes the single file, slimstate took the index: what ran was not what was cut
    "two sets of weights": (lambda model: shutil.copy(min(model.glob("*.safetensors")), model / "model.safetensors"),
                            "libraries differ in which they load"),
    "an adapter": (lambda model: (model / "adapter_config.json").write_text("{}"),
                   r"adapter_config\.json, which makes libraries load other weights"),
    "a link to a folder": (lambda model: (model / "more").symlink_to(model.parent.parent), "leads out"),
    "a pipe": (lambda model: pipe_in_place_of(model / "vocab.txt"), "not a regular file"),
    "a pipe as config": (lambda model: pipe_in_place_of(model / "config.json"), "not a regular file"),
    "an index of other shards": (misplace, "does not hold lm_head.weight, as the index says"),
    "an entry of a cut": (change("config.json", slimstate=ENTRY), "its entry `slimstate` is invalid: correction"),
    **{f"an index with {values}": (change(INDEX, **values), "no weight_map") for values in NO_MAP},
    **{f"an index with {values}": (change(INDEX, **values), "invalid metadata") for values in BAD_METADATA},
    **{f"a config of {text[:9]}": (lambda model, text=text: (model / "config.json").write_text(text), NOT_WRITTEN)
       for text in (*DEEP, '{"\\ud800": 1}', "[]")},
}  # fmt: skip


@pytest.mark.parametrize("kind", SPOILED)
def test_what_does_not_belong_in_or_beside_a_model_is_refused(kind, model):
    spoil, words = SPOILED[kind]
    spoil(model)
    refused(model, words)


def entry(begin: int, end: int, **more: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end], **more}


TWO = {"a": entry(0, 8), "b": entry(8, 16)}
HEADERS: dict[str, tuple[Any, str]] = {
    "overlap": ({**TWO, "b": entry(4, 16)}, "invalid offset for tensor `[ab]`"),
    "alias": ({**TWO, "b": entry(0, 8)}, "invalid offset for tensor `[ab]`"),
    "gap": ({"a": entry(0, 4), "b": entry(8, 16)}, "invalid offset for tensor `b`"),
    "metadata": ({**TWO, "__metadata__": []}, "expected a (map|string)"),
    "numbers": ({**TWO, "__metadata__": {"a": 1}}, "expected a (map|string)"),
    "dtype": ({**TWO, "b": entry(8, 16, dtype="X32")}, "unknown variant `X32`, expected one of"),
    "shape": ({**TWO, "b": entry(8, 16, shape=[-1])}, "integer `-1`"),
    "sizes": ({**TWO, "b": entry(8, 16, shape=[3])}, "invalid shape, data type, or offset"),
    "number": ({**TWO, "b": 5}, "integer `5`"),
    "mark": (b"\xef\xbb\xbf" + json.dumps(TWO).encode(), "expected value at line 1"),
    "twice": (b'{"a": %s, "a": %s}' % (2 * (json.dumps(entry(0, 16)).encode(),)), "a occurs twice"),
    "large": ({**TWO, "c": entry(16, 16, shape=[0, 2**62, 2**62])}, "c cannot have the shape"),
    "nested": (b'{"a":' * 3000, "recursion limit exceeded"),
    "long": ({**TWO, "x" * 50_000: 5}, "integer `5`"),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_header_that_the_library_would_refuse_is_refused(kind, tmp_path):
    header, words = HEADERS[kind]
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(ModelError, match=words) as found:
        TensorFile.open(path)
    assert len(str(found.value)) <= MAX_LINE


def test_a_header_that_the_library_takes_is_taken(tmp_path):
    tensors = {"a": torch.ones(3, 0), "b": torch.ones(2, dtype=torch.float8_e4m3fn), "c": torch.tensor(1)}
    tensors |= {"d": torch.ones(3, dtype=torch.uint16), "e": torch.ones(2, 2, dtype=torch.bool)}
    save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    found = TensorFile.open(tmp_path / "x.safetensors")
    assert {name: info.shape for name, info in found.tensors.items()} == {n: tuple(t.shape) for n, t in tensors.items()}


def test_what_cannot_be_loaded_never_appears(folders, tmp_path, monkeypatch):
    put = TensorFileWriter.put

    def spoiling(file: TensorFileWriter, *given: Any) -> None:
        put(file, *given)
        with file.target.open("r+b") as target:
            target.write(b"\xff" * 8)

    monkeypatch.setattr(TensorFileWriter, "put", spoiling)
    with pytest.raises(ModelError, match=r"not a safetensors file"):
        cut(folders[NAME], tmp_path / "cut")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "name", "file"),  # sums that `calibrate` began before the change would be of neither
    [("planning", "plan_of", "weights"), ("cut", "cut_config", "weights"), ("cut", "cut_config", "config"),
     ("evidence", "calibrate", "weights")],
)  # fmt: skip
def test_a_model_that_changes_while_it_is_cut_is_refused(module, name, file, model, text_file, monkeypatch):
    work = getattr(place := importlib.import_module(f"slimstate.pruning.{module}"), name)

    def changing(*given: Any, **options: Any) -> Any:
        result = work(*given, **options)
        if file == "weights":
            path = sorted(model.glob("*.safetensors"))[-1]
            save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path, {"format": "pt"})
        else:
            change_json(model / "config.json", lambda data: data.update(hidden_act="relu"))
        return result

    monkeypatch.setattr(place, name, changing)
    text = {"data": text_file, "evidence": model.parent / "evidence", **DRRQR}
    with pytest.raises(ModelError, match=r"changed while it was read|config\.json changed"):
        cut(model, model.parent / "cut", **(text if name == "calibrate" else {}))
    assert [path.name for path in model.parent.iterdir()] == ["model"]


def test_other_bytes_are_noticed_though_no_time_tells(model, monkeypatch):
    """On a file system without times: what was copied is compared with what was fingerprinted."""
    from slimstate.system.input_files import Identity

    monkeypatch.setattr(Identity, "__eq__", lambda *_: True)
    checkpoint = Checkpoint.open(model)
    assert checkpoint.fingerprint
    for path in model.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\0")
    monkeypatch.setattr(Checkpoint, "open", lambda _: checkpoint)
    with pytest.raises(ModelError, match=r"changed while it was read: .* is different"):
        cut(model, model.parent / "cut")


@pytest.mark.parametrize("name", ["vocab.txt", "notes/more", "tokenizer.json", "model-00001-of-00005.safetensors"])
@pytest.mark.parametrize("target", ["/etc/passwd", "/dev/zero", "../secret", "nowhere", ".."])
def test_links_that_lead_out_are_refused(name, target, model):
    (model.parent / "secret").write_text("x")
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(model.parent / "secret" if target == "../secret" else target)
    refused(model, "leads out of the model folder|broken link|not a regular file")


def test_a_snapshot_of_the_hub_is_cut_and_its_links_become_files(folders, tmp_path):
    repository = tmp_path / "models--owner--name"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    blobs.mkdir(parents=True)
    for path in folders[NAME].rglob("*"):
        if path.is_file():
            blob, link = blobs / str(len(list(blobs.iterdir()))), snapshot / path.relative_to(folders[NAME])
            shutil.copyfile(path, blob)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))
    cut(snapshot, tmp_path / "cut")
    assert not any(path.is_symlink() for path in (tmp_path / "cut").rglob("*"))
    other = tmp_path / "models--owner--other" / "blobs" / "x"
    other.parent.mkdir(parents=True)
    other.write_text("of another repository")
    (snapshot / "vocab.txt").symlink_to(other)
    with pytest.raises(ModelError, match=r"leads out"):
        Checkpoint.open(snapshot)


@pytest.mark.parametrize(("name", "nested"), [*itertools.product(CODE, (False, True))][:-1])  # slimstate: not nested
def test_a_config_asks_for_what_a_config_may_ask_for(name, nested, model):
    value = {"inner": {name: CODE[name]}} if nested else {name: CODE[name]}
    change_json(model / "config.json", lambda data: data.update(value))
    started = time.monotonic()
    refused(model, f"config.json: .*{name}")
    assert time.monotonic() - started < 5


def test_known_implementations_are_taken(model):
    known = {"_attn_implementation": "sdpa", "torch_dtype": "torch.float32"}
    change_json(model / "config.json", lambda data: data.update(known))
    assert Checkpoint.open(model).mixers


def test_a_damaged_tokenizer_and_tokens_beyond_the_vocabulary_are_one_line(model, text_file):
    for name, text in (
        ("tokenizer.json", '{"model": 5}'),
        ("tokenizer.json", "[" * 5000),
        ("tokenizer_config.json", '{"eos_token": [1]}'),
        ("tokenizer_config.json", '{"fast_tokenizer_files": ["../../tokenizer.5.0.0.json"]}'),
    ):
        kept = (model / name).read_bytes()
        (model / name).write_text(text)
        refused(model, "no usable tokenizer|not the name of a file", data=text_file, **DRRQR)
        (model / name).write_bytes(kept)
    change_json(model / "tokenizer.json", lambda data: data["model"]["vocab"].update(e=40_000))
    refused(model, "has token 40000, and the model embeddings of 258", data=text_file, **DRRQR)


def test_a_large_norm_epsilon_is_said_and_a_larger_one_refused(folders, tmp_path):
    model = Path(shutil.copytree(folders[GATED], tmp_path / "model"))
    change_json(model / "config.json", lambda data: data.update(norm_eps=1e-2))
    refused(model, "all norms share it: it must be at most 0.001")
    assert cut(model, None, keep_norm_eps=True).correction.startswith("not corrected")
    change_json(model / "config.json", lambda data: data.update(norm_eps=2e-4))
    assert "not exact, because the other norms share an epsilon that is now 0.0006" in cut(model, None).correction
    change_json(model / "config.json", lambda data: data.update(norm_eps=1e-5))
    assert cut(model, None).correction.endswith("so that cutting equals zeroing")
    assert "norm_eps times 3 compensates" in cut(model, None).correction
    slimstate.prune(model, tmp_path / "card", method="l1", key_dim=8, progress=False)
    assert "Correction: norm_eps times 3 compensates" in (tmp_path / "card" / "README.md").read_text()
    assert "linear layers, 2 key heads" in slimstate.inspect(model).headline()


def test_values_that_fail_only_when_a_model_runs_are_refused(folders, tmp_path):
    model = shutil.copytree(folders["qwen3_next-plain"], tmp_path / "experts")
    change_json(model / "config.json", lambda data: data.pop("num_experts_per_tok"))
    refused(model, "num_experts_per_tok 10 must be at most the 4 experts")
    change_json(model / "config.json", lambda data: data.update(num_experts_per_tok=2, rms_norm_eps="little"))
    refused(model, "rms_norm_eps must be a number, got little")
    change_json(model / "config.json", lambda data: data.update(rms_norm_eps=1e-6, pad_token_id=True))
    refused(model, "pad_token_id must be a token id, got True")
    change_json(model / "config.json", lambda data: data.update(pad_token_id=None, eos_token_id=[1, 2]))
    cut(model, None)


def test_a_model_card_shows_names_as_text(model):
    source = model.parent / "a```\n# owned\n![x](evil) `b`"
    model.rename(source)
    out = source.parent / "<script>[x](y)*"
    cut(source, out)
    card = (out / "README.md").read_text()
    assert "\n# owned" not in card
    assert "# \\<script\\>\\[x\\](y)\\*: key dim 8" in card
    assert "base_model" not in card
    assert 'from_pretrained("<script>[x](y)*")' in card


def test_plain_names_are_left_as_they_are():
    sentence = "norm_eps times 2 compensates it, so that cutting equals zeroing"
    for text in ("models/delta_net-1.3b", "a cut (0.5)", sentence):
        assert prose(text) == text
        assert code(text) == f"`{text}`"
        assert fenced(text) == f"```\n{text}\n```"
    assert code("a``b`") == "``` a``b` ```"


def test_the_command_says_one_line_however_long_the_input(model, refusal):
    change_json(model / "config.json", lambda data: data.update(model_type="x" * 50_000))
    assert len(refusal("inspect", model)) <= MAX_LINE
