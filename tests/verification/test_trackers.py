"""``mirrored verify`` compares the numbers that a script gives to a tracker of experiments."""

from __future__ import annotations

import pathlib

import pytest

import mirrored
from mirrored.verification import Cause
from tests.verification.scripts import RIGHT

pytestmark = pytest.mark.extended

_INIT = "import wandb\nwandb.init(mode='offline', dir=os.path.dirname(__file__))"
_LOSS = "strategy.run(train_step, args=batch)"


@pytest.mark.parametrize(
    ("value", "causes"),
    [(_LOSS, (Cause.PRINTED_VALUE,)), (f"strategy.reduce('sum', {_LOSS})", ())],
)
def test_a_share_that_is_logged_is_named(value: str, causes: tuple[Cause, ...], tmp_path: pathlib.Path) -> None:
    pytest.importorskip("wandb")
    script, log = tmp_path / "tracked.py", f"wandb.log({{'loss': {value}}})"
    script.write_text(RIGHT.but(before=_INIT, run=log).text())
    report = mirrored.verify(script)
    assert report.causes == causes, report
    [line] = [number for number, text in enumerate(script.read_text().splitlines(), start=1) if log in text]
    assert (f"into Weights & Biases (line {line})" in " ".join(str(report).split())) == bool(causes)
