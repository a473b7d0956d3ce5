"""Families are found by themselves: a file in the package is enough, and one that is no family says what it lacks."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from slimstate.families import FAMILIES, Family, by_model_type, found_in, hook_of

MEMBERS = {name: member for name, member in vars(Family).items() if not name.startswith("_")}
SHORT = """
model_type, library, DEFAULTS = "{model_type}", "{library}", {{}}
mixers = softmax_layers = correction = resize = lambda config, *_: None
"""
LISTED = """
class Family:
    library, DEFAULTS = "fla", {}
    mixers = softmax_layers = correction = resize = lambda *_: None
    def __init__(self, model_type):
        self.model_type = model_type
FAMILIES = (Family("second"), Family("first"))
"""


@pytest.fixture
def package(tmp_path, monkeypatch, request):
    """A package of files, named for this test alone: modules once imported stay so."""
    name = f"families_of_{request.node.name}"
    monkeypatch.syspath_prepend(tmp_path)

    def made(**files: str):
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (Path(tmp_path) / name / f"{file}.py").write_text(text)
        return found_in(name, [str(tmp_path / name)])

    return made


def test_modules_and_the_values_they_list_are_families_and_shared_parts_are_not(package):
    one = SHORT.format(model_type="one", library="transformers")
    found = package(b_many=LISTED, c_parts="ANSWER = 42", a_one=one)
    assert list(by_model_type(found)) == ["second", "first", "one"]  # by library, then by the name of the module


def test_a_module_that_is_half_a_family_says_what_it_lacks(package):
    with pytest.raises(TypeError, match=r"half offers a family without DEFAULTS, mixers, .*, resize"):
        list(package(half="model_type, library = 'half', 'fla'"))


def test_two_families_cannot_have_one_model_type(package):
    same = SHORT.format(model_type="same", library="fla")
    with pytest.raises(TypeError, match="two families of model type same"):
        by_model_type(package(a=same, b=same))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_a_family_has_is_called_as_the_contract_says(model_type):
    family = FAMILIES[model_type]
    assert family.model_type == model_type
    assert hook_of(family).operators
    for name, member in MEMBERS.items():
        if inspect.isfunction(member):
            asked = list(inspect.signature(member).parameters.values())[1:]
            given = list(inspect.signature(getattr(family, name)).parameters.values())
            assert [(p.name, p.kind, p.default) for p in given] == [(p.name, p.kind, p.default) for p in asked], name
