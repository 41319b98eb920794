"""What is saved comes back, to the bit, and whatever happens meanwhile, something whole is there."""

from __future__ import annotations

import collections
import contextlib
import errno
import json
import math
import os
import pathlib
import pickle
import shutil
import signal
import stat
import time
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import mirrored
from mirrored.checkpoint import manifest as manifests
from mirrored.checkpoint.codec import Encoder, Malformed, decode
from mirrored.checkpoint.disk import Disk
from mirrored.checkpoint.folder import Folder
from mirrored.checkpoint.manifest import StoredCheckpoint, name_of
from mirrored.checkpoint.tensors import FileLayout, TensorFile
from tests.faults.training import Interrupted, make_model, steps_of, train
from tests.support.faulty_disk import FaultyDisk, save_values, saved_value
from tests.support.jobs import run_program, towers

STEPS = steps_of()


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "checkpoints"


def parts(folder: pathlib.Path, *stops: int, count: int = 2, **settings: Any) -> list[Any]:
    """Run to each of the stops, then to the end, always anew."""
    for stop in stops:
        towers(_train, str(folder), {"stop": stop, **settings}, count=count)
    return towers(_train, str(folder), settings, count=count)


def _train(strategy: mirrored.Strategy, folder: str, settings: dict[str, Any]) -> Any:
    with contextlib.suppress(Interrupted):
        return train(strategy, folder, **settings)


# -- going on ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [True, False])
def test_an_interrupted_run_ends_in_the_same_bits(tmp_path: pathlib.Path, asynchronous: bool) -> None:
    whole = parts(tmp_path / "a", asynchronous=asynchronous)
    resumed = parts(tmp_path / "b", 4, 10, asynchronous=asynchronous)
    for tower in range(2):
        assert resumed[tower]["restored"].step == 8
        for key in ("digest", "losses", "seen", "steps"):
            assert resumed[tower][key] == whole[tower][key], key
    assert whole[0]["digest"] != whole[1]["digest"]  # BatchNorm's statistics are each tower's own


def _virtual(folder: str, settings: dict[str, Any]) -> Any:
    strategy = mirrored.MirroredStrategy(virtual_towers=4, seed=0)
    with contextlib.suppress(Interrupted):
        return train(strategy, folder, **settings)


def test_virtual_towers_go_on_with_any_number_of_towers(tmp_path: pathlib.Path) -> None:
    whole = mirrored.launch(_virtual, (str(tmp_path / "a"), {}), towers=2, timeout=60)
    for count, stop in ((4, 5), (1, 8)):
        mirrored.launch(_virtual, (str(tmp_path / "b"), {"stop": stop}), towers=count, timeout=60)
    resumed = mirrored.launch(_virtual, (str(tmp_path / "b"), {}), towers=2, timeout=60)
    assert resumed[0]["restored"].towers == 1
    for key in ("digest", "losses", "seen"):
        assert resumed[0][key] == resumed[1][key] == whole[0][key], key


def test_another_number_of_towers_takes_what_the_first_had(folder: pathlib.Path) -> None:
    parts(folder, 4)
    shutil.rmtree(folder / name_of(STEPS))
    (result,) = towers(_train, str(folder), {}, count=1)
    restored = result["restored"]
    assert (restored.step, restored.towers) == (12, 2)
    assert {"model", "mirrored.streams"} <= set(restored.of_first_tower)
    assert "optimizer" not in restored.of_first_tower


def test_a_run_that_is_done_is_done(folder: pathlib.Path) -> None:
    first = parts(folder)
    started = time.time()
    again = parts(folder)
    assert again[0]["seen"] == first[0]["seen"]
    assert all(entry.stat().st_mtime < started for entry in folder.glob("step-*"))


def test_only_the_newest_are_kept_and_named_ones_are_kept_always(folder: pathlib.Path) -> None:
    manager, model = one_tower(folder, keep=3)
    manager.save("best", wait=True)
    assert not (folder / "latest").exists()
    for _ in range(6):
        manager.step()
    manager.wait()
    assert sorted(p.name for p in folder.glob("[a-z]*")) == ["best", "latest", *map(name_of, (4, 5, 6))]
    assert (folder / "latest").read_text() == f"{name_of(6)}\n"
    assert manager.latest == name_of(6)
    before = model.weight.clone()
    nn.init.zeros_(model.weight)
    assert manager.restore("best").step == 0
    assert torch.equal(model.weight, before)
    manager.step()  # a step of a life that began again before the others
    manager.wait()
    assert sorted(p.name for p in folder.glob("step-*")) == [name_of(1)]
    assert len(list(folder.glob("replaced-step-*"))) == 3


