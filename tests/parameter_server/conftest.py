"""Ray's processes, which the tests of a module share."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """What a test of the module starts ends with the module."""
    yield
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
