"""Keras' own tests of trainers, callbacks and metrics, under a strategy of 1 and of 2 towers; ``--way`` selects it.

Keras' wheel holds its tests beside its sources, and so does a checkout, which is taken in its place when its folder is
given. Every tower runs each test, inside ``strategy.scope()``; folders for files are common to the towers. A test that
fails without a strategy is listed and not counted, and one that cannot be on several towers (``CANNOT``, with the
reason) is listed and not run there.
Exits with 1 when anything else fails.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import hashlib
import itertools
import os
import pathlib
import sys
import tempfile
import time
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import pytest

import mirrored

WAYS: dict[str, tuple[type[mirrored.Strategy], dict[str, Any]]] = {
    "mirrored": (mirrored.MirroredStrategy, {}),
    "sharded": (mirrored.MirroredStrategy, {"shard_optimizer": True}),
    "central": (mirrored.CentralStorageStrategy, {}),
}
FOLDERS = ("trainers", "callbacks", "metrics")

_BY_TOWER_0 = "tower 0 alone sends or prints what the callback has to say"

CANNOT = {
    "test_distributed_datasets_from_function_model_integration": "TensorFlow draws its data, other ones on each tower",
    "test_backup_corrupted": "it fails in a callback on purpose, after which no tower waits for what the chief writes",
    "test_RemoteMonitorWithJsonPayload": _BY_TOWER_0,
    "test_verbose_logging": _BY_TOWER_0,
}
"""Words of a test's name, and why it cannot be as on one device: it is not run on several towers."""


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
        self._folders: Iterator[str] = iter(())
        self.outcomes: dict[str, Outcome] = {}
        self.stopped = False
        self._file = ""
        self._file_began = 0.0

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        several = self._strategy is not None and self._strategy.num_replicas_in_sync > 1
        names = {item: name_of(item.nodeid) for item in items}
        items[:] = [item for item in items if names[item] not in self._done and not (several and why_not(names[item]))]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._report_file(name_of(nodeid).split("::")[0])

    def pytest_sessionfinish(self) -> None:
        self._report_file("")

    def _report_file(self, following: str) -> None:
        """Prints a file's results and seconds on tower 0, when the following file starts or the tests end."""
        if following == self._file:
            return
        if self._file and (self._strategy is None or self._strategy.is_chief):
            kinds = collections.Counter(
                outcome.kind for name, outcome in self.outcomes.items() if name.startswith(f"{self._file}::")
            )
            seconds = time.monotonic() - self._file_began
            print(f"  {self._file}: {dict(kinds)}, {seconds:.0f} s", file=sys.stderr, flush=True)
        self._file, self._file_began = following, time.monotonic()

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.outcomes[name_of(report.nodeid)] = Outcome("failed", _last_line(report))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        from keras.src import testing

        folder = self._folder / hashlib.sha1(item.nodeid.encode()).hexdigest()
        self._folders = (str(_made(folder / str(number))) for number in itertools.count())
        testing.TestCase.get_temp_dir = lambda case: next(self._folders)
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
        if report.when == "teardown" and self._strategy is not None and self._may_be_out_of_step(name):
            self.stopped = True
            pytest.exit("the towers are out of step")

    def share_files(self) -> None:
        """Let the files of tests be common to the towers: one makes their folders, and one removes them."""

        def common_folder(*args: Any, **kwargs: Any) -> Any:
            folder = next(self._folders)
            opened: Any = contextlib.nullcontext(folder)
            opened.name = folder
            return opened

        def remove(path: str) -> None:
            assert self._strategy is not None
            self._strategy.communicator.barrier()
            if self._strategy.is_chief:
                os.unlink(path)
            self._strategy.communicator.barrier()

        _replace_in_tests(tempfile, "TemporaryDirectory", common_folder)
        _replace_in_tests(os, "remove", remove)
        if self._strategy is not None and not self._strategy.is_chief:
            _replace_in_tests(pytest, "warns", lambda *args, **kwargs: contextlib.nullcontext())  # the chief warns

    def _may_be_out_of_step(self, name: str) -> bool:
        """Whether a test has failed on some tower, or is not over there; collectives would not say so reliably."""
        assert self._strategy is not None
        count = self._strategy.num_replicas_in_sync
        if count == 1:
            return False
        files = [self._folder / f"{hashlib.sha1(name.encode()).hexdigest()}-{tower}" for tower in range(count)]
        own_file = files[self._strategy.communicator.index]
        own_file.with_suffix(".new").write_text(self.outcomes[name].kind)
        own_file.with_suffix(".new").rename(own_file)
        deadline = time.monotonic() + 30
        while not all(file.exists() for file in files):
            if time.monotonic() > deadline:
                return True
            time.sleep(0.001)
        return any(file.read_text() == "failed" for file in files)