def one_tower(folder: pathlib.Path, **settings: Any) -> tuple[mirrored.CheckpointManager, nn.Linear]:
    strategy = mirrored.OneDeviceStrategy()
    with strategy.scope():
        model = nn.Linear(3, 2)
    return mirrored.CheckpointManager(strategy, folder, {"model": model}, **{"every_steps": 1, **settings}), model


def test_time_decides_where_that_is_asked_for(folder: pathlib.Path) -> None:
    manager, _ = one_tower(folder, every_steps=None, every_seconds=0.2)
    manager.step()
    assert manager.latest is None
    time.sleep(0.25)
    manager.step()
    manager.wait()
    assert manager.latest == name_of(2)


def test_the_script_keeps_its_own_objects(folder: pathlib.Path) -> None:
    strategy = mirrored.OneDeviceStrategy()
    progress, history = {"best": 0.5, (1, 2): math.nan}, [1, 2]
    manager = mirrored.CheckpointManager(strategy, folder, {"progress": progress, "history": history})
    manager.save(wait=True)
    progress["best"], progress["more"] = 0.7, 1
    history.append(3)
    assert manager.restore(name_of(0)).left == ()
    assert progress["best"] == 0.5
    assert math.isnan(progress[1, 2])
    assert history == [1, 2]


class Widths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight  # tied
        self.conv = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
        self.register_buffer("phase", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("halves", torch.randn(3).half().t())
        self.register_buffer("nothing", torch.empty(0, 4))
        self.register_buffer("counts", torch.tensor([1, 2**32 - 1], dtype=torch.uint32))
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.bfloat16))


@pytest.mark.row(33)
def test_tied_weights_and_every_dtype_and_layout_come_back(folder: pathlib.Path) -> None:
    strategy = mirrored.OneDeviceStrategy()
    first, second = Widths(), Widths()
    optimizers = []
    for model in (first, second):
        optimizer = torch.optim.Adam(model.parameters())
        sum((p.float() ** 2).sum() for p in model.parameters()).backward()
        optimizer.step()
        optimizers.append(optimizer)
    saving = mirrored.CheckpointManager(strategy, folder, {"model": first, "optimizer": optimizers[0]})
    saving.save(wait=True)
    reading = mirrored.CheckpointManager(strategy, folder, {"model": second, "optimizer": optimizers[1]})
    reading.restore(name_of(0))
    assert second.layers[2].weight is second.layers[0].weight
    for key, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[key]), key
    moments = [o.state[m.conv.weight]["exp_avg"] for o, m in zip(optimizers, (first, second), strict=True)]
    assert torch.equal(*moments)
    assert moments[0].stride() == moments[1].stride()  # channels last, as the parameter
    names = load_file(folder / name_of(0) / "tensors.safetensors")
    assert not any("layers.2.weight" in name for name in names), "saved twice"


# -- damage --------------------------------------------------------------------------------------------------

DAMAGES = [
    (file, how)
    for file in ("manifest.json", "tensors.safetensors")
    for how in (
        "empty",
        "1 byte",
        "halves",
        "last byte",
        "longer",
        "first",
        "middle",
        "end",
        "missing",
        "folder",
        "link",
    )
]


