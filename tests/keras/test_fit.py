"""``fit`` has the numbers of one tower on any number of towers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mirrored
from tests.keras import cases

Results = dict[str, dict[str, Any]]


def on_towers(count: int) -> list[Results]:
    """The results of all cases on each tower; they share the towers, as Keras takes long to load."""
    devices = [f"cpu:{i}" for i in range(count)]
    return mirrored.launch(cases.run_all, (list(cases.CASES),), devices=devices, timeout=250)


@pytest.fixture(scope="module")
def one() -> Results:
    return on_towers(1)[0]


@pytest.mark.parametrize("towers", [2, 3, 5])
def test_the_numbers_of_one_tower_and_the_same_bits_on_all(one: Results, towers: int) -> None:
    first, *others = on_towers(towers)
    assert first.keys() == one.keys()
    for name, expected in one.items():
        assert first[name].keys() == expected.keys(), name
        for key, value in expected.items():
            where = f"{name}: {key}"
            np.testing.assert_allclose(first[name][key], value, rtol=0, atol=1e-12, err_msg=where)
            for other in others:
                np.testing.assert_array_equal(other[name][key], first[name][key], err_msg=where)