def _replace_in_tests(module: types.ModuleType, name: str, function: Callable[..., Any]) -> None:
    original = getattr(module, name)

    def chosen(*args: Any, **kwargs: Any) -> Any:
        in_test = sys._getframe(1).f_code.co_filename.endswith("_test.py")
        return (function if in_test else original)(*args, **kwargs)

    setattr(module, name, chosen)


def why_not(name: str) -> str | None:
    """Why a test cannot be run on several towers; None where it can."""
    return next((reason for words, reason in CANNOT.items() if words in name), None)


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
    files: Sequence[str], match: str, folder: str, done: Sequence[str], under: str, path: str
) -> tuple[dict[str, Outcome], bool]:
    """Run tests on this tower; returns their outcomes, and whether these are all."""
    sys.path.insert(0, path)
    if not pathlib.Path(path, "conftest.py").exists():
        sys.modules["conftest"] = _conftest()
    os.environ["KERAS_BACKEND"] = "torch"
    strategy = None
    if under:
        import mirrored.keras

        kind, options = WAYS[under]
        strategy = kind(communication=mirrored.CommunicationOptions(timeout_seconds=20), **options)
    plugin = Towers(strategy, folder, done)
    if strategy is not None:
        plugin.share_files()
    with open(os.devnull, "w") as nothing:
        out, sys.stdout = sys.stdout, nothing
        try:
            words = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", path, "-k", match]
            pytest.main([*words, "--continue-on-collection-errors", *files], [plugin])
        finally:
            sys.stdout = out
    return plugin.outcomes, not plugin.stopped


def _conftest() -> types.ModuleType:
    """What tests import from the ``conftest`` of Keras' repository, which the wheel lacks."""
    module: Any = types.ModuleType("conftest")
    module.skip_if_backend = lambda backend, reason: pytest.mark.skipif(backend == "torch", reason=reason)
    return module


def outcomes(
    files: Sequence[str], match: str, path: str, towers: int, without: Collection[str], way: str
) -> dict[str, list[Outcome]]:
    """The outcomes of all tests, one for each tower; towers that may be out of step begin again behind that test.

    Args:
        towers: 0 runs the tests as they are.
        without: tests that are left out.
    """
    print(f"{towers} towers:" if towers else "without a strategy:", file=sys.stderr, flush=True)
    found: dict[str, list[Outcome]] = {}
    devices = [f"cpu:{i}" for i in range(max(towers, 1))]
    complete = False
    while not complete:
        before = len(found)
        with tempfile.TemporaryDirectory() as folder:
            arguments = (files, match, folder, [*without, *found], way if towers else "", path)
            results = mirrored.launch(run, arguments, devices=devices, timeout=3600)
        for name in {name for each, _ in results for name in each if name not in without}:
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
    parser.add_argument("-k", dest="match", default="", help="tests whose names match, as of pytest: 'not jit'")
    parser.add_argument("--way", choices=WAYS, default="mirrored", help="the strategy (default: mirrored)")
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
    plain = outcomes(files, options.match, str(path), 0, (), options.way)
    if not plain:
        parser.error(f"no test's name matches {options.match}")
    failed_without = {name for name, results in plain.items() if kind_of(results) == "failed"}
    for name in sorted(failed_without):
        print(f"fails without a strategy: {name}: {plain[name][0].text}")
    bad = 0
    for towers in (1, 2):
        found = outcomes(files, options.match, str(path), towers, failed_without, options.way)
        counted = collections.Counter(kind_of(results) for results in found.values())
        missing = plain.keys() - found.keys() - failed_without
        for name in sorted(missing) if towers > 1 else ():
            if (why := why_not(name)) is not None:
                missing.remove(name)
                counted["cannot be"] += 1
                print(f"cannot be on {towers} towers: {name}: {why}")
        for name in sorted(found):
            if kind_of(found[name]) != "failed" or kind_of(plain.get(name, [])) == "skipped":
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
