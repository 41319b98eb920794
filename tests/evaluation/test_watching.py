"""New checkpoints of a folder are found, held until they were read, and complete, while a run prunes them."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import pathlib
import random
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import mirrored
from mirrored.checkpoint.folder import ENDED, Disk
from mirrored.checkpoint.manifest import StoredCheckpoint, name_of
from mirrored.evaluation import checkpoints_iterator
from tests.support.checkpoints import manager_of
from tests.support.clocks import Lockstep
from tests.support.jobs import launch

pytestmark = pytest.mark.extended

COUNT = 200


class Unflushed(Disk):
    """Is as fast as memory is."""

    def fsync(self, descriptor: int) -> None:
        pass


def step_in(path: pathlib.Path) -> int:
    """The step that a checkpoint says it is of, in its name, its manifest and its tensors; it is read completely."""
    with contextlib.closing(StoredCheckpoint(path)) as stored:
        value = stored.state("progress")["value"]
        assert value.eq(value[0]).all()
        assert int(value[0]) == stored.manifest["step"]
        assert path.name == name_of(stored.manifest["step"])
        return int(value[0])


def write(folder: str, count: int = COUNT) -> None:
    """A run of so many steps, each with a checkpoint, of which the last two are kept."""
    progress = {"value": torch.zeros(5000)}
    manager = manager_of(
        pathlib.Path(folder), {"progress": progress}, every_steps=1, asynchronous=False, disk=Unflushed()
    )
    with manager.resume():
        for _ in range(count):
            progress["value"] = torch.full((5000,), float(manager.steps + 1))
            manager.step()


def test_none_is_missed_that_was_there_for_a_second(folder: pathlib.Path, lockstep: Lockstep) -> None:
    """200 checkpoints, on a clock of the test's; they are read when all but two are pruned."""
    progress, draws = {"value": torch.zeros(10)}, random.Random(0)
    written, pruned, found = dict[int, float](), dict[int, float](), list[int]()
    manager = manager_of(folder, {"progress": progress}, asynchronous=False, disk=Unflushed())
    paths = checkpoints_iterator(folder, folder / "held")
    assert next(paths) is None
    with manager.resume():
        for step in range(1, COUNT + 1):
            progress["value"] = torch.full((10,), float(step))
            manager.steps = step
            manager.save()
            written[step] = lockstep.monotonic()
            pruned[step - 2] = lockstep.monotonic()
            lockstep.sleep(draws.choice([0.0, 0.01, 0.4, 0.7, 1.0]))
    found = [step_in(path) for path in paths if path is not None]
    there = {step for step in written if pruned.get(step, float("inf")) - written[step] >= 1.0}
    assert 50 < len(there) < COUNT
    assert there <= set(found)
    assert found == sorted(set(found))
    assert not (folder / "held").exists()


def test_what_a_fast_run_writes_and_prunes_is_read_completely(folder: pathlib.Path) -> None:
    """Another process writes 200 checkpoints as fast as it can, and keeps two."""
    with ThreadPoolExecutor() as threads:
        run = threads.submit(launch, write, str(folder), count=1)
        found = [step_in(path) for path in checkpoints_iterator(folder, folder / "held") if path is not None]
        run.result()
    assert found == sorted(set(found))
    assert found[-1] == COUNT
    assert len(found) >= 2


