"""Scripts as users port them from public repositories, and mistakes in them.

``scripts/verify_matrix`` tries them all.
"""

from __future__ import annotations

import ast
import pathlib

import pytest

import mirrored
from mirrored.verification import Cause
from tests.verification.ports.mistakes import MISTAKES, PORTS, is_named, text_of
from tests.verification.scripts import SCRIPTS
from tests.verification.test_verify import plain

TRIED = {
    "a schedule by one tower's loss": ("imagenet", "scheduler.step(float("),
    "a criterion that is a module": ("imagenet", "DistributedSampler("),
    "an optimizer with a closure": ("time_sequence", "criterion(out, target).mean()"),
    "data split twice": ("recommender", "own = range("),
    "a statistic in training and evaluation": ("diffusion", "weights / weights.mean()"),
    "a second batch": ("fixmatch", "confidence.mean()"),
    "one draw for a batch": ("diffusion", "(1,)).expand(len(x))"),
    "a learnable factor": ("multi_task", "scaled(mirrored.compute_average_loss(estimated)"),
    "a gather without gradients": ("simclr", "first.detach()"),
    "a schedule by the chief": ("fixmatch", "if strategy.is_chief:"),
}


def test_every_mistake_can_be_planted() -> None:
    for mistake in MISTAKES:
        ast.parse(text_of(mistake))


def test_every_cause_has_a_script() -> None:
    scripts = {cause for script in SCRIPTS.values() for cause in script.causes}
    ports = {cause for mistake in MISTAKES for cause in mistake.causes}
    others = {Cause.ASYNCHRONOUS, Cause.FAILS_WHEN_WATCHED, Cause.NOT_COMPARABLE, Cause.ROUNDING}  # of other programs
    assert scripts | ports | others == set(Cause)


@pytest.mark.extended
def test_a_model_that_the_chief_alone_evaluates_is_right() -> None:
    report = mirrored.verify(PORTS / "gan.py")
    assert report.exit_code == 0, report


@pytest.mark.extended
@pytest.mark.parametrize("name", TRIED)
def test_a_mistake_in_a_port_is_named(name: str, tmp_path: pathlib.Path) -> None:
    port, new = TRIED[name]
    [mistake] = [mistake for mistake in MISTAKES if mistake.port == port and new in mistake.new]
    script = tmp_path / f"{port}.py"
    script.write_text(text_of(mistake))
    report = mirrored.verify(script)
    assert is_named(mistake, report.causes, plain(report)), report
