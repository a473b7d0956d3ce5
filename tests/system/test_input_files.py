"""Quotes are short, and names stay where they belong."""

import os
from pathlib import Path

import pytest

from slimstate.system.errors import DataError, ModelError, quoted, reason_of
from slimstate.system.input_files import check_name, open_regular, read_bytes
from slimstate.system.json_files import MAX_DEPTH, read_json

ELSEWHERE = [
    "",
    ".",
    "..",
    "/a",
    "../a",
    "a/../b",
    "./a",
    "a/",
    "a//b",
    "a\0",
    "a\nb",
    "a\\b",
    None,
    5,
    ["a"],
    "link/a",
]


@pytest.mark.parametrize("name", ["a", "a.b", "sub/a", "ä", "a b", "...", "-x"])
def test_plain_names_are_taken(name, tmp_path):
    assert check_name(tmp_path, name, ModelError) == name


@pytest.mark.parametrize("name", ELSEWHERE)
def test_names_that_lead_elsewhere_are_refused(name, tmp_path):
    (tmp_path / "link").symlink_to("/")
    with pytest.raises(ModelError, match=r"not the name of a file in that folder|leads out"):
        check_name(tmp_path, name, ModelError)


def test_quotes_are_one_short_line():
    for value in ("x" * 10**6, "a\nb\x1b[31m", "\ud800", {"a": "y" * 500}):
        text = quoted(value)
        assert len(text) <= 80
        assert text.isprintable()
    assert quoted("as it is") == "as it is"
    assert quoted("a" + "-" * 100 + "z")[0] + quoted("a" + "-" * 100 + "z")[-1] == "az"
    assert reason_of(ValueError("one\ntwo")) == "ValueError: one"
    assert (reason_of(KeyError()), reason_of(OSError("a:\n  b\nc"))) == ("KeyError", "OSError: a: b")
    assert reason_of(ValueError("one of: (1) a, \n(2) b.\nc")) == "ValueError: one of: (1) a, (2) b."


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(DataError, match=r"not a regular file"):
            open_regular(path, DataError)
    with pytest.raises(DataError, match=r"No such file"):
        open_regular(tmp_path / "nothing", DataError)
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bytes(tmp_path / "file", DataError, 5) == b"12345"
    with pytest.raises(DataError, match=r"must have at most 4 bytes, got 5"):
        read_bytes(tmp_path / "file", DataError, 4)


def test_json_is_read_up_to_a_depth(tmp_path):
    for depth, fits in ((MAX_DEPTH - 1, True), (MAX_DEPTH + 1, False)):
        (tmp_path / "x.json").write_text('{"a":' * depth + "1" + "}" * depth)
        if fits:
            assert read_json(tmp_path / "x.json")
        else:
            with pytest.raises(ModelError, match=r"is nested more than"):
                read_json(tmp_path / "x.json")
