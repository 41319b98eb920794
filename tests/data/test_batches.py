"""Rule R4: a batch is sliced, never padded, and step k takes the same examples whatever the tower count."""

from __future__ import annotations

import random
from collections import namedtuple
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import mirrored
from mirrored.shares import bounds
from tests.support.datasets import Augmented, Stream, batches
from tests.support.jobs import all_raise, towers


@given(examples=st.integers(0, 200), count=st.integers(1, 17))
def test_shares_are_cut_as_numpy_cuts(examples: int, count: int) -> None:
    batch = np.arange(examples)
    for index, expected in enumerate(np.array_split(batch, count)):
        start, end = bounds(examples, count, index)
        assert batch[start:end].tolist() == expected.tolist()


def nine_by_four(strategy: mirrored.Strategy, drop_last: bool) -> tuple[list[list[int]], int]:
    data = strategy.distribute_dataset(range(9), 4, drop_last=drop_last)
    return [batch.tolist() for batch in data], len(data)


def test_nine_examples_in_batches_of_four() -> None:
    assert towers(nine_by_four, False) == [([[0, 1], [4, 5], [8]], 3), ([[2, 3], [6, 7], []], 3)]
    assert towers(nine_by_four, True) == [([[0, 1], [4, 5]], 2), ([[2, 3], [6, 7]], 2)]


def test_data_without_examples_has_no_steps() -> None:
    """torch's own shuffling refuses it."""
    for shuffle in (False, True):
        data = mirrored.OneDeviceStrategy().distribute_dataset([], 4, shuffle=shuffle)
        assert (len(data), list(data)) == (0, [])


def three_epochs(strategy: mirrored.Strategy) -> list[list[list[int]]]:
    """All towers' shares joined: the global batches of three epochs."""
    data = strategy.distribute_dataset(range(23), 5, shuffle=True, seed=7)
    return [[strategy.gather(batch).tolist() for batch in data] for _ in range(3)]


def test_the_global_order_does_not_depend_on_the_tower_count() -> None:
    expected = three_epochs(mirrored.OneDeviceStrategy())
    for count in (2, 3):
        assert towers(three_epochs, count=count) == [expected] * count
    for epoch in expected:
        assert sorted(chain.from_iterable(epoch)) == list(range(23))
    assert expected[0] != expected[1] != expected[2]


def test_leaving_a_loop_early_begins_the_next_epoch() -> None:
    strategy = mirrored.OneDeviceStrategy()
    data = strategy.distribute_dataset(range(6), 2, shuffle=True)
    expected = [[batch.tolist() for batch in data] for _ in range(3)]
    data = strategy.distribute_dataset(range(6), 2, shuffle=True)
    next(iter(data))
    assert [batch.tolist() for batch in data] == expected[1]
    assert [batch.tolist() for batch in data] == expected[2]


def augmented(strategy: mirrored.Strategy, workers: int) -> tuple[list[list[list[float]]], list[float]]:
    torch.manual_seed(1)
    data = strategy.distribute_dataset(Augmented(), 4, shuffle=True, seed=5, num_workers=workers)
    epochs = [torch.cat([strategy.gather(batch) for batch in data]).tolist() for _ in range(2)]
    return epochs, [float(torch.rand(())), random.random()]


def test_augmentation_depends_on_seed_epoch_and_index_alone() -> None:
    expected, _ = augmented(mirrored.OneDeviceStrategy(), 0)
    assert towers(augmented, 0)[1][0] == expected
    assert towers(augmented, 2)[0][0] == expected
    assert towers(augmented, 1, count=3)[2][0] == expected
    first, second = ({row[0]: row[1:] for row in epoch} for epoch in expected)
    assert all(first[index] != second[index] for index in first), "each epoch augments anew"
    assert len({tuple(row[1:]) for row in expected[0]}) == 11, "each example differs"


def test_loading_leaves_the_models_random_streams_alone() -> None:
    torch.manual_seed(1)
    random.seed(1)
    expected = [float(torch.rand(())), random.random()]
    random.seed(1)
    assert augmented(mirrored.OneDeviceStrategy(), 0)[1] == expected


def stream_epochs(strategy: mirrored.Strategy, workers: int) -> tuple[list[list[list[float]]], list[int], float]:
    torch.manual_seed(strategy.topology.index)
    data = strategy.distribute_dataset(Stream(10), 4, num_workers=workers, seed=3)
    epochs, sizes = [], []
    for _ in range(2):
        shares = list(data)
        sizes += [len(share) for share in shares]
        epochs.append(torch.cat([strategy.gather(share) for share in shares]).tolist())
    return epochs, sizes, float(torch.rand(()))


def test_streams_are_cut_like_everything_else() -> None:
    expected, _, _ = stream_epochs(mirrored.OneDeviceStrategy(), 0)
    results = towers(stream_epochs, 0, count=3)
    assert [epochs for epochs, _, _ in results] == [expected] * 3
    assert [sizes[:3] for _, sizes, _ in results] == [[2, 2, 1], [1, 1, 1], [1, 1, 0]]
    assert sorted(row[0] for row in expected[0]) == list(range(10))
    assert expected[0] != expected[1]
    assert len({drawn for _, _, drawn in results}) == 3, "the towers' own streams go on undisturbed"
    with_workers = towers(stream_epochs, 1)
    assert with_workers[0][0] == with_workers[1][0]


