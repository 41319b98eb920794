"""Data goes on where its state was taken: in mid-epoch, on another number of towers, with other data."""

from __future__ import annotations

import json
import pathlib
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import mirrored
from tests.support.datasets import Augmented, Listed, Stream
from tests.support.jobs import all_raise, towers


def resume(strategy: mirrored.Strategy, state: dict[str, int] | None) -> tuple[list[list[float]], dict[str, int]]:
    """From the start: stop after batch 2 of epoch 1. From a state: go on to the end of epoch 1, and one more."""
    data = strategy.distribute_dataset(Augmented(), 4, shuffle=True, seed=5)
    seen: list[list[float]] = []
    if state is None:
        for _ in data:
            pass
        for number, batch in enumerate(data):
            if number == 1:
                return seen, data.state_dict()
            del batch
    data.load_state_dict(state)
    for _ in range(2):
        seen += torch.cat([strategy.gather(batch) for batch in data]).tolist()
    return seen, data.state_dict()


def test_resuming_in_mid_epoch_on_another_tower_count() -> None:
    _, state = towers(resume, None)[0]
    assert {name: state[name] for name in ("seed", "epoch", "step")} == {"seed": 5, "epoch": 1, "step": 2}
    strategy = mirrored.OneDeviceStrategy()
    data = strategy.distribute_dataset(Augmented(), 4, shuffle=True, seed=5)
    epochs = [[batch.tolist() for batch in data] for _ in range(3)]
    expected = list(chain(*epochs[1][2:], *epochs[2]))
    for count in (1, 2, 3):
        seen, end = towers(resume, state, count=count)[count - 1]
        assert seen == expected
        assert (end["seed"], end["epoch"], end["step"]) == (5, 3, 0)


