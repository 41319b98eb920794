"""``mirrored verify`` compares scripts that call Keras' ``fit``."""

from __future__ import annotations

import pathlib

import pytest

import mirrored
from tests.verification.scripts import PROGRAMS

pytestmark = pytest.mark.extended

OTHERS = [
    ("unbuilt", 3, 0, "parameters are equal within 0.0001, and so are the 1 results that are reduced or gathered"),
    ("metric", 2, 1, "[reported-value]: training is equal, but the logs of Keras' loop"),
    ("noise", 2, 2, "[random-in-run]: the loss at step 1 differs by"),
    ("contrastive", 2, 1, "[pairs-of-examples]: the loss at step 1 differs"),
    ("contrastive step", 2, 1, "[pairs-of-examples]: the loss at step 1 differs"),
    ("sum", 3, 1, "[sum-loss]: on tower 0 the loss"),
    ("add_loss", 3, 1, "is the sum of 48 values, multiplied by 0.01, and averaging the gradients divides by the 3"),
    ("backup, sum", 2, 1, "[sum-loss]: on tower 0 the loss"),
    ("backup, norm", 3, 1, "[batch-norm]: batch norm (batch_normalization) takes the statistics"),
    ("kept backup", 2, 2, "[not-comparable]: this script cannot be compared"),
    ("weights", 2, 2, "[not-reproducible]: two runs on one tower differ, too"),
]


@pytest.mark.parametrize(
    ("kind", "towers", "code", "words"),
    [
        ("sequential, sync", 2, 0, "The same: losses, gradients and parameters are equal"),
        ("sequential", 2, 1, "batch norm (batch_normalization) takes the statistics of each tower's own"),
        *(pytest.param(*row, marks=pytest.mark.extended) for row in OTHERS),
    ],
)
def test_what_keras_scripts_hold(tmp_path: pathlib.Path, kind: str, towers: int, code: int, words: str) -> None:
    report = mirrored.verify(PROGRAMS / "keras_fit.py", [kind, str(tmp_path)], towers=towers)
    assert report.exit_code == code, report
    assert words in " ".join(str(report).split())