@pytest.mark.parametrize("removes", ["before the first link", "before the second link"])
def test_one_that_is_pruned_while_it_is_linked_is_left_out(
    folder: pathlib.Path, removes: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(str(folder), 2)
    link, calls = os.link, itertools.count()

    def link_late(source: str, target: str, **options: bool) -> None:
        if next(calls) == (removes == "before the second link"):
            shutil.rmtree(folder / name_of(1))
        link(source, target, **options)

    monkeypatch.setattr(os, "link", link_late)
    with caplog.at_level(logging.WARNING, "mirrored"):
        found = [step_in(path) for path in checkpoints_iterator(folder, folder / "held", 1) if path is not None]
    assert found == [2]
    assert caplog.text.count(f"{folder / name_of(1)} could not be held") == 1


def test_one_that_cannot_be_linked_at_once_is_linked_later(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk is full for a while, also when the run ends."""
    write(str(folder), 2)
    (folder / ENDED).unlink()
    shutil.rmtree(folder / name_of(1))
    link, calls = os.link, itertools.count()

    def link_late(source: str, target: str, **options: bool) -> None:
        if next(calls) in (1, 2, 3, 5):
            (folder / ENDED).write_text("")
            raise OSError(errno.ENOSPC, "No space left on device")
        link(source, target, **options)

    monkeypatch.setattr(os, "link", link_late)
    monkeypatch.setattr(shutil, "copyfile", link_late)
    paths = checkpoints_iterator(folder, folder / "held", 5)
    next(paths)
    with caplog.at_level(logging.WARNING, "mirrored"):
        for path in paths:
            if path is not None:
                assert step_in(path) == 2
                assert len(list((folder / "held").iterdir())) == 1
    assert next(calls) > 6
    assert caplog.text.count(f"{folder / name_of(2)} could not be held") == 1


def test_without_hard_links_it_copies(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(str(folder), 2)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert [step_in(path) for path in checkpoints_iterator(folder, folder / "held", 1) if path is not None] == [1, 2]


def test_the_same_step_written_again_is_another_checkpoint(folder: pathlib.Path, lockstep: Lockstep) -> None:
    progress = {"value": torch.ones(10)}
    manager = manager_of(folder, {"progress": progress}, asynchronous=False)
    paths = (path for path in checkpoints_iterator(folder, folder / "held") if path is not None)
    manager.steps = 1
    for _ in range(2):
        manager.save()
        assert step_in(next(paths)) == 1


def test_an_end_that_was_there_before_may_be_an_earlier_runs(
    folder: pathlib.Path, lockstep: Lockstep, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mirrored")
    words = f"the run in {folder} had ended before it was watched, and none has gone on since"
    write(str(folder), 3)
    ended = (folder / ENDED).read_text()
    paths = checkpoints_iterator(folder, folder / "held")
    assert [step_in(path) for path in itertools.islice(paths, 590) if path is not None] == [2, 3]
    write(str(folder), 5)  # goes on to step 8
    assert (folder / ENDED).read_text() != ended
    assert [step_in(path) for path in paths if path is not None] == [7, 8]
    assert words not in caplog.text
    began = lockstep.monotonic()
    assert began < 70
    paths = checkpoints_iterator(folder, folder / "held")
    assert [step_in(path) for path in paths if path is not None] == [7, 8]
    assert 59 < lockstep.monotonic() - began < 61, "nothing has followed for a minute"
    assert words in caplog.text


def test_a_run_that_goes_on_while_an_old_checkpoint_is_evaluated_is_watched(
    folder: pathlib.Path, lockstep: Lockstep
) -> None:
    write(str(folder), 1)
    paths = checkpoints_iterator(folder, folder / "held")
    while next(paths) is None:
        pass
    lockstep.sleep(70)  # the old note counts by now
    (folder / ENDED).unlink()
    lockstep.sleep(1)
    assert next(paths) is None
    write(str(folder), 1)
    assert [step_in(path) for path in paths if path is not None] == [2]


@pytest.mark.row(52)
def test_a_folder_that_never_appears(folder: pathlib.Path, lockstep: Lockstep) -> None:
    words = rf"no new checkpoint in {folder} for 50 s: is it the folder of the run's CheckpointManager"
    with pytest.raises(mirrored.CheckpointError, match=words):
        list(checkpoints_iterator(folder, folder.with_name("held"), 50))
    assert 50 <= lockstep.monotonic() < 51


def test_a_run_that_never_ends_is_left(
    folder: pathlib.Path, lockstep: Lockstep, caplog: pytest.LogCaptureFixture
) -> None:
    write(str(folder), 2)
    (folder / ENDED).unlink()
    with caplog.at_level(logging.WARNING, "mirrored"):
        found = [step_in(path) for path in checkpoints_iterator(folder, folder / "held", 50) if path is not None]
    assert found == [1, 2]
    assert "it is not watched any more, though its run has not ended" in caplog.text
