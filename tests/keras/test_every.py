"""Every metric and loss of the installed Keras, and layers with state: as on one tower, or refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.keras import every
from tests.support.jobs import launch

pytestmark = pytest.mark.extended

REFUSED = {"Circle"}


@pytest.mark.parametrize(("which", "tried"), [("metrics", 41), ("losses", 22), ("layers", 14)])
def test_each_has_the_numbers_of_one_tower_or_is_refused(which: str, tried: int) -> None:
    [alone] = launch(every.results, which, count=1)
    assert len({name for name, _ in alone}) >= tried  # of Keras 3.15
    assert not [place for place, value in alone.items() if isinstance(value, str)]
    for found in [*launch(every.results, which, count=2), *launch(every.results, which, count=3)]:
        for place, expected in alone.items():
            if place[0] in REFUSED:
                assert f"keras.losses.{place[0]} compares" in found[place]
            else:
                np.testing.assert_allclose(
                    _numbers(found[place]), _numbers(expected), rtol=1e-7, atol=1e-9, err_msg=str(place)
                )


def _numbers(values: Any) -> Any:
    return np.concatenate([np.ravel(np.asarray(value, dtype="float64")) for value in values])
