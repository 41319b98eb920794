"""Disks that fail, fill up or may not be written, and processes that die while they save: something whole is there."""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import pathlib
import shutil
import signal
import stat
from typing import Any

import pytest
import torch

import mirrored
from mirrored.checkpoint.folder import Disk
from mirrored.checkpoint.manifest import name_of
from tests.support.checkpoints import manager_of, one_tower
from tests.support.children import in_a_child
from tests.support.faulty_disk import FaultyDisk, save_values, saved_value
from tests.support.jobs import towers


def test_a_named_checkpoint_is_replaced_whole(folder: pathlib.Path) -> None:
    """Whatever call fails while "best" is written anew, there is an old or a new one."""
    progress: dict[str, Any] = {"value": 0}

    def manager(disk: Disk | None = None) -> mirrored.CheckpointManager:
        return manager_of(folder, {"progress": progress}, disk=disk)

    values, at, calls = set(), 0, 1
    while at < calls:
        at += 1
        shutil.rmtree(folder, ignore_errors=True)
        progress["value"] = 1
        manager().save("best", wait=True)
        progress["value"] = 2
        disk = FaultyDisk(at, errno.ENOSPC)
        with contextlib.suppress(mirrored.CheckpointError):
            manager(disk).save("best", wait=True)
        calls = disk.calls
        manager().restore("best")
        values.add(progress["value"])
    assert at > 10
    assert values == {1, 2}


def test_a_named_checkpoint_can_be_replaced_after_any_failure(folder: pathlib.Path) -> None:
    """What could not be removed is not in the way of the next save by the same manager."""
    progress: dict[str, Any] = {"value": 0}
    disk, at, calls = FaultyDisk(), 0, 1
    manager = manager_of(folder, {"progress": progress}, disk=disk)
    manager.save("best", wait=True)
    while at < calls:
        at += 1
        disk.fail(at, errno.EIO)
        with contextlib.suppress(mirrored.CheckpointError):
            manager.save("best", wait=True)
        calls = disk.calls
        progress["value"] = at
        disk.fail(0, None)
        manager.save("best", wait=True)
        progress["value"] = 0
        manager.restore("best")
        assert progress["value"] == at
    assert at > 10