def damage(path: pathlib.Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    cuts = {"empty": 0, "1 byte": 1, "halves": len(data) // 2, "last byte": len(data) - 1}
    flips = {"first": 9, "middle": len(data) // 2, "end": len(data) - 3}
    if how in cuts:
        path.write_bytes(data[: cuts[how]])
    elif how in flips:
        data[flips[how]] ^= 1
        path.write_bytes(data)
    elif how == "longer":
        path.write_bytes(data + b"\0")
    else:
        path.unlink()
        if how == "folder":
            path.mkdir()
        elif how == "link":
            path.symlink_to(path.parent.parent / name_of(1) / path.name)


@pytest.mark.parametrize(("file", "how"), DAMAGES)
@pytest.mark.row(45)
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(
    folder: pathlib.Path, file: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    manager, model = one_tower(folder)
    manager.step()
    expected = model.weight.clone()
    nn.init.zeros_(model.weight)
    manager.step()
    manager.wait()
    damage(folder / name_of(2) / file, how)
    nn.init.ones_(model.weight)
    with manager.resume() as restored:
        assert restored is not None
        assert restored.step == 1
        assert torch.equal(model.weight, expected)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any(f"{name_of(2)}/{file}" in text for text in warnings), warnings
    with pytest.raises(mirrored.CheckpointError, match=f"{name_of(2)}/{file}"):
        manager.restore(name_of(2))


@pytest.mark.row(45)
def test_nothing_whole_is_left(folder: pathlib.Path) -> None:
    manager, _ = one_tower(folder)
    manager.step()
    manager.wait()
    damage(folder / name_of(1) / "tensors.safetensors", "halves")
    with pytest.raises(mirrored.CheckpointError, match=r"none of the 1 checkpoints .* can be used.*it is damaged"):
        manager.restore_newest()


@pytest.mark.row(45)
def test_what_is_no_part_of_a_checkpoint_is_refused(folder: pathlib.Path) -> None:
    manager, _ = one_tower(folder)
    manager.save(wait=True)
    (folder / name_of(0) / "more.bin").write_bytes(b"")
    with pytest.raises(mirrored.CheckpointError, match=r"holds more\.bin"):
        manager.restore(name_of(0))


@pytest.mark.row(46)
def test_a_checkpoint_of_another_model_changes_nothing(folder: pathlib.Path) -> None:
    strategy = mirrored.OneDeviceStrategy()
    progress = {"epoch": 1}
    first = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    mirrored.CheckpointManager(strategy, folder, {"progress": progress, "model": first}).save(wait=True)
    progress["epoch"] = 2
    other = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(2, 2))
    before = {key: value.clone() for key, value in other.state_dict().items()}
    manager = mirrored.CheckpointManager(strategy, folder, {"progress": progress, "model": other})
    with pytest.raises(mirrored.CheckpointError) as caught:
        manager.restore(name_of(0))
    assert "nothing was changed: model: 2.weight is missing in the checkpoint" in str(caught.value)
    assert "0.weight has shape (5, 3) here, and (4, 3) in the checkpoint; 2 more" in str(caught.value)
    assert progress == {"epoch": 2}
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())
    third = mirrored.CheckpointManager(strategy, folder, {"net": first})
    with pytest.raises(mirrored.CheckpointError, match="it holds no 'net', only progress, model"):
        third.restore(name_of(0))


class Stubborn:
    """Takes no state."""

    def __init__(self) -> None:
        self.asked = 0

    def state_dict(self) -> dict[str, int]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if "asked" not in state or state["asked"] != self.asked:
            raise KeyError("not mine")


@pytest.mark.row(46)
def test_an_object_that_refuses_its_state_changes_nothing(folder: pathlib.Path) -> None:
    strategy = mirrored.OneDeviceStrategy()
    progress, stubborn, model = {"epoch": 1}, Stubborn(), nn.Linear(2, 2)
    objects = {"progress": progress, "stubborn": stubborn, "model": model}
    manager = mirrored.CheckpointManager(strategy, folder, objects)
    manager.save(wait=True)
    progress["epoch"], stubborn.asked = 2, 1
    nn.init.zeros_(model.weight)
    with pytest.raises(mirrored.CheckpointError, match="stubborn cannot load its state: KeyError: 'not mine'"):
        manager.restore(name_of(0))
    assert progress == {"epoch": 2}
    assert not model.weight.any()


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "a/b", "", ".", "..", ".x", "latest", "a\0b", "x" * 101, 3])
@pytest.mark.row(47)
def test_a_name_cannot_leave_the_folder(folder: pathlib.Path, name: Any) -> None:
    manager, _ = one_tower(folder)
    for call in (manager.save, manager.restore):
        with pytest.raises(ValueError, match="a checkpoint's name is"):
            call(name)
    assert sorted(p.name for p in folder.iterdir()) == [".lock"]


