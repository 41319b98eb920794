"""Folders that an ordinary user may not write to, and clocks that are set while checkpoints are saved."""

from __future__ import annotations

import ctypes
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator

import pytest
from torch import nn

import mirrored
from mirrored.checkpoint.manifest import name_of
from mirrored.checkpoint.reading import inspect
from tests.support.checkpoints import manager_of
from tests.support.children import in_a_child
from tests.support.clocks import Jumps
from towers.system.timeouts import clock

NOBODY = 65534
_DUMPABLE = 4  # PR_SET_DUMPABLE


@pytest.fixture
def place(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder of an ordinary user's, which the folders of pytest are not."""
    manager(tmp_path).restore_newest()  # loads modules, which that user may not be allowed to read
    path = pathlib.Path(tempfile.mkdtemp(dir="/tmp"))
    os.chown(path, NOBODY, NOBODY) if os.geteuid() == 0 else None
    try:
        yield path
    finally:
        for folder in [path, *path.rglob("*")]:
            if folder.is_dir():
                folder.chmod(0o700)
        shutil.rmtree(path)


def as_ordinary_user(work: Callable[[], None]) -> None:
    """Run ``work`` in a child that may do no more than an ordinary user may."""

    def limited() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            ctypes.CDLL(None).prctl(_DUMPABLE, 1, 0, 0, 0)  # its own /proc/self, as any program has it
        work()

    text = in_a_child(limited)
    assert text == "None", text


def manager(folder: pathlib.Path, **settings: object) -> mirrored.CheckpointManager:
    return manager_of(folder, {"model": nn.Linear(2, 2)}, **settings)  # type: ignore[arg-type]


def refused(words: str, work: Callable[[], object]) -> None:
    with pytest.raises(mirrored.CheckpointError, match=words):
        work()


def test_a_folder_that_can_only_be_read_is_read(place: pathlib.Path) -> None:
    def work() -> None:
        folder = place / "run"
        first = manager(folder)
        first.save("best", wait=True)
        first.step()
        first.save(wait=True)
        del first
        for part in (folder / "best", folder / name_of(1), folder):
            part.chmod(0o500)
        model = nn.Linear(2, 2)
        assert len(mirrored.load_weights(model, folder / "best").loaded) == 2
        assert "model/weight" in inspect(folder)
        refused("run cannot be written to: Permission denied", lambda: manager(folder))
        refused("run/more cannot be written to: Permission denied", lambda: manager(folder / "more"))
        assert sorted(p.name for p in folder.iterdir()) == [".lock", "best", "latest", name_of(1)]

    as_ordinary_user(work)


def test_a_folder_of_somebody_elses_is_an_error_that_names_it(place: pathlib.Path) -> None:
    def work() -> None:
        folder = place / "run"
        manager(folder).save("best", wait=True)
        (folder / "best" / "manifest.json").chmod(0)
        refused(r"manifest\.json cannot be opened: Permission denied", lambda: manager(folder).restore("best"))
        refused(r"manifest\.json cannot be opened: Permission denied", lambda: inspect(folder / "best"))
        (folder / "best").chmod(0)
        refused("best cannot be opened: Permission denied", lambda: manager(folder).restore("best"))
        (folder / ".lock").chmod(0o400)
        refused(r"\.lock cannot be opened: Permission denied", lambda: manager(folder))

    as_ordinary_user(work)


def test_a_folder_that_becomes_read_only_keeps_what_it_has(place: pathlib.Path) -> None:
    def work() -> None:
        folder = place / "run"
        run = manager(folder, every_steps=1)
        run.step()
        run.wait()
        folder.chmod(0o500)
        run.step()
        refused(r"could not be written \(Permission denied\); earlier ones are as they were", run.wait)
        assert sorted(p.name for p in folder.iterdir()) == [".lock", "latest", name_of(1)]
        folder.chmod(0o700)
        run.step()
        run.wait()
        assert run.latest == name_of(3)

    as_ordinary_user(work)


def test_a_clock_that_is_set_decides_nothing_of_checkpoints(
    place: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "wall_time", Jumps())
    run = manager(place / "run", every_seconds=1000.0)
    run.save(wait=True)
    for number, step in enumerate((1, 2, 3)):
        for path in (place / "run").rglob("*"):  # as if each was written before the others
            os.utime(path, (10**9 - number, 10**9 - number))
        run.step()
        run.save(wait=True)
        assert run.latest == name_of(step)
    assert [p.name for p in sorted((place / "run").glob("step-*"))] == [name_of(2), name_of(3)]
    restored = run.restore_newest()
    assert restored.step == 3
