"""Ray's processes, which the tests of a module share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from tests.support.guard import keep_family, orphans_left_to_init
from tests.support.processes import command_of, family


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Ends Ray, which the first test of the module starts that needs it, after the last one."""
    yield
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    """Lets Ray's processes outlive the test. Its workers end with their raylet when init becomes their parent."""
    with orphans_left_to_init():
        yield
    for process in family(os.getpid()):
        if "/ray/" in command_of(process):
            keep_family(process)