@pytest.mark.row(47)
def test_links_out_of_the_folder_are_not_followed(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    manager, _ = one_tower(folder)
    manager.save("elsewhere", wait=True)
    (folder / "elsewhere").rename(tmp_path / "elsewhere")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / name_of(7)).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(mirrored.CheckpointError, match="symbolic link"):
        manager.restore("linked")
    assert manager.restore_newest() is None
    for _ in range(9):  # in time the link is in the way, and goes; what it leads to stays
        manager.step()
    manager.wait()
    assert sorted(p.name for p in (tmp_path / "elsewhere").iterdir()) == ["manifest.json", "tensors.safetensors"]


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, (BOMBED,)


BOMBED = "/tmp/towers-test-bombed"


@pytest.mark.parametrize("file", ["manifest.json", "tensors.safetensors", "data.pkl"])
@pytest.mark.row(48)
def test_a_pickle_in_a_checkpoint_is_never_unpickled(folder: pathlib.Path, file: str) -> None:
    manager, _ = one_tower(folder)
    manager.save(wait=True)
    (folder / name_of(0) / file).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(mirrored.CheckpointError):
        manager.restore(name_of(0))
    assert not os.path.exists(BOMBED)


@pytest.mark.row(48)
def test_a_pickle_with_right_checksums_is_never_unpickled(folder: pathlib.Path) -> None:
    manager, _ = one_tower(folder)
    manager.save(wait=True)
    disk, place = Disk(), folder / name_of(0)
    manifest = manifests.load((place / "manifest.json").read_bytes())
    shutil.rmtree(place)
    Folder(folder, disk).write(name_of(0), manifest, [memoryview(pickle.dumps(Bomb()))], 2)
    with pytest.raises(
        mirrored.CheckpointError, match=r"tensors\.safetensors cannot be read: it is no safetensors file"
    ):
        manager.restore(name_of(0))
    assert not os.path.exists(BOMBED)


def test_a_function_cannot_be_saved(folder: pathlib.Path) -> None:
    manager = mirrored.CheckpointManager(mirrored.OneDeviceStrategy(), folder, {"progress": {"fn": [print]}})
    with pytest.raises(TypeError, match=r"progress/fn/0 is a builtin_function_or_method, which cannot be saved"):
        manager.save()
    with pytest.raises(TypeError, match="'other' is a int, which has no state_dict"):
        mirrored.CheckpointManager(mirrored.OneDeviceStrategy(), folder, {"other": 3})


def come_back(folder: pathlib.Path, saved: Any, empty: Any) -> None:
    """Save one object, and restore it into another."""
    strategy = mirrored.OneDeviceStrategy()
    mirrored.CheckpointManager(strategy, folder, {"it": saved}).save("it", wait=True)
    mirrored.CheckpointManager(strategy, folder, {"it": empty}).restore("it")


def test_names_that_look_alike_are_kept_apart(folder: pathlib.Path) -> None:
    keys: list[Any] = ["a/b", "a", 1, "1", "x@1", "x", "%2F", "\udc80", "#1", (1, "1")]
    state: dict[Any, Any] = {key: torch.full((2,), float(number)) for number, key in enumerate(keys)}
    state["a"] = {"b": torch.full((2,), 9.0), "b@0": 3}
    found: dict[Any, Any] = {}
    come_back(folder, state, found)
    assert repr(found) == repr(state)


def test_metrics_go_on_counting(folder: pathlib.Path) -> None:
    from torchmetrics import MeanMetric, MetricCollection
    from torchmetrics.classification import BinaryAUROC

    first, second = (MetricCollection({"mean": MeanMetric(), "area": BinaryAUROC()}) for _ in range(2))
    first["mean"].update(torch.tensor([1.0, 2.0]))
    first["area"].update(torch.tensor([0.2, 0.8, 0.4]), torch.tensor([0, 1, 1]))
    come_back(folder, first, second)
    second["mean"].update(torch.tensor([6.0]))
    assert float(second["mean"].compute()) == 3.0
    assert second["area"].compute() == first["area"].compute() == 1.0


