"""What is said about families and engines is what the registry, the tests and the rules have."""

from __future__ import annotations

import json

import pytest

import slimstate
import tiny
from places import ROOT
from slimstate.families import FAMILIES
from slimstate.families.contract import NOT_NEEDED
from slimstate.serving.engines import WHEN, advice, rules, rules_of
from slimstate.serving.support import support_table

EXACTNESS = json.loads((ROOT / "docs" / "records" / "exactness.json").read_text())


def test_the_support_page_is_what_the_registry_says():
    assert (ROOT / "docs" / "SUPPORT.md").read_text() == support_table(EXACTNESS)


def test_every_family_has_a_plain_tiny_model():
    assert FAMILIES.keys() == {tiny.VARIANTS[name].model_type for name in tiny.EVERY_PLAIN}


def test_what_was_measured_are_families_and_exact_ones():
    assert EXACTNESS.keys() <= FAMILIES.keys()
    for name, measured in EXACTNESS.items():
        exact = FAMILIES[name].correction(FAMILIES[name].stock_config) == NOT_NEEDED
        assert measured["half"] <= (0 if exact else 1e-4)
        assert measured["third"] <= (0 if exact else 1e-3)
        assert measured["rescaled"] <= (0 if exact else 1e-4)


def test_every_rule_is_about_families_there_are_and_says_where_it_was_read():
    for rule in rules():
        assert rule.when in WHEN
        assert set(rule.model_types) <= FAMILIES.keys()
        assert rule.source
        assert rule.checked in ("read, not run", "run")


def test_advice_depends_on_the_key_dim():
    assert advice("qwen3_next", 128) == ()
    assert ["triton" in (rule.advice or "") for rule in advice("qwen3_next", 64)].count(True) == 1
    assert {"SGLang"} <= {rule.engine for rule in advice("qwen3_next", 96) if rule.verdict == "breaks"}
    assert not any(rule.verdict == "breaks" for rule in advice("qwen3_next", 64))
    assert advice("delta_net", 64) == rules_of("delta_net") == ()


@pytest.mark.parametrize("name", ["qwen3_next-plain", "delta_net-plain"])
def test_cards_and_inspect_say_what_engines_do(name, folders, tmp_path, capsys, monkeypatch):
    slimstate.prune(folders[name], tmp_path / "cut", method="l1", key_dim=16)
    card = (tmp_path / "cut" / "README.md").read_text()
    served = name == "qwen3_next-plain"
    assert ("--gdn-prefill-backend triton" in card) == served
    assert ("import fla" in card) != served
    assert "{" not in card.replace("{{", "")
    from slimstate import cli

    monkeypatch.setattr("sys.argv", ["slimstate", "inspect", str(folders[name])])
    with pytest.raises(SystemExit):
        cli.main()
    out = capsys.readouterr().out
    assert ("triton" in out) == served
    assert ("no engine was examined" in out) != served
