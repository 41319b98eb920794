"""A run that was interrupted resumes from its checkpoint, with the same bits."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import shutil
from typing import Any

import pytest
import torch
from torch import nn

import mirrored
from mirrored.checkpoint.manifest import name_of
from tests.faults.training import Interrupted, steps_of, train
from tests.support.checkpoints import one_tower
from tests.support.jobs import launch, towers
from towers.system.timeouts import clock

STEPS = steps_of()


def parts(folder: pathlib.Path, *stops: int, **settings: Any) -> list[Any]:
    """Run on two towers to each of the stops, then to the end, always anew."""
    for stop in stops:
        launch(_train, str(folder), {"stop": stop, **settings})
    return launch(_train, str(folder), settings)


def _train(folder: str, settings: dict[str, Any], virtual_towers: int | None = None) -> Any:
    strategy = mirrored.MirroredStrategy(virtual_towers=virtual_towers, seed=0)
    with contextlib.suppress(Interrupted):
        return train(strategy, folder, **settings)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_an_interrupted_run_ends_in_the_same_bits(tmp_path: pathlib.Path, asynchronous: bool) -> None:
    whole = parts(tmp_path / "a", asynchronous=asynchronous)
    resumed = parts(tmp_path / "b", 4, 10, asynchronous=asynchronous)
    for tower in range(2):
        assert resumed[tower]["restored"].step == 8
        for key in ("digest", "losses", "seen", "steps"):
            assert resumed[tower][key] == whole[tower][key], key
    assert whole[0]["digest"] != whole[1]["digest"]  # BatchNorm's statistics are each tower's own


def test_virtual_towers_go_on_with_any_number_of_towers(tmp_path: pathlib.Path) -> None:
    whole = launch(_train, str(tmp_path / "a"), {}, 4)
    for count, stop in ((4, 5), (1, 8)):
        launch(_train, str(tmp_path / "b"), {"stop": stop}, 4, count=count)
    resumed = launch(_train, str(tmp_path / "b"), {}, 4)
    assert resumed[0]["restored"].towers == 1
    for key in ("digest", "losses", "seen"):
        assert resumed[0][key] == resumed[1][key] == whole[0][key], key


def test_another_number_of_towers_takes_what_the_first_had(folder: pathlib.Path) -> None:
    parts(folder, 4)
    shutil.rmtree(folder / name_of(STEPS))
    (result,) = launch(_train, str(folder), {}, count=1)
    restored = result["restored"]
    assert (restored.step, restored.towers) == (12, 2)
    assert {"model", "mirrored.streams"} <= set(restored.of_first_tower)
    assert "optimizer" not in restored.of_first_tower


def test_a_run_that_is_done_is_done(folder: pathlib.Path) -> None:
    first = parts(folder)
    written = {entry.name: entry.stat().st_mtime_ns for entry in folder.glob("step-*")}
    again = parts(folder)
    assert again[0]["seen"] == first[0]["seen"]
    assert {entry.name: entry.stat().st_mtime_ns for entry in folder.glob("step-*")} == written


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


def own_disk(folder: str, host: int) -> pathlib.Path:
    """Goes to a folder where the path "run" is this host's own, as the same path is on hosts with their own disks."""
    disk = pathlib.Path(folder) / f"host{host}"
    disk.mkdir(parents=True, exist_ok=True)
    os.chdir(disk)
    return disk / "run"


def _of_its_own(strategy: mirrored.Strategy, folder: str, lose: int | None) -> Any:
    """Every tower has a disk of its own, as hosts may."""
    mine = own_disk(folder, strategy.topology.index)
    progress: dict[str, Any] = {}
    manager = mirrored.CheckpointManager(strategy, "run", {"progress": progress}, every_steps=1)
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
    assert saved_names(folder / "host0/run") == saved_names(folder / "host1/run") == [name_of(2), name_of(3)]


def _what_one_tower_has(strategy: mirrored.Strategy, folder: str, save: bool) -> dict[str, Any]:
    index = strategy.topology.index
    progress: dict[str, Any] = {"own": torch.full((2,), float(index))} if save else {}
    if save and index == 0:
        progress["first"] = torch.arange(3.0)
    own_disk(folder, index)
    manager = mirrored.CheckpointManager(strategy, "run", {"progress": progress})
    if save:
        manager.save(wait=True)
    else:
        manager.restore_newest()
    return progress


def test_every_disk_has_what_tower_0_alone_has(folder: pathlib.Path) -> None:
    """Tower 0 has a tensor that no other has: a job goes on with it from the second host's disk, too."""
    towers(_what_one_tower_has, str(folder), True, count=2)
    for count in (1, 2):
        for index, progress in enumerate(towers(_what_one_tower_has, str(folder), False, count=count)):
            assert progress["own"].tolist() == [index] * 2
            assert ("first" in progress) == (index == 0)
    shutil.copytree(folder / "host1", folder / "host2", ignore=shutil.ignore_patterns(".lock"))
    *_, third = towers(_what_one_tower_has, str(folder), False, count=3)
    assert third["first"].tolist() == [0.0, 1.0, 2.0]


