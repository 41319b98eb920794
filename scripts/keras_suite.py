"""Keras' own tests of trainers, callbacks and metrics, under a strategy of 1 and of 2 towers.

Keras' wheel holds its tests beside its sources, and so does a checkout, which is taken in its place when its folder is
given. Every tower runs each test, inside ``strategy.scope()``; folders for files are common to the towers. A test that
fails without a strategy, or that cannot be on several towers (``CANNOT``, with the reason), is listed and not counted.
Exits with 1 when anything else fails.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import hashlib
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import mirrored

FOLDERS = ("trainers", "callbacks", "metrics")

CANNOT: dict[str, str] = {}
"""Words of a test's name, and why it cannot be as on one device."""


@dataclasses.dataclass
class Outcome:
    """What became of a test on a tower.

    Attributes:
        kind: passed, failed or skipped.
        text: the last line of why it failed.
    """

    kind: str
    text: str = ""


class Towers:
    """A plugin of pytest that runs tests inside a strategy's scope.

    Args:
        strategy: None runs them as they are.
        folder: common to all towers.
        done: tests that are not run again.
    """

    def __init__(self, strategy: mirrored.Strategy | None, folder: str, done: Sequence[str]) -> None:
        self._strategy = strategy
        self._folder = pathlib.Path(folder)
        self._done = set(done)
        self.outcomes: dict[str, Outcome] = {}
        self.stopped = False

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if name_of(item.nodeid) not in self._done]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        from keras.src import testing

        name = hashlib.sha1(item.nodeid.encode()).hexdigest()
        testing.TestCase.get_temp_dir = lambda case: str(_made(self._folder / name))
        if self._strategy is None:
            yield
        else:
            with self._strategy.scope():
                yield

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = name_of(report.nodeid)
        if report.failed:
            self.outcomes[name] = Outcome("failed", _last_line(report))
        elif report.skipped:
            self.outcomes[name] = Outcome("skipped")
        elif report.when == "call":
            self.outcomes[name] = Outcome("passed")
        if report.when == "teardown" and self._strategy is not None and self._out_of_step():
            self.stopped = True
            pytest.exit("the towers are out of step")

    def _out_of_step(self) -> bool:
        """Whether the last test has left a collective on some tower only."""
        assert self._strategy is not None
        try:
            self._strategy.communicator.barrier()
        except mirrored.TowersError:
            return True
        return False


def name_of(nodeid: str) -> str:
    """A test's name without the folders above Keras."""
    return nodeid.split("keras/src/")[-1]


def _made(path: pathlib.Path) -> pathlib.Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _last_line(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return " ".join((crash.message if crash is not None else str(report.longrepr)).split())[:200]


def run(
    files: Sequence[str], folder: str, done: Sequence[str], under: bool, path: str
) -> tuple[dict[str, Outcome], bool]:
    """Run tests on this tower; returns their outcomes, and whether these are all."""
    sys.path.insert(0, path)
    os.environ["KERAS_BACKEND"] = "torch"
    strategy = None
    if under:
        import mirrored.keras

        strategy = mirrored.MirroredStrategy(communication=mirrored.CommunicationOptions(timeout_seconds=60))
    plugin = Towers(strategy, folder, done)
    with open(os.devnull, "w") as nothing:
        out, sys.stdout = sys.stdout, nothing
        try:
            pytest.main(["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", path, *files], [plugin])
        finally:
            sys.stdout = out
    return plugin.outcomes, not plugin.stopped


def outcomes(files: Sequence[str], towers: int, under: bool, path: str) -> dict[str, list[Outcome]]:
    """The outcomes of all tests, one for each tower; towers that are out of step begin again behind that test."""
    found: dict[str, list[Outcome]] = {}
    devices = [f"cpu:{i}" for i in range(towers)]
    complete = False
    while not complete:
        before = len(found)
        with tempfile.TemporaryDirectory() as folder:
            arguments = (files, folder, list(found), under, path)
            results = mirrored.launch(run, arguments, devices=devices, timeout=3600)
        for name in {name for each, _ in results for name in each}:
            found[name] = [each[name] for each, _ in results if name in each]
        complete = all(ended for _, ended in results) or len(found) == before
    return found


def kind_of(results: Sequence[Outcome]) -> str:
    kinds = {result.kind for result in results}
    return "failed" if "failed" in kinds else kinds.pop() if len(kinds) == 1 else "failed"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/keras_suite", description=__doc__)
    parser.add_argument("folder", nargs="?", help="a checkout of Keras; default: the Keras that is installed")
    parser.add_argument("--only", default="", help="files whose paths hold this, such as metrics")
    options = parser.parse_args()
    path = pathlib.Path(options.folder).resolve() if options.folder else _installed()
    files = sorted(
        str(file)
        for folder in FOLDERS
        for file in (path / "keras" / "src" / folder).rglob("*_test.py")
        if options.only in str(file)
    )
    if not files:
        parser.error(f"{path} holds no tests of Keras")
    plain = outcomes(files, 1, False, str(path))
    failed_without = {name for name, results in plain.items() if kind_of(results) == "failed"}
    for name in sorted(failed_without):
        print(f"fails without a strategy: {name}: {plain[name][0].text}")
    bad = 0
    for towers in (1, 2):
        found = outcomes(files, towers, True, str(path))
        counted = collections.Counter(kind_of(results) for name, results in found.items() if name not in failed_without)
        missing = plain.keys() - found.keys()
        for name in sorted(found.keys() - failed_without):
            if kind_of(found[name]) != "failed" or kind_of(plain.get(name, [])) == "skipped":
                continue
            why = next((reason for words, reason in CANNOT.items() if words in name), None)
            if towers > 1 and why is not None:
                counted["failed"] -= 1
                counted["cannot be"] += 1
                print(f"cannot be on {towers} towers: {name}: {why}")
                continue
            bad += 1
            text = next((result.text for result in found[name] if result.kind == "failed"), "on some towers only")
            print(f"FAILED on {towers} tower{'s' * (towers > 1)}: {name}: {text}")
        for name in sorted(missing):
            bad += 1
            print(f"NOT RUN on {towers} tower{'s' * (towers > 1)}: {name}")
        print(f"{towers} tower{'s' * (towers > 1)}: {dict(counted)}", flush=True)
    return int(bad > 0)


def _installed() -> pathlib.Path:
    import importlib.util

    spec = importlib.util.find_spec("keras")
    assert spec is not None
    assert spec.origin is not None
    return pathlib.Path(spec.origin).parents[1]


if __name__ == "__main__":
    sys.exit(main())
