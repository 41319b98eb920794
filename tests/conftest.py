"""What all tests share. Towers are real processes: ``towers(fn, …)`` runs a function on several of them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests skip cleanly where there is no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests say themselves which cluster they are in."""
    for name in ("TF_CONFIG", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TOWERS_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "PYTEST_CURRENT_TEST" in os.environ


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """A guard against hangs, not a measurement: fails when the block took longer."""
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    assert took < seconds, f"took {took:.1f} s, more than {seconds} s"
