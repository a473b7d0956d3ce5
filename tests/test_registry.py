"""Families are found by themselves: a file in the package is enough, and one that is no family says what it lacks."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from slimstate.core.layout import Axis, HookPoint, Mixer, Slot
from slimstate.families import FAMILIES, Family, by_model_type, found_in
from slimstate.kernels.fla_calls import CallOptions
from slimstate.kernels.patches import Patch

MEMBERS = {name: member for name, member in vars(Family).items() if not name.startswith("_")}
CLASS = """
from dataclasses import dataclass
from slimstate.families import Family

@dataclass(frozen=True, kw_only=True)
class Short(Family):
    mixers = softmax_layers = correction = resize = lambda *_: None

"""
ONE = CLASS + "FAMILIES = (Short(model_type='{model_type}', library='{library}', defaults={{}}),)"


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


def test_the_values_that_modules_list_are_families_and_shared_parts_are_not(package):
    one = ONE.format(model_type="one", library="transformers")
    many = (
        CLASS + "FAMILIES = tuple(Short(model_type=name, library='fla', defaults={}) for name in ('second', 'first'))"
    )
    found = package(b_many=many, c_parts="ANSWER = 42", a_one=one)
    assert list(by_model_type(found)) == ["second", "first", "one"]  # by library, then by the name of the module


HALF = CLASS.replace("mixers = softmax_layers = correction = resize", "softmax_layers = correction")


@pytest.mark.parametrize(("text", "said"), [
    (HALF + "FAMILIES = (Short(model_type='half', library='fla', defaults={}),)", "Short.*methods.*mixers.*resize"),
    (CLASS + "FAMILIES = (Short(model_type='half', library='fla'),)", "required keyword-only argument: 'defaults'"),
    ("FAMILIES = ('delta_net',)", "half lists 'delta_net', which is not a value of a class of Family"),
    (CLASS + "FAMILIES = Short(model_type='half', library='fla', defaults={})", "half: FAMILIES is not a tuple"),
    (CLASS + "HALF = Short(model_type='half', library='fla', defaults={})", "half has a family but does not list it"),
], ids=["without-methods", "without-fields", "of-no-class", "no-tuple", "not-listed"])  # fmt: skip
def test_a_module_that_is_half_a_family_says_what_it_lacks(package, text, said):
    with pytest.raises(TypeError, match=said):
        list(package(half=text))


def test_two_families_cannot_have_one_model_type(package):
    same = ONE.format(model_type="same", library="fla")
    with pytest.raises(TypeError, match="two families of model type same"):
        by_model_type(package(a=same, b=same))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_a_family_has_is_called_as_the_contract_says(model_type):
    family = FAMILIES[model_type]
    assert family.model_type == model_type
    assert family.hook.operators
    with pytest.raises(FrozenInstanceError):
        family.model_type = "another"
    for name, member in MEMBERS.items():
        if inspect.isfunction(member):
            asked = list(inspect.signature(member).parameters.values())[1:]
            given = list(inspect.signature(getattr(family, name)).parameters.values())
            assert [(p.name, p.kind, p.default) for p in given] == [(p.name, p.kind, p.default) for p in asked], name


@pytest.mark.parametrize("kind", [Slot, Axis, HookPoint, Mixer, Family, CallOptions, Patch])
def test_every_field_is_explained_on_a_line_of_its_own(kind):
    lines = inspect.getsource(kind).splitlines()
    for name in inspect.get_annotations(kind):
        (place,) = (n for n, line in enumerate(lines) if line.startswith(f"    {name}: "))
        assert lines[place - 1].strip().startswith("#"), f"{kind.__name__}.{name}"