class Versioned(nn.Module):
    """Reads what versions before 2 have saved in tenths."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if (metadata.get("version") or 0) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] * 10
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_modules_know_which_version_has_saved(folder: pathlib.Path) -> None:
    model = nn.Sequential(Versioned())
    come_back(folder, nn.Sequential(Versioned()), model)
    assert model[0].weight.tolist() == [1.0, 1.0]


def test_state_of_another_dtype_than_its_parameter_keeps_it(folder: pathlib.Path) -> None:
    optimizers = []
    for _ in range(2):
        parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizers.append(torch.optim.SGD([parameter], lr=0.1, momentum=0.9))
        optimizers[-1].state[parameter]["momentum_buffer"] = torch.full((3,), 1 / 3)
    come_back(folder, *optimizers)
    (state,) = optimizers[1].state.values()
    assert state["momentum_buffer"].tolist() == torch.full((3,), 1 / 3).tolist()


@pytest.mark.row(46)
def test_the_state_of_another_optimizer_changes_nothing(folder: pathlib.Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(mirrored.CheckpointError, match="it is a Adam here; that in the checkpoint has momentum"):
        come_back(folder, torch.optim.SGD(model.parameters()), torch.optim.Adam(model.parameters()))


@pytest.mark.parametrize("value", [collections.defaultdict(list), bytearray(b"x"), Stubborn()])
def test_what_would_come_back_as_something_else_is_refused(folder: pathlib.Path, value: Any) -> None:
    manager = mirrored.CheckpointManager(mirrored.OneDeviceStrategy(), folder, {"progress": {"value": value}})
    with pytest.raises(TypeError, match="progress/value is a"):
        manager.save()


def test_what_was_restored_does_not_lie_in_the_file(folder: pathlib.Path) -> None:
    progress = {"value": torch.arange(1000)}
    come_back(folder, progress, progress)
    path = folder / "it" / "tensors.safetensors"
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(progress["value"], torch.arange(1000))


def test_a_named_checkpoint_is_replaced_whole(folder: pathlib.Path) -> None:
    """Whatever call fails while "best" is written anew, there is an old or a new one."""
    progress: dict[str, Any] = {"value": 0}
    strategy = mirrored.OneDeviceStrategy()

    def manager(disk: Disk | None = None) -> mirrored.CheckpointManager:
        return mirrored.CheckpointManager(strategy, folder, {"progress": progress}, disk=disk)

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


# -- disks that fail -----------------------------------------------------------------------------------------


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
        child = os.fork()
        if child == 0:
            try:
                save_values(place, range(3, 4), FaultyDisk(at))
            finally:
                os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        found.append(saved_value(place))
        save_values(place, range(4, 5))
        assert saved_value(place) == 4
        assert names_in(place) == [".lock", "latest", name_of(found[-1]), name_of(4)]
    return found


def test_a_kill_at_any_call_keeps_what_was_there(tmp_path: pathlib.Path) -> None:
    calls = count_calls(tmp_path)
    (found,) = mirrored.launch(_kills, (str(tmp_path), calls), towers=1, timeout=60)
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


# -- several folders -----------------------------------------------------------------------------------------


def _of_its_own(strategy: mirrored.Strategy, folder: str, lose: int | None) -> Any:
    """Every tower has a disk of its own, as hosts may."""
    mine = pathlib.Path(folder) / f"host{strategy.topology.index}"
    progress: dict[str, Any] = {}
    manager = mirrored.CheckpointManager(strategy, mine, {"progress": progress}, every_steps=1)
    for _ in range(3):
        progress["step"], progress["tower"] = manager.steps, strategy.topology.index
        manager.step()
    manager.wait()
    if lose is not None and strategy.topology.index == 1:
        for step in range(lose, 4):
            shutil.rmtree(mine / name_of(step), ignore_errors=True)
    restored = manager.restore_newest()
    return restored.step if restored else None, dict(progress)


def test_hosts_with_disks_of_their_own_each_have_all(folder: pathlib.Path) -> None:
    assert towers(_of_its_own, str(folder), None) == [(3, {"step": 2, "tower": 0}), (3, {"step": 2, "tower": 1})]
    assert saved_names(folder / "host0") == saved_names(folder / "host1") == [name_of(2), name_of(3)]


def saved_names(folder: pathlib.Path) -> list[str]:
    return sorted(p.name for p in folder.glob("step-*"))


@pytest.mark.row(49)
def test_the_newest_step_that_all_have(folder: pathlib.Path) -> None:
    assert [step for step, _ in towers(_of_its_own, str(folder), 3)] == [2, 2]


@pytest.mark.row(49)
def test_no_step_that_all_have(folder: pathlib.Path) -> None:
    with pytest.raises(
        mirrored.TowerFailedError, match=r"no checkpoint in .* is there for all towers \(step 3 is for tower 0\)"
    ):
        towers(_of_its_own, str(folder), 1)


def test_one_run_writes_into_a_folder(folder: pathlib.Path) -> None:
    manager, _ = one_tower(folder)
    child = os.fork()
    if child == 0:
        try:
            one_tower(folder)
        except mirrored.CheckpointError as error:
            os._exit(3 if "another process writes" in str(error) else 4)
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    manager.save(wait=True)


# -- mistakes ------------------------------------------------------------------------------------------------


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


def _pipeline(strategy: mirrored.Strategy, folder: str, stop: int | None) -> list[Any]:
    """Batches of each tower's own shuffling loader."""

    def build(context: mirrored.InputContext) -> Any:
        examples = torch.arange(12) + 100 * context.input_pipeline_id
        return torch.utils.data.DataLoader(examples, batch_size=2, shuffle=True)

    data, seen = strategy.distribute_datasets_from_function(build), list[Any]()
    manager = mirrored.CheckpointManager(strategy, folder, {"data": data, "seen": seen}, every_steps=1)
    with contextlib.suppress(Interrupted), manager.resume():
        for _ in data.epochs(2):
            for batch in data:
                seen.append(batch.tolist())
                manager.step()
                if manager.steps == stop:
                    raise Interrupted
    return seen


