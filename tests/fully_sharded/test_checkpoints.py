"""Checkpoints of models that are sharded over the towers."""

from __future__ import annotations

import errno
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import swa_utils

import mirrored
from mirrored.checkpoint import save_weights
from mirrored.checkpoint.manifest import NAME, TENSORS, dump, load
from tests.fully_sharded.test_training import BATCH, EXAMPLES, MODELS, data_for, whole
from tests.support.checkpoints import damage
from tests.support.faulty_disk import FaultyDisk
from tests.support.jobs import launch, seeded, text_of

EPOCHS = 3
STEPS = -(-EXAMPLES // BATCH) * EPOCHS


def train(folder: str, name: str, shards: bool, stop: int = STEPS, asynchronous: bool = True) -> dict[str, Any]:
    """Trains to a step. The losses and examples are those of the steps of this run only."""
    torch.set_default_dtype(torch.float64)
    strategy = mirrored.MirroredStrategy(seed=0)
    make, units = MODELS[name]
    with strategy.scope(sync_batch_norm=name == "cnn"):
        model = seeded(make)
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    if shards:
        for each in (model, average.module):
            strategy.shard(each, units)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    numbered = (*data_for(name), torch.arange(EXAMPLES))
    data = strategy.distribute_dataset(numbered, BATCH, shuffle=True)
    losses: list[Tensor] = []
    seen: list[list[int]] = []
    objects = {"model": model, "average": average, "optimizer": optimizer, "schedule": schedule, "data": data}
    checkpoints = mirrored.CheckpointManager(strategy, folder, objects, every_steps=3, asynchronous=asynchronous)

    def step(x: Tensor, y: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        loss = mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"))
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        return loss.detach(), number

    with checkpoints.resume() as restored:
        first = checkpoints.steps
        while checkpoints.steps < stop:
            for batch in data:
                loss, number = strategy.run(step, args=batch)
                losses.append(strategy.reduce("sum", loss))
                seen.append(sorted(strategy.gather(number).tolist()))
                schedule.step()
                checkpoints.step()
                if checkpoints.steps == stop:
                    break
    return {
        "first": first,
        "restored": restored,
        "losses": losses,
        "seen": seen,
        "parameters": [whole(p) for p in model.parameters()],
        "average": [whole(p) for p in average.parameters()],
    }


def compare(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["tied", "cnn"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_run_goes_on_with_other_towers_and_strategies(tmp_path: pathlib.Path, name: str, asynchronous: bool) -> None:
    (whole_run,) = launch(train, str(tmp_path / "whole"), name, False, count=1)
    folder, step = str(tmp_path / "parts"), 0
    for shards, count, stop in ((True, 4, 3), (True, 2, 7), (False, 3, 9), (True, 4, 12), (False, 1, STEPS)):
        result, *_ = launch(train, folder, name, shards, stop, asynchronous, count=count)
        assert result["first"] == step
        compare(result["losses"], whole_run["losses"][step:stop])
        assert result["seen"] == whole_run["seen"][step:stop]
        step = stop
    compare(result["parameters"], whole_run["parameters"])
    compare(result["average"], whole_run["average"])


def a_model(strategy: mirrored.Strategy, shards: bool = True) -> nn.Module:
    """A model with a buffer, whose parameters and optimizer have state."""
    with strategy.scope():
        model = seeded(lambda: nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Linear(9, 5)))
    return strategy.shard(model, [nn.Linear]) if shards else model


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(value) for name, value in model.state_dict().items()}


def _save(folder: str, asynchronous: bool) -> dict[str, Tensor]:
    """Saves "best" and changes the model while it is being written. Returns the saved values."""
    strategy = mirrored.MirroredStrategy(seed=0)
    model = a_model(strategy)
    manager = mirrored.CheckpointManager(strategy, folder, {"model": model}, asynchronous=asynchronous)
    values = values_of(model)
    manager.save("best")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    manager.wait()
    return values


def parts_in(checkpoint: pathlib.Path) -> list[dict[str, Tensor]]:
    return [safetensors.torch.load_file(path) for path in sorted(checkpoint.glob("shards-*.safetensors"))]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_each_tower_writes_its_parts(tmp_path: pathlib.Path, asynchronous: bool) -> None:
    values, *_ = launch(_save, str(tmp_path), asynchronous, count=3)
    parts = parts_in(tmp_path / "best")
    assert [part["model/2.weight"].shape for part in parts] == [(2, 9), (2, 9), (1, 9)]
    for name, value in values.items():
        if "running" not in name and "tracked" not in name:
            torch.testing.assert_close(torch.cat([part[f"model/{name}"] for part in parts]), value, rtol=0, atol=0)
    whole_ones = safetensors.torch.load_file(tmp_path / "best" / "tensors.safetensors")
    assert "model/1.running_mean" in whole_ones
    assert not any(name in whole_ones for name in parts[0])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_the_files(tmp_path: pathlib.Path) -> None:
    values, *_ = launch(_save, str(tmp_path), True, count=3)
    read = {"model/0.weight": torch.empty(9, 7), "model/1.running_var": torch.empty(9)}
    dcp.load(read, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "best")), no_dist=True)
    for name in ("0.weight", "1.running_var"):
        torch.testing.assert_close(read[f"model/{name}"], values[name], rtol=0, atol=0)