def names_in(folder: pathlib.Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def two_saved(tmp_path: pathlib.Path, number: int) -> pathlib.Path:
    """A new folder with the first two values."""
    before, folder = tmp_path / "before", tmp_path / str(number)
    if not before.exists():
        save_values(before, range(1, 3))
    shutil.copytree(before, folder)
    return folder


def count_calls(tmp_path: pathlib.Path) -> int:
    """How many calls the third save makes, which also removes the first."""
    save_values(tmp_path / "count", range(1, 3))
    disk = FaultyDisk()
    save_values(tmp_path / "count", range(3, 4), disk)
    return disk.calls


@pytest.mark.extended
@pytest.mark.parametrize("error", [28, 5], ids=["ENOSPC", "EIO"])
@pytest.mark.row(44)
def test_a_disk_that_fails_at_any_call_keeps_what_was_there(tmp_path: pathlib.Path, error: int) -> None:
    calls = count_calls(tmp_path)
    assert calls > 15
    outcomes = collections.Counter[str]()
    for at in range(1, calls + 1):
        folder = two_saved(tmp_path, at)
        told = ""
        try:
            save_values(folder, range(3, 4), FaultyDisk(at, error))
        except mirrored.CheckpointError as caught:
            told = str(caught)
            assert os.strerror(error) in told
        found = saved_value(folder)
        outcomes[f"{'error' if told else 'warning'}, restored {found}"] += 1
        assert not list(folder.glob(".saving*")), "left behind"
        save_values(folder, range(4, 5))  # and it goes on
        assert saved_value(folder) == 4
        assert names_in(folder) == [".lock", "latest", name_of(found), name_of(4)]
    # Flushing the rename may fail, and cleaning up after it, which is only warned of.
    assert set(outcomes) == {"error, restored 2", "error, restored 3", "warning, restored 3"}
    assert outcomes["error, restored 3"] == 1


def _kills(folder: str, calls: int) -> list[int]:
    """What comes back after a process was killed at each of its calls in turn."""
    found = []
    for at in range(1, calls + 1):
        place = two_saved(pathlib.Path(folder), at)
        assert in_a_child(lambda: save_values(place, range(3, 4), FaultyDisk(at))) == str(-signal.SIGKILL)  # noqa: B023
        found.append(saved_value(place))
        save_values(place, range(4, 5))
        assert saved_value(place) == 4
        assert names_in(place) == [".lock", "latest", name_of(found[-1]), name_of(4)]
    return found


@pytest.mark.extended
def test_a_kill_at_any_call_keeps_what_was_there(tmp_path: pathlib.Path) -> None:
    calls = count_calls(tmp_path)
    (found,) = mirrored.launch(_kills, (str(tmp_path), calls), towers=1)
    assert found == sorted(found)
    assert set(found) == {2, 3}


def _full_disk(strategy: mirrored.Strategy, folder: str, asynchronous: bool) -> Any:
    disk = FaultyDisk()
    progress = {"step": torch.zeros(3)}
    manager = mirrored.CheckpointManager(strategy, folder, {"progress": progress}, disk=disk, asynchronous=asynchronous)
    if strategy.is_chief:
        disk.fail(2, errno.ENOSPC)
    with pytest.raises(mirrored.CheckpointError) as caught:
        manager.save()
        manager.save()
    manager.save(wait=True)  # there is room again
    return str(caught.value)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.row(44)
def test_all_towers_are_told_that_the_disk_is_full(folder: pathlib.Path, asynchronous: bool) -> None:
    texts = towers(_full_disk, str(folder), asynchronous)
    assert texts[0] == texts[1]
    assert texts[0].startswith("tower 0: checkpoint ")
    assert "could not be written (No space left on device); earlier ones are as they were" in texts[0]
    assert [p.name for p in folder.glob("step-*")] == [name_of(0)]


def _goes_on_after_a_full_disk(strategy: mirrored.Strategy, folder: str) -> int:
    disk = FaultyDisk()
    manager = mirrored.CheckpointManager(strategy, folder, {"progress": {"x": torch.ones(2)}}, disk=disk)
    if strategy.is_chief:
        disk.fail(2, errno.ENOSPC)
    with manager.resume():
        manager.step()
        manager.save()
        with pytest.raises(mirrored.CheckpointError):
            manager.wait()
    return manager.steps


def test_a_script_that_bears_a_full_disk_saves_at_the_end(folder: pathlib.Path) -> None:
    assert towers(_goes_on_after_a_full_disk, str(folder)) == [1, 1]
    assert [p.name for p in folder.glob("step-*")] == [name_of(1)]


def _fails_in_the_background(strategy: mirrored.Strategy, folder: str) -> str:
    disk, progress = FaultyDisk(), {"step": 0}
    manager = mirrored.CheckpointManager(strategy, folder, {"progress": progress}, disk=disk, asynchronous=True)
    with pytest.raises(mirrored.CheckpointError) as caught, manager.resume():
        manager.step()
        if strategy.is_chief:
            disk.fail(2, errno.ENOSPC)
        manager.save()
        progress["step"] = 2
        manager.step()
    progress["step"] = 0
    manager.restore_newest()
    return f"{progress['step']}: {caught.value}"


def test_the_last_state_is_saved_though_the_save_before_failed(folder: pathlib.Path) -> None:
    texts = towers(_fails_in_the_background, str(folder))
    assert texts[0] == texts[1]
    assert texts[0].startswith("2: tower 0: checkpoint ")
    assert "No space left on device" in texts[0]


def _alone(strategy: mirrored.Strategy, folder: str) -> None:
    manager = mirrored.CheckpointManager(strategy, folder, {"progress": {}})
    if strategy.is_chief:
        manager.save()
    else:
        strategy.reduce("sum", 1)


def test_saving_on_one_tower_only_is_an_error_on_all(folder: pathlib.Path) -> None:
    with pytest.raises(mirrored.TowerFailedError) as caught:
        towers(_alone, str(folder))
    errors = [failure.exception for failure in caught.value.failures]
    assert all(isinstance(error, mirrored.DisagreementError) for error in errors), errors
    assert "saves a checkpoint" in str(errors[0])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"keep": 1}, "keep is 1"),
        ({"every_steps": 0}, "every_steps is 0"),
        ({"every_seconds": -1}, "every_seconds is -1"),
        ({"grace_seconds": 0}, "grace_seconds is 0"),
    ],
)
def test_settings_that_cannot_be(folder: pathlib.Path, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        one_tower(folder, **settings)


def test_a_folder_that_cannot_be_written(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(mirrored.CheckpointError, match="file cannot be written to"):
        one_tower(tmp_path / "file")


def test_files_are_for_their_owner_only(folder: pathlib.Path) -> None:
    before = os.umask(0)
    try:
        manager, _ = one_tower(folder)
        manager.save(wait=True)
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in [folder, *folder.rglob("*")]}
    assert {mode for name, mode in modes.items() if "." in name or name == "latest"} == {0o600}, modes
    assert modes[name_of(0)] == modes["checkpoints"] == 0o700