def test_pipelines_that_shuffle_go_on_in_the_middle(tmp_path: pathlib.Path) -> None:
    whole = towers(_pipeline, str(tmp_path / "a"), None)
    towers(_pipeline, str(tmp_path / "b"), 8)
    assert towers(_pipeline, str(tmp_path / "b"), None) == whole
    assert sorted(example for batch in whole[1][:6] for example in batch) == list(range(100, 112))
    assert whole[1][:6] != whole[1][6:]


def _saves_by_time(strategy: mirrored.Strategy, folder: str) -> int:
    manager = mirrored.CheckpointManager(strategy, folder, {"progress": {}}, every_seconds=0.3, keep=100)
    for _ in range(13):
        time.sleep(0.1)
        manager.step()
    manager.wait()
    return len(list(pathlib.Path(folder).glob("step-*")))


def test_towers_save_once_each_time(folder: pathlib.Path) -> None:
    assert towers(_saves_by_time, str(folder))[0] in (2, 3, 4)


def _unlike(strategy: mirrored.Strategy, folder: str) -> Any:
    progress = {"x": torch.zeros(4) if strategy.is_chief else torch.zeros(2, dtype=torch.float64)}
    manager = mirrored.CheckpointManager(strategy, folder, {"progress": progress})
    manager.save("x", wait=True)
    manager.restore("x")
    return str(progress["x"])


def test_towers_get_their_own_back_also_where_the_bytes_are_equal(folder: pathlib.Path) -> None:
    assert towers(_unlike, str(folder)) == [str(torch.zeros(4)), str(torch.zeros(2, dtype=torch.float64))]


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
    before = os.umask(0o277)
    try:
        os.umask(0)
        manager, _ = one_tower(folder)
        manager.save(wait=True)
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in [folder, *folder.rglob("*")]}
    assert {mode for name, mode in modes.items() if "." in name or name == "latest"} == {0o600}, modes
    assert modes[name_of(0)] == modes["checkpoints"] == 0o700


# -- fine-tuning ---------------------------------------------------------------------------------------------