def saved_names(folder: pathlib.Path) -> list[str]:
    return sorted(p.name for p in folder.glob("step-*"))


@pytest.mark.row(49)
def test_the_newest_step_that_all_have(folder: pathlib.Path) -> None:
    assert [step for step, _ in towers(_of_its_own, str(folder), 3)] == [2, 2]


@pytest.mark.row(49)
def test_no_step_that_all_have(folder: pathlib.Path) -> None:
    with pytest.raises(
        mirrored.TowerFailedError, match=r"no checkpoint in .* exists for all towers \(step 3 exists for tower 0\)"
    ):
        towers(_of_its_own, str(folder), 1)


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


def _saves_by_time(strategy: mirrored.Strategy, folder: str) -> list[str]:
    """A step takes a second on tower 0, and ten on tower 1."""
    ticks = itertools.count(0, 1 if strategy.is_chief else 10)
    clock.monotonic = lambda: now  # type: ignore[method-assign]
    now = next(ticks)
    settings: dict[str, Any] = {"every_steps": None, "every_seconds": 3, "keep": 100}
    manager = mirrored.CheckpointManager(strategy, folder, {"progress": {}}, **settings)
    for now in itertools.islice(ticks, 13):  # noqa: B007 the clock shows it
        manager.step()
    manager.wait()
    return saved_names(pathlib.Path(folder))


@pytest.mark.parametrize(("count", "steps"), [(1, (3, 6, 9, 12)), (2, (4, 8, 12))])
def test_tower_0_decides_when_time_has_come(folder: pathlib.Path, count: int, steps: tuple[int, ...]) -> None:
    """Several towers learn of it a step later."""
    assert towers(_saves_by_time, str(folder), count=count) == [list(map(name_of, steps))] * count


def _unlike(strategy: mirrored.Strategy, folder: str) -> Any:
    progress = {"x": torch.zeros(4) if strategy.is_chief else torch.zeros(2, dtype=torch.float64)}
    manager = mirrored.CheckpointManager(strategy, folder, {"progress": progress})
    manager.save("x", wait=True)
    manager.restore("x")
    return str(progress["x"])


def test_towers_get_their_own_back_also_where_the_bytes_are_equal(folder: pathlib.Path) -> None:
    assert towers(_unlike, str(folder)) == [str(torch.zeros(4)), str(torch.zeros(2, dtype=torch.float64))]


@pytest.mark.parametrize("uses_epochs", [True, False])
def test_a_loop_over_range_gets_a_hint(uses_epochs: bool, tmp_path: pathlib.Path, caplog: Any) -> None:
    strategy = mirrored.OneDeviceStrategy()

    def run(steps: int) -> int:
        data = strategy.distribute_dataset(torch.arange(4.0), 2)
        manager = mirrored.CheckpointManager(strategy, tmp_path, {"data": data}, every_steps=1)
        with manager.resume():
            for _ in data.epochs(3) if uses_epochs else range(3):
                for _ in data:
                    manager.step()
                    if manager.steps == steps:
                        return steps
        return manager.steps

    run(3)
    assert "train.epochs(N)" not in caplog.text
    assert run(100) == (6 if uses_epochs else 8)
    assert ("the data resume in epoch 1, at step 1. A loop over range(N)" in caplog.text) is not uses_epochs


def _accumulate(strategy: mirrored.Strategy, folder: str, stop: int | None) -> tuple[list[int], list[torch.Tensor]]:
    """The loop of docs/how-to/training-step.md, with 10 batches in an epoch: the steps' batches, and the weights."""
    with strategy.scope():
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = strategy.distribute_dataset(torch.randn(29, 3), 3, shuffle=True)
    groups: list[int] = []
    objects = {"model": model, "optimizer": optimizer, "train": train, "groups": groups}
    manager = mirrored.CheckpointManager(strategy, folder, objects, every_steps=1)

    def train_step(x: torch.Tensor, batches: int, update: bool) -> None:
        loss = mirrored.compute_average_loss(model(x).square()[:, 0]) / batches
        with contextlib.nullcontext() if update else strategy.no_sync():
            loss.backward()
        if update:
            optimizer.step()
            optimizer.zero_grad()

    with manager.resume():
        for _ in train.epochs(2):
            for x in train:
                done = train.state_dict()["step"]
                batches = min(4, len(train) - (done - 1) // 4 * 4)
                update = done % 4 == 0 or done == len(train)
                strategy.run(train_step, args=(x, batches, update))
                if update:
                    groups.append(batches)
                    manager.step()
                if manager.steps == stop:
                    manager.wait()
                    return groups, []
    return groups, [parameter.detach() for parameter in model.parameters()]


def test_accumulated_steps_go_on_in_the_middle_of_an_epoch(tmp_path: pathlib.Path) -> None:
    whole = towers(_accumulate, str(tmp_path / "a"), None)
    assert whole[0][0] == [4, 4, 2, 4, 4, 2]
    for stop in (2, 4):
        towers(_accumulate, str(tmp_path / "b"), stop)
    torch.testing.assert_close(towers(_accumulate, str(tmp_path / "b"), None), whole, rtol=0, atol=0)
