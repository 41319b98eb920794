"""What all tests share. Towers are real processes: ``towers(fn, …)`` runs a function on several of them."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import forkserver

import hypothesis
import pytest
import torch

from tests.support.jobs import ROOT
from tests.support.patience import PATIENT_AGENTS
from tests.support.waiting import HANG

hypothesis.settings.register_profile("without a deadline of each example", deadline=None)
hypothesis.settings.load_profile("without a deadline of each example")


def pytest_configure() -> None:
    """Before anything is started.

    Programs that the tests start take Ctrl-C also where the tests themselves run in the background. They find this
    project compiled, whatever the environment says: each of thousands of processes would compile it anew, which takes
    most of the time of a small job. Inductor compiles in the process that wants it instead of starting others for it.
    They look for garbage rarely while they load torch (``support/startup``), take memory in large pages, which saves
    half of the 40,000 page faults of loading it, and find programs of the tests as modules. torch_tpu, where it is
    installed, prints nothing as they load it. Forks of this process keep its garbage: a Gloo group in it would wait
    for a thread that they do not have. What a DNS server leaves unanswered is asked again after one second in place of
    five: torch asks for the name of the other end of each of thousands of connections.
    """
    os.register_at_fork(after_in_child=gc.freeze)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:5"
    paths = [str(ROOT / "tests" / "support" / "startup"), str(ROOT), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if importlib.util.find_spec("torch_tpu") is not None:
        os.environ.update(TF_CPP_MIN_LOG_LEVEL="1", PYTHONWARNINGS="ignore:<TorchTpu/")


_LARGE_PAGES = "tests.support.large_pages"


@pytest.fixture(scope="session", autouse=True)
def loaded_towers() -> None:
    """The server that ``launch`` forks towers from loads what tests import once, instead of each tower for itself.

    What it and this process have loaded is on large pages: both fork.
    """
    modules = ["towers.launching.preloaded", "mirrored.strategy.kinds", "mirrored.checkpoint"]
    modules += ["hypothesis", "pytest"]
    modules += ["encodings.idna", "multiprocessing.popen_forkserver"]
    if not torch.cuda.is_available():  # a fork of what has used CUDA cannot
        modules += ["tests.support.inductor", "torchmetrics", "keras"]
    modules += ["tests.support.jobs", "tests.support.sources", _LARGE_PAGES]
    forkserver.set_forkserver_preload(modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("KERAS_BACKEND", "torch")
        first = multiprocessing.get_context("forkserver").Process(target=int)
        first.start()
        importlib.import_module(_LARGE_PAGES)
        first.join(HANG)  # no test's seconds are spent on the loading
        assert first.exitcode == 0, "the server that towers are forked from has not loaded what the tests import"


_LONGEST = [
    *("keras", "health", "faults", "launching", "joining", "docs", "virtual", "verification", "training"),
    "checkpoint",
]
"""Folders that take longest: they begin first, so that no process is left alone with one of them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long folders first; GPU tests skip cleanly where there is no GPU."""
    rank = {name: number for number, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.parent.name, len(rank)))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


_MEASURED = pytest.StashKey[list[str]]()


@pytest.fixture
def promise(request: pytest.FixtureRequest) -> Callable[[float, float], None]:
    """``promise(took, limit)``: what took so many seconds takes fewer than ``limit``. Both are shown at the end."""
    assert request.node.get_closest_marker("seconds"), "it is to be run alone"

    def check(took: float, limit: float) -> None:
        shown = request.config.stash.setdefault(_MEASURED, [])
        shown.append(f"{took:6.2f} s of {limit:g} s  {request.node.name}")
        assert took < limit

    return check


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The seconds that were promised, and those that it took."""
    for line in terminalreporter.config.stash.get(_MEASURED, []):
        terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def clean_environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests say themselves which cluster they are in. Agents wait for who is late, but where seconds are promised."""
    if request.node.get_closest_marker("seconds") is None:
        monkeypatch.setenv(PATIENT_AGENTS, "1")
    for name in ("TF_CONFIG", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TOWERS_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "PYTEST_CURRENT_TEST" in os.environ
