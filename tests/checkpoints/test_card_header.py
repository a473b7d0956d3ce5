"""The header of a card keeps what the hub needs of the original's, and names nothing of this machine."""

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id

import slimstate
import tiny
from slimstate.checkpoints.card_header import header_of, public_name, public_path, with_original

NAME = "delta_net-plain"
OURS = "---\nlibrary_name: transformers\ntags:\n- slimstate\n---\n# A model\n"
ORIGINAL = (
    "---\nlicense: apache-2.0\nlicense_link: https://example.org/licence\nlanguage:\n- en\n- de\n"
    "tags: [chat, linear-attention]\nbase_model: someone/base\ndatasets: [someone/data]\n---\n# The original\n"
)
NO_HEADERS = [
    "", "no header", "---\n- a list\n---\n", "---\n{broken\n---\n", "---\nlicense: [1, 2]\nlanguage: 3\n---\n",
    "---\nlicense: {a: b}\ntags: {c: d}\nbase_model: /home/me/model\n---\n",
    "---\ntags: [" + "x, " * 500 + "x]\n---\n",
    "---\nlicense: !!python/object/apply:os.system [ls]\n---\n", '---\nlicense: "a\\0b"\n---\n',
]  # fmt: skip


def test_licence_language_tags_and_base_stay(tmp_path):
    (tmp_path / "README.md").write_text(ORIGINAL)
    found = header_of(with_original(OURS, tmp_path))
    assert found == {
        "license": "apache-2.0", "license_link": "https://example.org/licence", "language": ["en", "de"],
        "library_name": "transformers", "base_model": "someone/base", "tags": ["chat", "linear-attention", "slimstate"],
    }  # fmt: skip
    own = OURS.replace("tags:", "base_model: some/model\ntags:")
    assert header_of(with_original(own, tmp_path))["base_model"] == "some/model"


@pytest.mark.parametrize("header", NO_HEADERS)
def test_what_is_no_header_of_a_card_is_left_out(header, tmp_path):
    (tmp_path / "README.md").write_text(header)
    assert header_of(with_original(OURS, tmp_path)) == {"library_name": "transformers", "tags": ["slimstate"]}


def test_places_of_this_machine_become_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo" / "model").mkdir(parents=True)
    told = {"/home/me/model": "model", "demo/model": "model", "some/model": "some/model", "text.txt": "text.txt",
            "some/data:config:train": "some/data:config:train", "../x/y.jsonl": "y.jsonl"}  # fmt: skip
    assert {given: public_name(given) for given in told} == told
    in_commands = {**told, "demo/model": "demo/model", "~/model": "model"}
    assert {given: public_path(given) for given in in_commands} == in_commands


def test_cards_of_a_cut_and_its_reconstruction_are_fit_for_the_hub(tmp_path, text_file):
    base = tiny.save(tiny.build(tiny.VARIANTS[NAME]), tmp_path / "private" / "model")
    (base / "README.md").write_text(ORIGINAL)
    cut, better = tmp_path / "private" / "cut", tmp_path / "private" / "better"
    slimstate.prune(base, cut, method="l1", key_dim=8, progress=False)
    slimstate.reconstruct(cut, better, data=text_file, steps=1, batch=2, samples=4, length=32, progress=False)
    for folder in (cut, better):
        text = (folder / "README.md").read_text()
        assert "private" not in text
        assert str(text_file.parent) not in text
        data = ModelCard(text).data
        assert (data.license, data.language, data.base_model) == ("apache-2.0", ["en", "de"], "someone/base")
        assert set(data.tags) >= {"chat", "slimstate", "delta_net"}
        validate_repo_id(data.base_model)
        assert ("## Reconstructed" in text) == (folder == better) == ("Nothing was retrained" not in text)
