"""PyTorch's own tests of its distributed backends, run against ours.

PyTorch's wheel holds ``torch.testing._internal.distributed.distributed_test``, which PyTorch instantiates for Gloo,
NCCL, MPI and UCC. Most of its tests ask for a backend by name, so the file is loaded as if it was for Gloo, and once
more as if it was for MPI, whose tests of all-to-all on the CPU are no other backend's; groups are then made of ours.
Inside tests, what asks whether the backend is Gloo (or MPI) is answered with yes, too. Nothing changes on disk.

A test is skipped where it cannot be about a backend for the CPU; ``CANNOT`` lists what else is not run, or fails, and
why. Exits with 1 when anything else fails.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib.util
import logging
import multiprocessing
import os
import sys
import time
import unittest
from collections.abc import Iterator
from types import ModuleType

import torch.distributed
from torch.testing._internal import common_distributed

import towers.backend

SUITE = "torch.testing._internal.distributed.distributed_test"
_MONITORED = "c10d refuses monitored_barrier to backends that are not called gloo, before it asks them"
CANNOT: dict[str, str] = {
    "test_monitored_barrier_failure_order": _MONITORED,
    "test_monitored_barrier_gloo": _MONITORED,
    "test_monitored_barrier_gloo_rank_0_timeout": _MONITORED,
    "test_monitored_barrier_gloo_subgroup": _MONITORED,
    "test_monitored_barrier_wait_all_ranks": _MONITORED,
}
"""Tests that the suite wants for Gloo and that fail with us, and why that is right."""


class _Named(str):
    """Our backend's name, for tests that ask whether it is another's."""

    also = ""

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == self.also

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def load(alike: str, backend: str) -> ModuleType:
    """The suite of ``backend``, as if it was ``alike``."""
    os.environ["BACKEND"] = alike
    spec = importlib.util.find_spec(SUITE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(SUITE, module)  # where what is pickled looks for its class
    spec.loader.exec_module(module)
    name = _Named(backend)
    name.also = alike
    module.BACKEND = name  # type: ignore[attr-defined]
    os.environ["BACKEND"] = backend
    return module


def cases(module: ModuleType) -> type[unittest.TestCase]:
    """The suite's tests as a class whose processes are forked, which saves each its imports."""

    class Test(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[name-defined, misc]
        def setUp(self) -> None:
            super().setUp()
            module.INIT_METHOD = os.environ["INIT_METHOD"]
            self._start_processes(multiprocessing.get_context("fork").Process)

    return Test


def why_not(test: type[unittest.TestCase], name: str) -> str | None:
    """Why the suite itself does not want this test for the backend that it was loaded for."""
    method = getattr(test, name)
    return getattr(method, "__unittest_skip_why__", None) if getattr(method, "__unittest_skip__", False) else None


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """What this process and its children write goes nowhere; a failed test's traceback comes by another way."""
    sys.stdout.flush()
    kept = os.dup(1), os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        for number, old in zip((1, 2), kept, strict=True):
            os.dup2(old, number)
            os.close(old)
        os.close(nowhere)


def run(test: type[unittest.TestCase], name: str) -> tuple[str, str]:
    """(passed, failed or skipped; why)"""
    result = unittest.TestResult()
    with silence():
        test(name).run(result)
    if result.skipped:
        return "skipped", result.skipped[0][1]
    problems = result.errors + result.failures
    return ("failed", problems[0][1]) if problems else ("passed", "")


def reason(text: str) -> str:
    """Reasons that say one thing, as one."""
    lower = text.lower()
    if "cuda" in lower or "gpu" in lower or "accelerator" in lower:
        return "needs GPUs"
    if "nccl" in lower:
        return "about NCCL"
    if "pytorch/issues" in lower or "pytorch/pull" in lower or "flak" in lower:
        return "disabled in PyTorch for all backends: it fails there, or does so at times"
    if "small world" in lower or "world size of 4" in lower:
        return "needs more ranks"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names of tests; all without")
    parser.add_argument("--ranks", type=int, default=2, help="processes of a group (2)")
    parser.add_argument("--backend", default=towers.backend.NAME, help="another one, to compare")
    parser.add_argument("--seconds", type=int, default=60, help="for one test (60)")
    parser.add_argument(
        "--verbose", action="store_true", help="also name what passed, and what did not run, with the reason"
    )
    options = parser.parse_args()

    os.environ["WORLD_SIZE"] = str(options.ranks)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ["INIT_METHOD"] = "file:///to/be/replaced"
    common_distributed.TIMEOUT_DEFAULT = options.seconds
    common_distributed.TIMEOUT_OVERRIDE.clear()
    if options.ranks >= 3:  # what tests of groups within the group need; the suite wants eight
        common_distributed.skip_if_small_worldsize = lambda test: test
    logging.disable(logging.INFO)
    suites = {alike: cases(load(alike, options.backend)) for alike in ("gloo", "mpi")}
    names = unittest.TestLoader().getTestCaseNames(suites["gloo"])
    outcomes: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)
    began = time.monotonic()
    for name in names:
        if options.names and not any(part in name for part in options.names):
            continue
        wanted = [suite for suite in suites.values() if why_not(suite, name) is None]
        if not wanted:
            outcome, text = "skipped", why_not(suites["gloo"], name) or ""
        elif name in CANNOT and options.backend == towers.backend.NAME:
            outcome, text = "cannot", CANNOT[name]
        else:
            start = time.monotonic()
            outcome, text = run(wanted[0], name)
            if outcome == "failed":
                print(f"failed   {name} ({time.monotonic() - start:.1f} s)\n{text}", flush=True)
            elif outcome == "passed" and options.verbose:
                print(f"passed   {name} ({time.monotonic() - start:.1f} s)", flush=True)
        if outcome in ("skipped", "cannot") and options.verbose:
            print(f"{outcome:8} {name}: {text}", flush=True)
        outcomes[outcome].append((name, text))
    for outcome in ("cannot", "skipped"):
        reasons = collections.Counter(reason(text) for _, text in outcomes[outcome])
        for text, count in reasons.most_common():
            print(f"{outcome:8} {count:4}  {text}")
    counts = ", ".join(f"{len(found)} {outcome}" for outcome, found in sorted(outcomes.items()))
    print(
        f"torch {torch.version.__version__}, {options.ranks} ranks, {time.monotonic() - began:.0f} s: "
        f"{sum(map(len, outcomes.values()))} tests: {counts}"
    )
    return 1 if outcomes["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