class Counting(Dataset[int]):
    """Counts what it loads."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


def test_resuming_loads_nothing_twice() -> None:
    dataset = Counting()
    data = mirrored.OneDeviceStrategy().distribute_dataset(dataset, 10)
    data.load_state_dict({"seed": 0, "epoch": 0, "step": 98})
    assert [batch.tolist() for batch in data] == [list(range(980, 990)), list(range(990, 1000))]
    assert dataset.loaded == list(range(980, 1000))


def resume_stream(strategy: mirrored.Strategy) -> bool:
    data = strategy.distribute_dataset(Stream(10), 4, seed=3)
    whole = [batch.tolist() for batch in data]
    data.load_state_dict({"seed": 3, "epoch": 0, "step": 2})
    return [batch.tolist() for batch in data] == whole[2:]


def test_streams_resume() -> None:
    assert towers(resume_stream) == [True, True]


def test_a_state_that_does_not_fit_is_refused() -> None:
    data = mirrored.OneDeviceStrategy().distribute_dataset(range(6), 2, seed=np.int64(3))
    json.dumps(data.state_dict())
    data.load_state_dict(data.state_dict())
    with pytest.raises(ValueError, match="step is 99, but an epoch of this data has 3 steps"):
        data.load_state_dict({"seed": 0, "epoch": 0, "step": 99})


def half_of_an_epoch(size: int, **options: Any) -> tuple[list[list[int]], dict[str, Any]]:
    data = mirrored.OneDeviceStrategy().distribute_dataset(range(24), size, shuffle=True, **options)
    batches = []
    for batch in data:
        batches.append(batch.tolist())
        if len(batches) == 2:
            return batches, data.state_dict()
    raise AssertionError


def go_on(state: dict[str, Any], *args: Any, **options: Any) -> list[int]:
    data = mirrored.OneDeviceStrategy().distribute_dataset(*args, **options)
    data.load_state_dict(json.loads(json.dumps(state)))
    assert data.state_dict()["step"] == 0 or data.state_dict()["data"]["examples"] == 24
    return [int(i) for batch in data for i in batch]


def test_no_example_is_repeated_or_left_out_where_data_changes_in_mid_epoch() -> None:
    seen, state = half_of_an_epoch(6)
    done = list(chain.from_iterable(seen))
    for size in (6, 3, 12, 4):
        rest = go_on(state, range(24), size, shuffle=True, drop_last=size == 4)
        assert sorted(done + rest) == list(range(24)), size
    for arguments, options, words in (
        ((range(24), 5), {"shuffle": True}, "global_batch_size was 6 and is 5 .* step 2 .* divides the 12 examples"),
        ((range(30), 6), {"shuffle": True}, "examples was 24 and is 30 since .* repeat examples or leave some out"),
        ((range(24), 6), {}, "shuffle was True and is False"),
        ((DataLoader(range(24), 6, sampler=Listed([0])),), {}, "shuffle was True .*, sampler was None and is 'Listed'"),
    ):
        with pytest.raises(ValueError, match=words):
            go_on(state, *arguments, **options)


@pytest.mark.extended
def test_other_data_may_begin_with_an_epoch() -> None:
    _, state = half_of_an_epoch(6)
    assert len(go_on({**state, "step": 0}, range(30), 7)) == 30
    # The last step of an epoch was made: nothing of it is left, of whatever data.
    data = mirrored.OneDeviceStrategy().distribute_dataset(range(30), 7)
    data.load_state_dict({**state, "step": 4})
    assert [len(list(data)), len(list(data))] == [0, 5]
    assert sorted(go_on({"seed": 0, "epoch": 0, "step": 2}, range(24), 6)) == list(range(12, 24)), "an old state"


def resume_with(strategy: mirrored.Strategy, folder: str, size: int) -> list[int]:
    train = strategy.distribute_dataset(range(24), size, shuffle=True)
    checkpoints = mirrored.CheckpointManager(strategy, folder, {"train": train}, every_steps=1)
    seen: list[int] = []
    with checkpoints.resume():
        for _ in train.epochs(1):
            for batch in train:
                seen += strategy.gather(batch).tolist()
                if size == 6 and len(seen) > 12:
                    return seen[:12]
                checkpoints.step()
    return seen


def test_checkpoints_go_on_by_examples_or_refuse(tmp_path: pathlib.Path) -> None:
    [done, _] = towers(resume_with, str(tmp_path), 6)
    words = "nothing was changed.*global_batch_size was 6 and is 5"
    all_raise(mirrored.CheckpointError, words, resume_with, str(tmp_path), 5)
    [rest, _] = towers(resume_with, str(tmp_path), 4)
    assert sorted(done + rest) == list(range(24))


def test_a_state_in_mid_epoch_knows_its_order() -> None:
    def loader(indices: list[int]) -> DataLoader[int]:
        return DataLoader(range(6), 2, sampler=Listed(indices))

    data = mirrored.OneDeviceStrategy().distribute_dataset(loader([5, 4, 3, 2, 1, 0]))
    next(iter(data))
    state = data.state_dict()
    data.load_state_dict(state)
    assert data.state_dict() == state, "before the loop, too"
    assert [batch.tolist() for batch in data] == [[3, 2], [1, 0]]
    other = mirrored.OneDeviceStrategy().distribute_dataset(loader([0, 1, 2, 3, 4, 5]))
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="epoch 0 has another order of examples than when .* saved in step 1"):
        list(other)


def resume_pipelines(strategy: mirrored.Strategy, state: dict[str, Any] | None) -> dict[str, Any]:
    data = strategy.distribute_datasets_from_function(lambda _: [torch.ones(2)] * 3)
    if state is not None:
        data.load_state_dict(state)
    next(iter(data))
    return data.state_dict()


def test_pipelines_of_another_number_of_towers_are_refused() -> None:
    state = towers(resume_pipelines, None)[0]
    assert towers(resume_pipelines, state)[1]["step"] == 2
    with pytest.raises(ValueError, match="pipelines was 2 and is 1"):
        resume_pipelines(mirrored.OneDeviceStrategy(), state)