def test_some_layers_are_loaded_under_other_names(folder: pathlib.Path) -> None:
    pretrained = nn.ModuleDict({"encoder": make_model(), "head": nn.Linear(3, 10)})
    strategy = mirrored.OneDeviceStrategy()
    mirrored.CheckpointManager(strategy, folder, {"net": pretrained}).save("pretrained", wait=True)
    model = nn.ModuleDict({"backbone": make_model(), "head": nn.Linear(3, 4), "extra": nn.Linear(2, 2)})
    before = {key: value.clone() for key, value in model.state_dict().items()}
    rename = {"encoder.": "backbone."}
    with pytest.raises(
        mirrored.CheckpointError, match=r"head\.weight has shape \(4, 3\) here, and \(10, 3\) in the file"
    ):
        mirrored.load_weights(model, folder / "pretrained", name="net", rename=rename)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    report = mirrored.load_weights(
        model, folder / "pretrained", name="net", rename=rename, exclude="*.4.bias", skip_misfits=True
    )
    assert report.loaded["backbone.0.weight"] == "encoder.0.weight"
    assert report.kept == ("backbone.4.bias", "head.weight", "head.bias", "extra.weight", "extra.bias")
    assert report.unused == ("encoder.4.bias", "head.weight", "head.bias")
    for key, value in model.state_dict().items():
        expected = pretrained.state_dict()[report.loaded[key]] if key in report.loaded else before[key]
        assert torch.equal(value, expected), key
    assert "8 loaded, 5 kept as they were, 3 in the file unused" in str(report)


def test_weights_of_a_plain_file(tmp_path: pathlib.Path) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    save_file(other.state_dict(), tmp_path / "w.safetensors")
    assert len(mirrored.load_weights(model, tmp_path / "w.safetensors").loaded) == 2
    assert torch.equal(model.weight, other.weight)
    with pytest.raises(mirrored.CheckpointError, match="none of its 2 tensors has a name that the model has"):
        mirrored.load_weights(model, tmp_path / "w.safetensors", include="encoder.*")
    with pytest.raises(mirrored.CheckpointError, match="missing"):
        mirrored.load_weights(model, tmp_path / "nothing")


def test_inspect_prints_what_is_there(folder: pathlib.Path) -> None:
    manager, _ = one_tower(folder)
    manager.step()
    manager.wait()
    result = run_program(["-m", "mirrored", "checkpoint", "inspect", str(folder)])
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"{folder / name_of(1)}: step 1, saved 20")
    assert [line.split() for line in result.stdout.splitlines() if line.startswith("model/weight")] == [
        ["model/weight", "float32", "(2,", "3)", "24"]
    ]
    damage(folder / name_of(1) / "tensors.safetensors", "middle")
    result = run_program(["-m", "mirrored", "checkpoint", "inspect", str(folder / name_of(1))])
    assert result.returncode == 1
    assert result.stderr == (
        f"mirrored: {folder / name_of(1)}/tensors.safetensors has another checksum than when it was written: "
        "it is damaged\n"
    )


# -- what is read --------------------------------------------------------------------------------------------

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
keys = st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text())
states = st.recursive(
    scalars | st.sampled_from([torch.float16, torch.device("cuda:1"), torch.Size([2, 3])]),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner)
        | st.dictionaries(st.sampled_from(["tensor", "dict", "float", "tuple"]), inner)
        | st.builds(collections.OrderedDict, st.dictionaries(st.text(), inner))
        | st.builds(collections.deque, st.lists(inner))
        | st.sets(st.integers(), max_size=1)
    ),
    max_leaves=20,
)


@hypothesis.given(states)
@hypothesis.settings(max_examples=200, deadline=None)
def test_state_comes_back_as_it_was(state: Any) -> None:
    encoded = json.loads(json.dumps(Encoder().encode(state, "x"), allow_nan=False))
    found = decode(encoded, lambda _: torch.zeros(0))
    assert repr(found) == repr(state)


KINDS = "dict items kind tensor array scalar tuple set size deque maxlen float bytes complex dtype device"
odd = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["x", "float32"])
json_values = st.recursive(
    odd,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KINDS.split()), inner, max_size=3),
    max_leaves=10,
)