def own_pipelines(strategy: mirrored.Strategy) -> list[tuple[list[float], float]]:
    """Towers with 3 and 1 batches: the losses add up to the global means of every step."""

    def build(context: mirrored.InputContext) -> list[Tensor]:
        assert context.num_input_pipelines == context.num_replicas_in_sync == 2
        assert context.get_per_replica_batch_size(8) == 4
        with pytest.raises(ValueError, match="7 is not divisible by the 2 towers"):
            context.get_per_replica_batch_size(7)
        if context.input_pipeline_id == 0:
            return [torch.tensor([1.0, 2.0]), torch.tensor([3.0]), torch.tensor([4.0])]
        return [torch.tensor([6.0])]

    data = strategy.distribute_datasets_from_function(build)
    with pytest.raises(TypeError, match="no common length"):
        len(data)
    found = []
    for batch in data:
        loss = strategy.run(mirrored.compute_average_loss, args=(batch,))
        found.append((batch.tolist(), float(strategy.reduce("sum", loss))))
    return found


def test_pipelines_of_the_users_own() -> None:
    assert towers(own_pipelines) == [[([1, 2], 3), ([3], 3), ([4], 4)], [([6], 3), ([], 3), ([], 4)]]


def nested_batches(strategy: mirrored.Strategy) -> list[dict[str, object]]:
    rows = [{"x": torch.tensor([float(i)]), "name": f"n{i}", "pair": (i, np.float32(i))} for i in range(3)]
    return list(strategy.distribute_dataset(rows, 3))


def test_empty_shares_keep_the_structure_of_a_batch() -> None:
    results = towers(nested_batches, count=4)
    [full], [empty] = results[0], results[3]
    assert full["name"] == ["n0"]
    assert empty["name"] == []
    assert empty["x"].shape == (0, 1)
    assert [part.dtype for part in empty["pair"]] == [part.dtype for part in full["pair"]]
    assert [len(part) for part in empty["pair"]] == [0, 0]


def look_twice(strategy: mirrored.Strategy, workers: int) -> list[object]:
    """A second iterator while the first runs: a look at a batch, and a whole inner loop."""
    data = strategy.distribute_dataset(range(10), 2, num_workers=workers)
    with_a_look = []
    for batch in data:
        if not with_a_look:
            next(iter(data))
        with_a_look.append(batch.tolist())
    nested = [(batch.tolist(), len(list(data))) for batch in data]
    return [with_a_look, nested, [batch.tolist() for batch in data]]


@pytest.mark.parametrize("workers", [0, 1])
def test_iterators_do_not_disturb_each_other(workers: int) -> None:
    everything = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    found = look_twice(mirrored.OneDeviceStrategy(), workers)
    assert found == [everything, [(batch, 5) for batch in everything], everything]


def average_after_loops_side_by_side(strategy: mirrored.Strategy) -> tuple[float, object]:
    """``zip`` ends the first iterator before the second one."""
    first, second = (strategy.distribute_dataset(torch.arange(2.0 * size), size) for size in (2, 4))
    for _ in zip(first, second, strict=False):
        pass
    loss = strategy.run(lambda: mirrored.compute_average_loss(torch.ones(2)))
    return float(loss), strategy.health.place.batch


def test_no_batch_is_in_hand_after_loops_side_by_side() -> None:
    assert towers(average_after_loops_side_by_side) == [(0.5, None)] * 2


def move_the_chief_alone(strategy: mirrored.Strategy, how: str) -> None:
    data = strategy.distribute_dataset(range(8), 4, shuffle=True)
    if strategy.is_chief:
        if how == "load":
            data.load_state_dict({"seed": 0, "epoch": 1, "step": 1})
        else:
            next(iter(data))
    if how == "look":
        strategy.reduce("sum", 1)
    list(data)


@pytest.mark.parametrize("how", ["load", "look"])
def test_towers_at_different_places_are_refused(how: str) -> None:
    words = "different data, settings or positions" if how == "load" else "the towers made different calls"
    all_raise(mirrored.DisagreementError, words, move_the_chief_alone, how)


Labelled = namedtuple("Labelled", "x y")


def test_tuples_and_dicts_of_tensors_stand_for_their_slices() -> None:
    x, y = torch.arange(10.0).view(5, 2), np.arange(5)
    one = mirrored.OneDeviceStrategy()
    [(a, b), (c, _)] = list(one.distribute_dataset((x, y), 3))
    assert torch.equal(a, x[:3])
    assert b.tolist() == [0, 1, 2]
    assert torch.equal(c, x[3:])
    [batch] = list(one.distribute_dataset({"x": x, "more": {"y": y}}, 5))
    assert torch.equal(batch["x"], x)
    assert batch["more"]["y"].tolist() == y.tolist()
    [named] = list(one.distribute_dataset(Labelled(x, y), 5))
    assert type(named) is Labelled
    [listed] = list(one.distribute_dataset([x[0], x[1]], 2))
    assert torch.equal(listed, x[:2]), "a list is one of examples"
    assert batches(one, (7, 8, 9), 2) == [[7, 8], [9]], "and so is a tuple without tensors"
    with pytest.raises(ValueError, match=r"need one length, but dataset\[0\] has 5, dataset\[1\] has 4 entries"):
        one.distribute_dataset((x, y[:4]), 3)
    for wrong in ((x, 3), (x, [1, 2, 3, 4, 5]), ((x[0], torch.tensor(1)), (x[1], torch.tensor(2)))):
        with pytest.raises(TypeError, match=r"stands for their slices, but dataset\[.*or a list of examples"):
            one.distribute_dataset(wrong, 3)