def _loaded(source: str, shards: bool, rename: bool = False) -> tuple[dict[str, Tensor], mirrored.LoadReport]:
    strategy = mirrored.MirroredStrategy(seed=4)
    model = a_model(strategy, shards)
    if rename:
        report = mirrored.load_weights(model[0], source, rename={"0.": ""}, include=["weight", "bias"])
    else:
        report = mirrored.load_weights(model, source)
    return values_of(model), report


def _export(source: str, target: str) -> None:
    strategy = mirrored.MirroredStrategy(seed=4)
    model = a_model(strategy)
    mirrored.load_weights(model, source)
    save_weights(model, target)


def test_weights_are_loaded_into_any_layout_and_exported(tmp_path: pathlib.Path) -> None:
    values, *_ = launch(_save, str(tmp_path), True, count=3)
    exported = tmp_path / "weights.safetensors"
    launch(_export, str(tmp_path / "best"), str(exported), count=2)
    assert values.keys() == safetensors.torch.load_file(exported).keys()
    for source, shards, count in (
        ("best", True, 4),
        ("best", False, 1),
        (exported.name, True, 2),
        (exported.name, False, 2),
    ):
        for found, report in launch(_loaded, str(tmp_path / source), shards, count=count):
            assert report.loaded.keys() == values.keys()
            for name, value in values.items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=0)
    for found, report in launch(_loaded, str(tmp_path / "best"), True, True, count=2):
        assert report.loaded == {"weight": "0.weight", "bias": "0.bias"}
        torch.testing.assert_close(found["0.weight"], values["0.weight"], rtol=0, atol=0)


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def _write_on_full_disks(folder: str, victim: int, asynchronous: bool) -> list[str]:
    """Saves again and again, with an error at the first, second, … call of the victim's disk. Returns the errors."""
    strategy = mirrored.MirroredStrategy(seed=0)
    model = a_model(strategy)
    disk, is_victim = FaultyDisk(), strategy.topology.index == victim
    manager = mirrored.CheckpointManager(strategy, folder, {"model": model}, asynchronous=asynchronous, disk=disk)
    fill(model, 0.0)
    manager.save("best", wait=True)
    errors: list[str] = []
    saved, at, reached = 0.0, 0, True
    while reached:
        at += 1
        fill(model, at)
        disk.fail(at if is_victim else 0, errno.ENOSPC)
        try:
            manager.save("best")
            manager.wait()
            saved = at
        except mirrored.CheckpointError as error:
            errors.append(str(error))
        reached = bool(strategy.reduce("sum", float(is_victim and disk.calls >= at)))
        disk.fail(0, None)
        assert not [*pathlib.Path(folder).glob(".saving*")]
        manager.restore("best")
        (found,) = {float(value) for tensor in map(whole, model.parameters()) for value in tensor.flatten()}
        assert found in (saved, at)  # the new one, if the disk fails after the rename
        saved = found
    assert saved == at
    return errors


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_full_disk_of_a_tower_is_an_error_on_all(tmp_path: pathlib.Path, victim: int, asynchronous: bool) -> None:
    first, *others = launch(_write_on_full_disks, str(tmp_path), victim, asynchronous, count=3)
    assert first
    for error in first:
        assert f"tower {victim}: checkpoint {tmp_path}/best could not be written (No space left on device)" in error
    assert others == [first, first]


