"""One process at a time writes into a folder of checkpoints, whatever its managers come and go."""

from __future__ import annotations

import fcntl
import gc
import os
import pathlib
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import mirrored
from mirrored.checkpoint.folder import Disk, take_lock
from tests.support.checkpoints import manager_of
from tests.support.children import in_a_child
from tests.support.programs import start_program
from tests.support.waiting import HANG
from towers.system.timeouts import clock

pytestmark = pytest.mark.extended

HOLDER = """
import fcntl, os, sys
fcntl.lockf(os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600), fcntl.LOCK_EX)
print("locked", flush=True)
input()
"""


def manager(folder: pathlib.Path, disk: Disk | None = None) -> mirrored.CheckpointManager:
    return manager_of(folder, {"progress": {}}, disk=disk)


def another_process_may_write(folder: pathlib.Path) -> bool:
    """Whether a process that tries, finds the folder free."""
    try_to_lock = lambda: fcntl.lockf(os.open(folder / ".lock", os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)  # noqa: E731
    text = in_a_child(try_to_lock)
    assert text == "None" or "BlockingIOError" in text, text
    return text == "None"


def test_one_process_writes_into_a_folder(tmp_path: pathlib.Path) -> None:
    first = manager(tmp_path)
    assert "CheckpointError" in (text := in_a_child(lambda: manager(tmp_path)))
    assert "another process writes" in text
    first.save(wait=True)


@pytest.mark.parametrize("order", [[1, 0], [0, 0, 0]], ids=["the last first", "the first first"])
def test_the_last_manager_that_goes_leaves_the_folder(tmp_path: pathlib.Path, order: list[int]) -> None:
    managers = [manager(tmp_path) for _ in order]
    for place in order:
        assert not another_process_may_write(tmp_path)
        managers[0].save("still", wait=True)
        del managers[place]
        gc.collect()
    assert another_process_may_write(tmp_path)


def test_threads_that_wait_for_another_process_share_one_lock(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lockf = tmp_path / ".lock", fcntl.lockf
    monkeypatch.setattr(fcntl, "lockf", lambda *words: clock.sleep(0.2) or lockf(*words))  # both try at the same time
    holder = start_program(["-c", HOLDER, str(path)], stdin=subprocess.PIPE)
    assert holder.stdout.readline() == "locked\n"
    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(take_lock, path, HANG) for _ in range(2)]
        holder.communicate("\n")
    assert len({future.result()[0] for future in waiting}) == 1


def test_another_name_of_the_folder_is_the_same_folder(tmp_path: pathlib.Path) -> None:
    first = manager(tmp_path / "a")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    second = manager(tmp_path / "b")
    del second
    gc.collect()
    assert not another_process_may_write(tmp_path / "a")
    first.wait()


def test_a_forked_child_has_no_lock_of_its_parent(tmp_path: pathlib.Path) -> None:
    parent = manager(tmp_path)
    assert "BlockingIOError" in in_a_child(lambda: take_lock(tmp_path / ".lock"))
    assert not another_process_may_write(tmp_path), "the child, which has ended, has taken nothing with it"
    parent.wait()


class SlowDisk(Disk):
    """Waits in the middle of a checkpoint until it may go on."""

    def __init__(self) -> None:
        self.reached, self.may_go_on = threading.Event(), threading.Event()

    def fsync(self, descriptor: int) -> None:
        self.reached.set()
        assert self.may_go_on.wait(HANG)
        super().fsync(descriptor)


def test_what_is_being_written_is_left_alone(tmp_path: pathlib.Path) -> None:
    disk = SlowDisk()
    first = manager(tmp_path, disk)
    first.save("slow")
    assert disk.reached.wait(HANG)
    second = manager(tmp_path)
    del first
    gc.collect()
    del second
    gc.collect()
    assert not another_process_may_write(tmp_path), "a thread still writes"
    disk.may_go_on.set()
    for thread in threading.enumerate():
        if thread.name == "mirrored-checkpoint":
            thread.join(HANG)
    manager(tmp_path).restore("slow")
