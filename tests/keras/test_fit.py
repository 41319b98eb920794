"""``fit`` has the numbers of one tower on any number of towers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.keras import cases
from tests.support.jobs import Settings, launch

Results = dict[str, dict[str, Any]]


def on_towers(count: int, names: list[str], settings: Settings | None = None) -> list[Results]:
    """The results of some cases on each tower; they share the towers, as Keras takes long to load."""
    return launch(cases.run_all, names, settings, count=count)


@pytest.fixture(scope="module")
def one() -> Results:
    return on_towers(1, list(cases.CASES))[0]


OF_SHARES = [
    *("shuffled", "recurrent", "weights_of_samples_and_classes", "loss_of_ones_own", "fewer_examples_than_towers"),
    *("metrics_that_are_no_means", "metrics_of_ones_own", "loader", "distributed_dataset", "generator"),
    "single_batches",
]
"""Cases in which it matters how many towers get fewer examples than others, or none: five towers do no others."""


SHARDED: Settings = {"shard_optimizer": True}
CENTRAL: Settings = {"central": True}


@pytest.mark.parametrize(
    ("towers", "names", "settings"),
    [
        (2, list(cases.CASES), {}),
        pytest.param(3, list(cases.CASES), {}, marks=pytest.mark.extended),
        pytest.param(5, OF_SHARES, {}, marks=pytest.mark.extended),
        (2, list(cases.CASES), SHARDED),
        pytest.param(3, list(cases.CASES), SHARDED, marks=pytest.mark.extended),
        pytest.param(2, list(cases.CASES), CENTRAL, marks=pytest.mark.extended),
        pytest.param(4, list(cases.CASES), CENTRAL, marks=pytest.mark.extended),
    ],
)
def test_the_numbers_of_one_tower_and_the_same_bits_on_all(
    one: Results, towers: int, names: list[str], settings: Settings
) -> None:
    first, *others = on_towers(towers, names, settings)
    assert list(first) == names
    for name in names:
        expected = one[name]
        assert first[name].keys() == expected.keys(), name
        for key, value in expected.items():
            where = f"{name}: {key}"
            np.testing.assert_allclose(first[name][key], value, rtol=0, atol=1e-12, err_msg=where)
            for other in others:
                np.testing.assert_array_equal(other[name][key], first[name][key], err_msg=where)