def _save_under_a_taken_name(folder: str) -> str:
    strategy = mirrored.MirroredStrategy(seed=0)
    manager = mirrored.CheckpointManager(strategy, folder, {"model": a_model(strategy)})
    manager.save("best")
    with pytest.raises(mirrored.CheckpointError) as raised:
        manager.wait()
    manager.save("other", wait=True)
    return str(raised.value)


def test_a_name_that_the_user_has_taken(tmp_path: pathlib.Path) -> None:
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "notes.txt").touch()
    for error in launch(_save_under_a_taken_name, str(tmp_path), count=2):
        assert "tower 0" in error
        assert "best is not a checkpoint" in error


def _restore(folder: str) -> tuple[str | None, dict[str, Tensor]]:
    strategy = mirrored.MirroredStrategy(seed=9)
    model = a_model(strategy)
    manager = mirrored.CheckpointManager(strategy, folder, {"model": model})
    try:
        manager.restore("best")
    except mirrored.CheckpointError as error:
        return str(error), values_of(model)
    return None, values_of(model)


@pytest.mark.parametrize("how", ["1 byte", "halves", "middle", "longer", "missing", "folder", "link"])
def test_damaged_parts_are_found(tmp_path: pathlib.Path, how: str) -> None:
    launch(_save, str(tmp_path), True, count=3)
    damage(tmp_path / "best" / "shards-00001.safetensors", how)
    for error, _ in launch(_restore, str(tmp_path), count=2):
        assert error is not None
        assert "shards-00001.safetensors" in error


def forge(checkpoint: pathlib.Path, change: Callable[[Any], None], without: str | None = None) -> None:
    """Changes a manifest, and gives it the checksum that belongs to it."""
    manifest = load((checkpoint / NAME).read_bytes())
    change(manifest)
    if without is not None:
        del manifest["files"][without]
    for path in checkpoint.glob("shards-*"):
        if path.name not in manifest["files"]:
            path.unlink()
    (checkpoint / NAME).write_bytes(dump(manifest))


def _reshape(manifest: Any) -> None:
    manifest["objects"]["model"]["dict"]["2.weight"]["shape"] = [6, 9]


def _rename(manifest: Any) -> None:
    manifest["objects"]["model"]["dict"]["2.weight"]["sharded"] = "model/nothing"


def _leave_no_parts(manifest: Any) -> None:
    manifest["files"] = {TENSORS: manifest["files"][TENSORS]}


def _make_huge(manifest: Any) -> None:
    manifest["objects"]["model"]["dict"]["2.weight"]["shape"] = [2**60, 2**60]


@pytest.mark.parametrize(
    ("change", "without", "problem"),
    [
        (lambda manifest: None, "shards-00001.safetensors", "parts of 'model/0.weight' are missing"),
        (_leave_no_parts, None, "model cannot be read: the parts of sharded tensors cannot be read"),
        (_reshape, None, "2.weight has shape (5, 9) here, and (6, 9) in the checkpoint"),
        (_rename, None, "no parts of 'model/nothing' have the shape (5, 9)"),
        (_make_huge, None, "cannot be read"),
    ],
)  # fmt: skip
def test_forged_checkpoints_are_refused(
    tmp_path: pathlib.Path, change: Callable[[Any], None], without: str | None, problem: str
) -> None:
    launch(_save, str(tmp_path), True, count=3)
    forge(tmp_path / "best", change, without)
    results = launch(_restore, str(tmp_path), count=2)
    untouched, _ = launch(_untouched, count=2)
    for error, values in results:
        assert error is not None
        assert problem in error
        for name, value in values.items():
            torch.testing.assert_close(value, untouched[name], rtol=0, atol=0)


def _untouched() -> dict[str, Tensor]:
    return values_of(a_model(mirrored.MirroredStrategy(seed=9)))


def _save_complex(folder: str) -> str:
    strategy = mirrored.MirroredStrategy(seed=0)
    with strategy.scope():
        model = nn.Linear(4, 4, dtype=torch.complex64)
    strategy.shard(model)
    return text_of(TypeError, mirrored.CheckpointManager(strategy, folder, {"model": model}).save)


def test_a_dtype_that_torch_cannot_read_is_refused(tmp_path: pathlib.Path) -> None:
    for text in launch(_save_complex, str(tmp_path)):
        assert "model/weight is a sharded tensor of complex64, which cannot be saved" in text
