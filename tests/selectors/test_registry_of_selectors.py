"""Selectors are found by themselves: a file in the package is enough."""

from __future__ import annotations

import pytest

from slimstate.selectors import METHODS, by_name, found_in

LISTED = """
from slimstate.selectors import Selector
SELECTORS = (Selector(name="{name}", summary="", needs=frozenset(), choose=list),)
"""


@pytest.fixture
def package(tmp_path, monkeypatch, request):
    """A package of files, named for this test alone: modules once imported stay so."""
    name = f"selectors_of_{request.node.name}"
    monkeypatch.syspath_prepend(tmp_path)

    def made(**files: str):
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / f"{file}.py").write_text(text)
        return by_name(found_in(name, [str(tmp_path / name)]))

    return made


def test_a_module_that_lists_selectors_is_enough_and_shared_parts_are_passed_over(package):
    assert list(package(b=LISTED.format(name="second"), a=LISTED.format(name="first"), parts="ANSWER = 42")) == [
        "first", "second",
    ]  # fmt: skip


def test_two_selectors_cannot_have_one_name(package):
    with pytest.raises(TypeError, match="two selectors of the name same"):
        package(a=LISTED.format(name="same"), b=LISTED.format(name="same"))


def test_what_is_listed_must_be_a_selector(package):
    with pytest.raises(TypeError, match="which is no Selector"):
        package(a="SELECTORS = (42,)")


def test_the_paper_s_order_is_kept():
    paper = ["random", "l1", "s-wanda", "grad", "drrqr", "pca", "pca-adversarial", "random-rotation"]
    assert [name for name in METHODS if name in paper] == paper
