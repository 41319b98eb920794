"""What all tests share. Towers are real processes: ``towers(fn, …)`` runs a function on several of them."""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver

import hypothesis
import pytest
import torch

from tests.support.forks import SERVER
from tests.support.guard import Guard
from tests.support.jobs import ROOT
from tests.support.patience import PATIENT_AGENTS
from tests.support.waiting import HANG

hypothesis.settings.register_profile("the same examples in every run", deadline=None, derandomize=True)
hypothesis.settings.load_profile("the same examples in every run")

_OF_JOBS = re.compile(
    "TF_CONFIG|RANK|WORLD_SIZE|LOCAL_|GROUP_|ROLE_|MASTER_|TORCHELASTIC_|PET_|SLURM_|OMPI_|TOWERS_|NCCL_|GLOO_|OMP_"
    "|MIRRORED_(?!SIMULATED)"
)
"""The variables of launchers, and those that change how towers communicate."""


def pytest_configure(config: pytest.Config) -> None:
    """Make tests independent of the place where they are started, and watch them."""
    _reset_signals()
    _reset_environment()
    SERVER.variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    os.umask(0o022)
    os.register_at_fork(after_in_child=gc.freeze)  # freeing a Gloo group waits for a thread that a fork does not have
    if getattr(config.option, "dist", "no") == "no":  # this process runs tests; it does not only distribute them
        config.pluginmanager.register(Guard())


def _reset_signals() -> None:
    """Give programs that tests start the default actions of signals.

    A signal that this process was started to ignore gets a handler that does nothing, which programs do not inherit:
    ``nohup`` ignores SIGHUP, and a shell ignores SIGINT in the background.
    """
    ignored_by_python = {signal.SIGPIPE, signal.SIGXFSZ}
    for number in signal.valid_signals() - ignored_by_python:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _reset_environment() -> None:
    """Set the variables that tests and their programs depend on.

    Programs find this project compiled: compiling it takes most of the time of a small job. Inductor compiles in the
    process that wants it instead of starting others. A question that a DNS server does not answer is repeated after
    one second, not after five: torch looks up the name of the other end of each of thousands of connections. Without a
    network, torch's C++ code warns that these names cannot be found, so its warnings are off. torch_tpu, where it is
    installed, prints nothing when it is loaded.
    """
    for name in filter(_OF_JOBS.match, list(os.environ)):
        del os.environ[name]
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    paths = [str(ROOT / "tests" / "support" / "startup"), str(ROOT), os.environ.get("PYTHONPATH")]
    os.environ.update(
        LC_ALL="C.UTF-8",
        PYTHONPATH=os.pathsep.join(filter(None, paths)),
        RES_OPTIONS="timeout:1 attempts:5",
        TORCHINDUCTOR_COMPILE_THREADS="1",
        TORCH_CPP_LOG_LEVEL="ERROR",
        TZ="UTC",
    )
    time.tzset()
    if importlib.util.find_spec("torch_tpu") is not None:
        os.environ.update(TF_CPP_MIN_LOG_LEVEL="1", PYTHONWARNINGS="ignore:<TorchTpu/")


@pytest.fixture(scope="session", autouse=True)
def loaded_towers() -> None:
    """The server that ``launch`` forks towers from loads what tests import, once instead of in each tower."""
    modules = [
        "towers.launching.starting.preloaded",
        "mirrored.strategy.kinds",
        "mirrored.checkpoint",
        "hypothesis",
        "pytest",
    ]
    if not torch.cuda.is_available():  # a fork of what has used CUDA cannot
        modules += ["torch._inductor.compile_fx", "torchmetrics", "keras"]
    forkserver.set_forkserver_preload([*modules, "tests.support.jobs", "tests.support.huge_pages"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("KERAS_BACKEND", "torch")
        first = multiprocessing.get_context("forkserver").Process(target=int)
        first.start()
        first.join(HANG)  # no test's seconds are spent on the loading
        assert first.exitcode == 0, "the server that towers are forked from has not loaded what the tests import"


_LONGEST = [
    *("keras", "health", "faults", "launching", "joining", "docs", "virtual", "verification", "training"),
    "checkpoint",
]
"""Folders that take longest: they start first, so that no process is left alone with one of them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long folders first, or a random order for scripts/luck; GPU tests skip cleanly where there is no GPU."""
    if order := os.environ.get("TESTS_ORDER"):
        random.Random(order).shuffle(items)
    else:
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
def own_environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Towers have a thread each. Agents wait for late towers, except where seconds are promised."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if request.node.get_closest_marker("seconds") is None:
        monkeypatch.setenv(PATIENT_AGENTS, "1")
    assert "PYTEST_CURRENT_TEST" in os.environ
