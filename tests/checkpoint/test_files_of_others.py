"""Nothing in a folder that is not a checkpoint of the run is ever removed or replaced, whatever is called."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch import nn

import mirrored
from mirrored.checkpoint.manifest import name_of
from mirrored.evaluation import Evaluator, Exporter, checkpoints_iterator
from tests.support.checkpoints import manager_of, one_tower
from tests.support.jobs import all_raise, towers

FILES = (
    "plots/thesis.pdf",
    "hidden/.git",
    "best/notes.txt",
    "latest",
    f"{name_of(2)}/picture.png",
    "evaluation/held/mine.txt",
)


def put_files(folder: pathlib.Path) -> dict[pathlib.Path, str]:
    """Files of a user in the places of checkpoints: their paths and contents."""
    files = {folder / name: f"mine: {name}" for name in FILES}
    files[folder / "a file"] = files[folder / "report"] = "mine"
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "link").symlink_to(folder / "plots")
    return files


def assert_untouched(files: dict[pathlib.Path, str]) -> None:
    assert {path: path.read_text() for path in files} == files


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("name", ["plots", "hidden", "best", "report", "link"])
def test_a_name_that_is_taken_is_an_error(tmp_path: pathlib.Path, name: str, asynchronous: bool) -> None:
    files = put_files(tmp_path)
    manager, _ = one_tower(tmp_path, asynchronous=asynchronous)
    with pytest.raises(mirrored.CheckpointError, match=f"{name} is not a checkpoint: move it away"):
        manager.save(name)
        manager.wait()
    assert_untouched(files)
    manager.save("free", wait=True)


def test_training_over_the_files_of_others(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    files = put_files(tmp_path)
    manager, _ = one_tower(tmp_path, every_steps=2)
    manager.step()
    manager.step()
    with pytest.raises(mirrored.CheckpointError, match=f"{name_of(2)} is not a checkpoint"):
        manager.wait()
    for _ in range(6):
        manager.step()
    manager.wait()
    assert_untouched(files)
    assert {name_of(6), name_of(8)} <= {path.name for path in tmp_path.iterdir()}
    assert name_of(4) not in {path.name for path in tmp_path.iterdir()}, "the files of others are not counted"
    assert "latest was not written by a run" in caplog.text


def test_an_earlier_step_leaves_the_files_of_others(tmp_path: pathlib.Path) -> None:
    manager, _ = one_tower(tmp_path)
    for name in (name_of(7), f"replaced-{name_of(9)}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").touch()
    manager.steps = 9
    manager.save(wait=True)
    manager.steps = 1
    manager.save(wait=True)  # renames step 9, whose place is taken
    assert (tmp_path / name_of(7) / "mine").exists()
    assert (tmp_path / f"replaced-{name_of(9)}" / "mine").exists()
    assert (tmp_path / name_of(9) / "manifest.json").exists()


def test_a_damaged_checkpoint_is_replaced(tmp_path: pathlib.Path) -> None:
    manager, model = one_tower(tmp_path)
    manager.step()
    manager.wait()
    (tmp_path / name_of(1) / "manifest.json").unlink()
    manager.save(wait=True)
    assert mirrored.load_weights(model, tmp_path / name_of(1)).loaded


def _two_managers(folder: pathlib.Path) -> tuple[mirrored.CheckpointManager, mirrored.CheckpointManager]:
    return manager_of(folder, {"one": {"it": 1}}), manager_of(folder, {"two": {"it": 2}})


@pytest.mark.parametrize("wait", [True, False])
def test_managers_that_save_in_turns_are_an_error(tmp_path: pathlib.Path, wait: bool) -> None:
    one, two = _two_managers(tmp_path)
    one.save("a", wait=wait)
    two.save("b", wait=wait)
    with pytest.raises(mirrored.CheckpointError, match="another CheckpointManager of this script saves into the same"):
        one.save("c", wait=True)
    two.save("d", wait=True)
    assert not (tmp_path / "c").exists()


def test_a_manager_does_not_save_in_the_training_of_another(tmp_path: pathlib.Path) -> None:
    one, two = _two_managers(tmp_path)
    with one.resume():
        one.step()
        with pytest.raises(mirrored.CheckpointError, match="give all objects to one manager"):
            two.save("b", wait=True)
    two.save("b", wait=True)


def _on_towers(strategy: mirrored.Strategy, folder: str) -> None:
    mirrored.CheckpointManager(strategy, folder, {"model": nn.Linear(1, 1)}).save("plots", wait=True)


def test_all_towers_learn_that_a_name_is_taken(tmp_path: pathlib.Path) -> None:
    files = put_files(tmp_path)
    all_raise(mirrored.CheckpointError, "plots is not a checkpoint", _on_towers, str(tmp_path))
    assert_untouched(files)


def _evaluator(folder: pathlib.Path) -> Evaluator:
    exporters = [Exporter("good", "loss")]
    strategy = mirrored.OneDeviceStrategy()
    return Evaluator(
        strategy, folder, {"model": nn.Linear(3, 2)}, lambda: {"loss": 1.0}, exporters=exporters, timeout_seconds=1
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("good/notes.txt", "'good' cannot keep a checkpoint: .*good is not a checkpoint"),
        ("evaluation/metrics.jsonl", "metrics.jsonl is not the table of an evaluation"),
        ("evaluation/held/mine.txt", "held is for a new folder"),
    ],
)
def test_an_evaluation_leaves_the_files_of_others(tmp_path: pathlib.Path, name: str, words: str) -> None:
    place = tmp_path / name
    place.parent.mkdir(parents=True)
    place.write_text("mine")
    manager, _ = one_tower(tmp_path)
    with manager.resume():
        manager.step()
    with pytest.raises(mirrored.CheckpointError, match=words):
        _evaluator(tmp_path).run()
    assert place.read_text() == "mine"


def test_a_run_and_its_evaluator_leave_each_others_checkpoints(tmp_path: pathlib.Path) -> None:
    manager, _ = one_tower(tmp_path)
    with manager.resume():
        manager.step()
        manager.save("good", wait=True)
    saved = (tmp_path / "good" / "manifest.json").read_text()
    with pytest.raises(mirrored.CheckpointError, match="good was not kept by this evaluator .evaluation.: move it"):
        _evaluator(tmp_path).run()
    assert (tmp_path / "good" / "manifest.json").read_text() == saved
    (tmp_path / "good").rename(tmp_path / "mine")
    _evaluator(tmp_path).run()
    assert (tmp_path / "good" / ".evaluation").exists()
    with pytest.raises(mirrored.CheckpointError, match="good was kept by an evaluator .evaluation.: move it away"):
        manager.save("good", wait=True)
    manager.restore("good")
    manager.restore("mine")


def test_a_folder_for_held_checkpoints_is_not_emptied(tmp_path: pathlib.Path) -> None:
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "mine.txt").touch()
    with pytest.raises(mirrored.CheckpointError, match="held is for a new folder"):
        next(checkpoints_iterator(tmp_path, tmp_path / "held"))
    assert (tmp_path / "held" / "mine.txt").exists()


class Counts(nn.Module):
    """Has variables as attributes, which ``state_dict()`` leaves out."""

    def __init__(self, strategy: mirrored.Strategy) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.seen = strategy.variable(0, "on_read", "sum")
        vars(self.inner)["mean"] = strategy.variable(0.0)


def _variables(strategy: mirrored.Strategy, folder: str, saves: bool) -> list[float]:
    model = Counts(strategy)
    manager = mirrored.CheckpointManager(strategy, folder, {"model": model})
    if saves:
        strategy.run(lambda: model.seen.assign_add(strategy.topology.index + 1))
        model.inner.mean.assign(0.5)
        manager.save("it", wait=True)
    else:
        manager.restore("it")
    return [float(model.seen), float(model.inner.mean)]


def test_the_variables_of_a_model_are_saved_with_it(tmp_path: pathlib.Path) -> None:
    assert towers(_variables, str(tmp_path), True) == [[3.0, 0.5]] * 2
    for count in (1, 2, 3):
        assert towers(_variables, str(tmp_path), False, count=count) == [[3.0, 0.5]] * count


def test_variables_that_do_not_fit_are_named(tmp_path: pathlib.Path) -> None:
    strategy = mirrored.OneDeviceStrategy()
    model = nn.Linear(1, 1)
    vars(model)["old"] = strategy.variable(torch.zeros(2))
    mirrored.CheckpointManager(strategy, tmp_path, {"model": model}).save("it", wait=True)
    other = nn.Linear(1, 1)
    vars(other)["new"] = strategy.variable(torch.zeros(2))
    with pytest.raises(mirrored.CheckpointError, match="new is missing in the checkpoint; old is in the checkpoint"):
        mirrored.CheckpointManager(strategy, tmp_path, {"model": other}).restore("it")
