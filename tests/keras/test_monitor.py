"""A monitor follows ``fit``."""

from __future__ import annotations

import json
import pathlib

import pytest

from tests.keras import monitored
from tests.support.jobs import launch


@pytest.mark.parametrize("towers", [1, 2])
def test_reports_of_fit(tmp_path: pathlib.Path, towers: int) -> None:
    for found in launch(monitored.fit_with_a_monitor, str(tmp_path), count=towers):
        assert found["steps"] == 12
        report = found["report"]
        assert report.loss == pytest.approx(found["history"][1])  # of the whole epoch, as in Keras' bar
        assert sum(report.parts_ms.values()) == pytest.approx(report.step_ms)
        if towers > 1:  # at one tower Keras' own arrays do not tell
            assert report.examples_per_second == pytest.approx(13 / 3 / report.step_ms * 1e3)
            assert report.parts_ms["optimizer"] > 0
    lines = [json.loads(line) for line in (tmp_path / "monitor.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 6, 9, 12]
