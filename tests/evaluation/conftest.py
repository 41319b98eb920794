"""What these tests share."""

from __future__ import annotations

import pathlib
import threading

import pytest

from tests.support.clocks import Lockstep
from towers.system.timeouts import clock


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "run"


@pytest.fixture
def lockstep(monkeypatch: pytest.MonkeyPatch) -> Lockstep:
    """The clock of this process is one that the test moves by ``lockstep.sleep``."""
    lockstep = Lockstep("mirrored-watcher")
    monkeypatch.setattr(clock, "monotonic", lockstep.monotonic)
    monkeypatch.setattr(clock, "sleep", lockstep.sleep)
    monkeypatch.setattr(threading.Thread, "join", lambda thread, timeout=None: lockstep.join(thread, timeout))
    return lockstep
