"""Selectors and families of other packages, installed by pip into a place of their own."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import zipfile
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


def wheel(folder: Path) -> Path:
    """A package as pip takes it."""
    about = "another_package-1.0.dist-info"
    files = {
        "another_package.py": MODULE,
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: another-package\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/entry_points.txt": POINTS,
    }
    lines = []
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(text.encode())}")
    path = folder / "another_package-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, f"{about}/RECORD": "\n".join([*lines, f"{about}/RECORD,,", ""])}.items():
            archive.writestr(name, text)
    return path


@pytest.mark.slow
def test_an_installed_package_brings_a_selector_and_a_family(tmp_path):
    place = tmp_path / "site"
    installed = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target"]
    subprocess.run([*installed, place, wheel(tmp_path)], check=True, capture_output=True)
    source = str(Path(slimstate.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(place), source])}
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=True, env=environment)
    first, *others = done.stdout.splitlines()
    assert first == f"True {METHODS['l1'].summary} True"
    assert len(others) == 3
    assert "gone of another-package" in others[0]
    assert "the name l1 is taken" in others[1]
    assert "'no selector' is not a Selector" in others[2]
