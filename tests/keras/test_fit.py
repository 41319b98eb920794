"""``fit`` has the numbers of one tower on any number of towers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mirrored
from tests.keras import cases

Results = dict[int, list[dict[str, dict[str, Any]]]]
NAMES = list(cases.CASES)


@pytest.fixture(scope="module")
def results() -> Results:
    """Of all cases, by the number of towers and the tower: Keras takes long to load."""
    return {
        towers: mirrored.launch(cases.run_all, (NAMES,), devices=[f"cpu:{i}" for i in range(towers)], timeout=250)
        for towers in (1, 2, 3, 5)
    }


@pytest.mark.parametrize("towers", [2, 3, 5])
@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_of_one_tower(results: Results, name: str, towers: int) -> None:
    one = results[1][0][name]
    for found in results[towers]:
        assert found[name].keys() == one.keys()
        for key, value in one.items():
            np.testing.assert_allclose(found[name][key], value, rtol=0, atol=1e-12, err_msg=key)


@pytest.mark.parametrize("towers", [2, 3, 5])
@pytest.mark.parametrize("name", NAMES)
def test_all_towers_have_the_same_bits(results: Results, name: str, towers: int) -> None:
    first, *others = (tower[name] for tower in results[towers])
    for other in others:
        for key, value in first.items():
            np.testing.assert_array_equal(other[key], value, err_msg=key)