@hypothesis.given(json_values)
@hypothesis.settings(max_examples=500, deadline=None)
def test_what_is_no_state_is_refused_by_one_error(value: Any) -> None:
    try:
        decode(value, lambda name: torch.zeros(2, device="meta" if "x" in name else "cpu"))
    except Malformed as error:
        assert str(error)


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=300, deadline=None)
def test_a_manifest_with_anything_in_it_is_refused_by_one_error(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    manifest = manifests.load((hostile_folder(tmp_path_factory) / "manifest.json").read_bytes())
    field = data.draw(st.sampled_from([*manifest, "objects", "own", "tensors", "files"]))
    manifest[field] = data.draw(
        json_values | st.dictionaries(st.sampled_from(["model", "w", "tensors.safetensors"]), json_values)
    )
    place = hostile_folder(tmp_path_factory).parent / "changed"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(hostile_folder(tmp_path_factory), place)
    try:
        (place / "manifest.json").write_text(manifests.dump(manifest))
    except ValueError:  # NaN is no JSON
        return
    model = nn.Linear(2, 2)
    try:
        strategy = mirrored.OneDeviceStrategy()
        manager = mirrored.CheckpointManager(strategy, place.parent, {"model": model})
        manager.restore("changed")
    except mirrored.CheckpointError as error:
        assert "changed" in str(error)


_hostile: list[pathlib.Path] = []


def hostile_folder(factory: pytest.TempPathFactory) -> pathlib.Path:
    """A checkpoint, made once."""
    if not _hostile:
        folder = factory.mktemp("hostile")
        manager = mirrored.CheckpointManager(mirrored.OneDeviceStrategy(), folder, {"model": nn.Linear(2, 2)})
        manager.save(wait=True)
        _hostile.append(folder / name_of(0))
    return _hostile[0]


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"3", b"{}", b"[" * 100_000, b'{"format": 1}', b"\xff\xfe", b'{"step": ' + b"9" * 10_000 + b"}"],
    ids=["empty", "list", "number", "object", "deep", "format", "bytes", "digits"],
)
def test_what_is_no_manifest_is_refused(text: bytes) -> None:
    with pytest.raises(Malformed):
        manifests.load(text)


@pytest.mark.parametrize("length", [0, 7, 8, 2**40, 2**63])
def test_a_hostile_header_of_tensors_is_refused(tmp_path: pathlib.Path, length: int) -> None:
    path = tmp_path / "t"
    path.write_bytes(length.to_bytes(8, "little")[: 7 if length == 7 else 8] + b"{}")
    with pytest.raises(Malformed):
        TensorFile(str(path), {}).read("x")


def test_the_file_of_tensors_is_an_ordinary_one(tmp_path: pathlib.Path) -> None:
    tensors = {
        "b": torch.randn(3, 4).t(),
        "a": torch.arange(3, dtype=torch.int8),
        "c": torch.tensor(1.5),
        "e": torch.empty(0, 2),
    }
    layout = FileLayout(tensors)
    memory = torch.empty(layout.nbytes, dtype=torch.uint8)
    layout.copy_to(memory)
    for pieces in (layout.pieces(), layout.pieces_of(memory)):
        (tmp_path / "t").write_bytes(b"".join(pieces))
        found = load_file(tmp_path / "t")
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
        read = TensorFile(str(tmp_path / "t"), layout.unusual)
        assert read.read("b").stride() == tensors["b"].stride()
    assert np.frombuffer(bytes(memory[:4].numpy()), dtype=np.float32) is not None


def test_opening_reads_what_was_checked(folder: pathlib.Path) -> None:
    """Files that are exchanged while a checkpoint is open change nothing of what is read."""
    manager, model = one_tower(folder)
    manager.save(wait=True)
    opened = StoredCheckpoint(folder / name_of(0))
    shutil.rmtree(folder / name_of(0))
    assert torch.equal(opened.tensors.read("model/weight"), model.weight)
    opened.close()


@pytest.mark.parametrize("trains", [True, False])
def test_data_that_is_not_saved_is_said_where_there_is_an_optimizer(
    folder: pathlib.Path, trains: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mirrored")
    strategy = mirrored.OneDeviceStrategy("cpu")
    with strategy.scope():
        model = nn.Linear(2, 1)
    objects: dict[str, Any] = {"model": model}
    if trains:
        objects["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    mirrored.CheckpointManager(strategy, folder, objects).save()
    said = [message for message in caplog.messages if "no distributed dataset" in message]
    assert len(said) == trains
