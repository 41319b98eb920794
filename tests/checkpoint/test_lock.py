"""One process at a time writes into a folder of checkpoints, whatever its managers come and go."""

from __future__ import annotations

import fcntl
import gc
import os
import pathlib
import threading
from collections.abc import Callable

import pytest

import mirrored
from mirrored.checkpoint.folder import Disk
from mirrored.checkpoint.lock import take_lock
from tests.support.waiting import HANG

pytestmark = pytest.mark.slow


def manager(folder: pathlib.Path, disk: Disk | None = None) -> mirrored.CheckpointManager:
    return mirrored.CheckpointManager(mirrored.OneDeviceStrategy(), folder, {"progress": {}}, disk=disk)


def in_a_child(work: Callable[[], object]) -> bool:
    """Whether a forked child finds nobody in its way."""
    child = os.fork()
    if child == 0:
        code = 5
        try:
            work()
            code = 4
        except BlockingIOError:
            code = 3
        finally:
            os._exit(code)
    return {3: False, 4: True}[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]


def another_process_may_write(folder: pathlib.Path) -> bool:
    """Whether a process that tries, finds the folder free."""
    return in_a_child(lambda: fcntl.lockf(os.open(folder / ".lock", os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB))


def test_a_second_manager_that_goes_leaves_the_lock(tmp_path: pathlib.Path) -> None:
    first = manager(tmp_path)
    second = manager(tmp_path)
    assert not another_process_may_write(tmp_path)
    del second
    gc.collect()
    assert not another_process_may_write(tmp_path)
    first.save("still", wait=True)
    del first
    gc.collect()
    assert another_process_may_write(tmp_path)


def test_the_first_manager_may_go_first(tmp_path: pathlib.Path) -> None:
    managers = [manager(tmp_path) for _ in range(3)]
    while managers:
        assert not another_process_may_write(tmp_path)
        del managers[0]
        gc.collect()
    assert another_process_may_write(tmp_path)


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
    assert not in_a_child(lambda: take_lock(tmp_path / ".lock"))
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
