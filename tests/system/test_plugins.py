"""Selectors and families of other packages, installed in a place of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import slimstate
from slimstate.selectors import METHODS

MODULE = """
from dataclasses import replace

from slimstate.families import Family
from slimstate.families.delta_net import FAMILIES
from slimstate.selectors import Selector, best_of

choose = best_of(lambda case, request: case.key_weight.abs().sum(-1))
mine = Selector(name="mine", summary="of another package", needs={"weight"}, choose=choose)
several = (mine, replace(mine, name="l1"), "no selector")
family = replace(FAMILIES[0], model_type="delta_net_of_another")
"""
POINTS = """
[slimstate.selectors]
several = another_package:several
gone = another_package:gone

[slimstate.families]
family = another_package:family
"""
ASKED = """
import warnings
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    from slimstate.families import FAMILIES
    from slimstate.selectors import METHODS
    found = "mine" in METHODS, METHODS["l1"].summary, "delta_net_of_another" in FAMILIES
print(*found)
print(*(str(warning.message) for warning in told if "slimstate leaves out" in str(warning.message)), sep="\\n")
"""


@pytest.mark.slow
def test_an_installed_package_brings_a_selector_and_a_family(tmp_path):
    """The files are those that pip writes."""
    about = tmp_path / "another_package-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: another-package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(POINTS)
    (tmp_path / "another_package.py").write_text(MODULE)
    source = str(Path(slimstate.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), source])}
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=True, env=environment)
    first, *others = done.stdout.splitlines()
    assert first == f"True {METHODS['l1'].summary} True"
    assert len(others) == 3
    assert "gone of another-package" in others[0]
    assert "the name l1 is taken" in others[1]
    assert "'no selector' is not a Selector" in others[2]
