"""Families, selectors and patches are registered by listing them: one file in the package is enough."""

import importlib
import inspect
from dataclasses import FrozenInstanceError
from types import ModuleType

import pytest

from slimstate.core.layout import Axis, HookPoint, Mixer, Slot
from slimstate.families import FAMILIES, Family
from slimstate.kernels.fla_calls import CallOptions
from slimstate.kernels.patches import Patch
from slimstate.selectors import METHODS, Selector
from slimstate.system.plugins import Registry, listed_values

MEMBERS = {name: member for name, member in vars(Family).items() if not name.startswith("_")}
FAMILY = """
from slimstate.families import Family

class Short(Family):
    mixers = softmax_layers = correction = sizes = fields_for = lambda *_: None

def family(name, library="fla"):
    return Short(model_type=name, library=library, defaults={})
"""
SELECTOR = """
from slimstate.selectors import Selector

def selector(name):
    return Selector(name=name, summary="", needs=frozenset(), choose=list)
"""
PATCH = "from slimstate.kernels.patches import Patch\ndef patch(place): return Patch(place, abs)\n"
SOURCES = {"family": FAMILY, "selector": SELECTOR, "patch": PATCH}


@pytest.fixture
def package(tmp_path, monkeypatch, request):
    """Write a package of files under a name of its own, because imported modules stay imported."""
    name = f"package_of_{request.node.name.replace('[', '_').strip(']').replace('-', '_')}"
    monkeypatch.syspath_prepend(tmp_path)

    def write(**files: str) -> ModuleType:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        for file, text in files.items():
            (tmp_path / name / f"{file}.py").write_text(text)
        return importlib.import_module(name)

    return write


def families(package: ModuleType) -> Registry[Family]:
    return Registry(Family, package, "FAMILIES", name=FAMILIES.name, order=FAMILIES.order)


def selectors(package: ModuleType) -> Registry[Selector]:
    return Registry(Selector, package, "SELECTORS", name=METHODS.name, order=METHODS.order)


def test_listed_values_are_registered_in_order_and_other_modules_are_shared_parts(package):
    one = FAMILY + "FAMILIES = (family('one', 'transformers'),)"
    many = FAMILY + "FAMILIES = (family('second'), family('first'))"
    shared = "ANSWER = 42"
    registry = families(package(b_many=many, c_parts=shared, a_one=one, d_triton="raise ImportError('no triton')"))
    assert list(registry) == ["second", "first", "one"], "by library, then by module"


def test_selectors_are_ordered_by_their_number_and_name(package):
    listed = SELECTOR + "SELECTORS = (selector('{}'),)"
    found = selectors(package(b=listed.format("second"), a=listed.format("third"), c=listed.format("first")))
    assert list(found) == ["first", "second", "third"]
    paper = ["random", "l1", "s-wanda", "grad", "drrqr", "pca", "pca-adversarial", "random-rotation"]
    assert [name for name in METHODS if name in paper] == paper


@pytest.mark.parametrize(("make", "line"), [
    (families, FAMILY + "FAMILIES = (family('same'),)"), (selectors, SELECTOR + "SELECTORS = (selector('same'),)"),
])  # fmt: skip
def test_two_values_cannot_have_the_same_name(make, line, package):
    with pytest.raises(TypeError, match=r"two values of (FAMILIES|SELECTORS) are called same"):
        make(package(a=line, b=line))


@pytest.mark.parametrize("kind", [Family, Selector, Patch])
@pytest.mark.parametrize(("line", "error"), [
    ("{list} = (42,)", "half lists 42 in {list}, which is not a {kind}"),
    ("{list} = {make}('half')", "half: {list} must be a tuple, got"),
    ("HALF = {make}('half')", r"half has a {kind} but does not list it: {list} = \(...,\)"),
], ids=["another-type", "no-tuple", "not-listed"])  # fmt: skip
def test_a_module_that_lists_its_values_wrongly_is_refused(kind, line, error, package):
    make = kind.__name__.lower()
    attribute = {"family": "FAMILIES", "selector": "SELECTORS", "patch": "PATCHES"}[make]
    half = package(half=SOURCES[make] + line.format(list=attribute, make=make))
    with pytest.raises(TypeError, match=error.format(list=attribute, kind=kind.__name__)):
        list(listed_values(half, attribute, kind))


@pytest.mark.parametrize(("text", "error"), [
    (FAMILY.replace("mixers = softmax_layers = correction = sizes", "softmax_layers = correction"),
     "Short.*methods.*mixers.*sizes"),
    (FAMILY.replace(", defaults={}", ""), "required keyword-only argument: 'defaults'"),
], ids=["methods", "fields"])  # fmt: skip
def test_a_family_without_a_method_or_a_field_says_which(text, error, package):
    with pytest.raises(TypeError, match=error):
        families(package(half=text + "FAMILIES = (family('half'),)"))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_methods_of_a_family_have_the_signatures_of_the_contract(model_type):
    family = FAMILIES[model_type]
    assert family.model_type == model_type
    assert family.hook.operators
    with pytest.raises(FrozenInstanceError):
        family.model_type = "another"
    for name, member in MEMBERS.items():
        if inspect.isfunction(member):
            expected = list(inspect.signature(member).parameters.values())[1:]
            actual = list(inspect.signature(getattr(family, name)).parameters.values())
            found = [[(p.name, p.kind, p.default) for p in each] for each in (actual, expected)]
            assert found[0] == found[1], name


@pytest.mark.parametrize("kind", [Slot, Axis, HookPoint, Mixer, Family, CallOptions, Patch])
def test_every_field_is_explained_beside_it_or_above(kind):
    lines = inspect.getsource(kind).splitlines()
    for name in inspect.get_annotations(kind):
        (place,) = (n for n, line in enumerate(lines) if line.startswith(f"    {name}: "))
        assert "  # " in lines[place] or lines[place - 1].strip().startswith("#"), f"{kind.__name__}.{name}"
