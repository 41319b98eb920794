"""The detectors that ``scripts/ablate`` switches off: their texts, their tests, and their rows in the documents."""

from __future__ import annotations

import pytest

from scripts.ablate import MECHANISMS, Mechanism
from tests.support.jobs import ROOT


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: mechanism.name)
def test_a_detector_can_be_switched_off(mechanism: Mechanism) -> None:
    text = (ROOT / mechanism.module).read_text()
    assert text.count(mechanism.old) == 1
    compile(text.replace(mechanism.old, mechanism.new), mechanism.module, "exec")
    path, _, name = mechanism.test.partition("::")
    assert (ROOT / path).exists()
    assert not name or f"def {name}(" in (ROOT / path).read_text()


def test_the_page_lists_all_detectors() -> None:
    page = (ROOT / "docs" / "project" / "architecture.md").read_text()
    rows = [f"| {mechanism.name} (`{mechanism.module}`) | {mechanism.fault} |" for mechanism in MECHANISMS]
    assert [row for row in page.splitlines() if row in rows] == rows
