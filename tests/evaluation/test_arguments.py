"""Arguments of evaluations are checked when they are given."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from torch import nn

import mirrored
from mirrored.evaluation import EarlyStopping, Evaluator


@pytest.mark.parametrize("steps", [0, -5, 2.5, True, "3"])
def test_steps_of_early_stopping(steps: Any) -> None:
    with pytest.raises(ValueError, match="max_steps is .* but must be a whole number from 1"):
        EarlyStopping("accuracy", steps)
    if steps != 0:
        with pytest.raises(ValueError, match="min_steps is .* but must be a whole number from 0"):
            EarlyStopping("accuracy", 1, min_steps=steps)


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"evaluate": 3}, TypeError, "evaluate is 3, but must be a function"),
        ({"models": {}}, TypeError, "models is {}, but must be a dict of models"),
        ({"models": [nn.Linear(1, 1)]}, TypeError, "must be a dict of models"),
        ({"models": {"model": 3}}, TypeError, "must be a dict of models"),
        ({"stop": 3}, TypeError, "stop is 3, but must be an EarlyStopping"),
        ({"exporters": ["best"]}, TypeError, "must be a list of Exporter"),
        ({"timeout_seconds": -1}, ValueError, "timeout_seconds is -1, but must be a number of seconds from 0"),
        ({"throttle_secs": "soon"}, ValueError, "throttle_secs is 'soon', but must be a number of seconds"),
    ],
)
def test_arguments_of_an_evaluator(
    settings: dict[str, Any], kind: type[Exception], words: str, tmp_path: pathlib.Path
) -> None:
    given = {"models": {"model": nn.Linear(1, 1)}, "evaluate": dict, **settings}
    with pytest.raises(kind, match=words):
        Evaluator(mirrored.OneDeviceStrategy(), tmp_path, **given)
