"""Rule R4: a batch is sliced, never padded, and step k takes the same examples whatever the tower count."""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
import random
from collections import namedtuple
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

import mirrored
from mirrored.data import transfer
from mirrored.data.distribute import distribute
from mirrored.data.shares import Cut, Distribution, KnownShares, Share, bounds
from tests.support.jobs import failures, towers
from towers.collectives.communicator import Alone


@given(examples=st.integers(0, 200), count=st.integers(1, 17))
def test_shares_are_cut_as_numpy_cuts(examples: int, count: int) -> None:
    batch = np.arange(examples)
    for index, expected in enumerate(np.array_split(batch, count)):
        start, end = bounds(examples, count, index)
        assert batch[start:end].tolist() == expected.tolist()


def batches(strategy: mirrored.Strategy, *args: object, **options: object) -> list[list[int]]:
    return [batch.tolist() for batch in strategy.distribute_dataset(*args, **options)]


def nine_by_four(strategy: mirrored.Strategy, drop_last: bool) -> tuple[list[list[int]], int]:
    data = strategy.distribute_dataset(range(9), 4, drop_last=drop_last)
    return [batch.tolist() for batch in data], len(data)


def test_nine_examples_in_batches_of_four() -> None:
    assert towers(nine_by_four, False) == [([[0, 1], [4, 5], [8]], 3), ([[2, 3], [6, 7], []], 3)]
    assert towers(nine_by_four, True) == [([[0, 1], [4, 5]], 2), ([[2, 3], [6, 7]], 2)]


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


class Augmented(Dataset[Tensor]):
    """Every example draws from all three generators."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, random.random(), np.random.rand(), float(torch.rand(()))], dtype=torch.float64)


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


def from_loaders(strategy: mirrored.Strategy, kind: str) -> list[object]:
    dataset = TensorDataset(torch.arange(10))
    loader = {
        "plain": lambda: DataLoader(dataset, 4),
        "shuffled": lambda: DataLoader(dataset, 4, shuffle=True),
        "workers": lambda: DataLoader(dataset, 4, num_workers=1, prefetch_factor=3, persistent_workers=True),
        "collate": lambda: DataLoader(dataset, 4, collate_fn=lambda rows: torch.stack([row[0] for row in rows]) + 100),
        "weighted": lambda: DataLoader(dataset, 4, sampler=WeightedRandomSampler([1.0] * 10, 8)),
        "batch sampler": lambda: DataLoader(
            dataset, batch_sampler=BatchSampler(SequentialSampler(dataset), 3, drop_last=True)
        ),
        "random batch sampler": lambda: DataLoader(
            dataset, batch_sampler=BatchSampler(RandomSampler(dataset), 3, drop_last=False)
        ),
        "no batches": lambda: DataLoader(torch.arange(12).view(3, 4), batch_size=None),
    }[kind]()
    data = strategy.distribute_dataset(loader)
    epochs = []
    for _ in range(2):
        gathered = [strategy.gather(batch[0] if isinstance(batch, list) else batch).tolist() for batch in data]
        epochs.append(gathered)
    return [len(data), *epochs]


@pytest.mark.parametrize(
    "kind",
    ["plain", "shuffled", "workers", "collate", "weighted", "batch sampler", "random batch sampler", "no batches"],
)
def test_data_loaders(kind: str) -> None:
    length, first, second = expected = from_loaders(mirrored.OneDeviceStrategy(), kind)
    assert towers(from_loaders, kind) == [expected] * 2
    assert towers(from_loaders, kind, count=3) == [expected] * 3
    assert length == len(first) == len(second)
    ordered = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    if kind in ("plain", "workers"):
        assert first == second == ordered
    elif kind == "collate":
        assert first == [[100 + i for i in batch] for batch in ordered]
    elif kind == "batch sampler":
        assert first == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    elif kind == "no batches":
        assert first == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    else:
        assert first != second
        if kind != "weighted":
            assert sorted(chain.from_iterable(first)) == list(range(10))


def test_a_loaders_settings_are_kept() -> None:
    def first_worker(_: int) -> None:
        pass

    given_loader = DataLoader(
        range(8),
        2,
        num_workers=2,
        prefetch_factor=5,
        persistent_workers=True,
        timeout=17,
        worker_init_fn=first_worker,
        multiprocessing_context="fork",
    )
    loader = mirrored.OneDeviceStrategy().distribute_dataset(given_loader)._loader
    for name in ("num_workers", "prefetch_factor", "persistent_workers", "timeout", "worker_init_fn", "pin_memory"):
        assert getattr(loader, name) == getattr(given_loader, name)
    assert loader.multiprocessing_context.get_start_method() == "fork"


def test_data_that_lies_on_a_gpu_is_not_pinned() -> None:
    """A loader of the main process would pin whatever the dataset gives."""
    comm = Alone(torch.device("cuda", 0))
    for dataset in (range(8), Stream(8)):
        for workers in (0, 2):
            data: Any = distribute(
                Distribution(comm, Cut(1, 0, 1), KnownShares()),
                dataset,
                4,
                shuffle=False,
                drop_last=False,
                seed=0,
                default_seed=0,
                collate_fn=None,
                num_workers=workers,
                stand_in=False,
                batch_dims=None,
            )
            assert data._loader.pin_memory == (workers > 0)


def test_batches_are_copied_ahead_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is enqueued, with a device and streams that are none."""
    done: list[object] = []

    class Side:
        def __init__(self, device: torch.device) -> None:
            done.append("a stream")

        def record_event(self) -> int:
            done.append("copied")
            return done.count("copied")

    class Model:
        def wait_event(self, event: int) -> None:
            done.append(event)

    monkeypatch.setattr(torch.cuda, "Stream", Side)
    monkeypatch.setattr(torch.cuda, "stream", lambda side: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Model())
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: done.append(tuple(self.shape)))
    monkeypatch.setattr(transfer, "pinned", lambda tensor: done.append("pinned") or tensor)
    device = torch.device("meta")
    sparse = torch.eye(3).to_sparse()
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    batches = [torch.ones(1), {"packed": packed}, (sparse, torch.ones(3, device=device), "word")]
    for _ in range(2):
        found = list(transfer.to_device(iter([(batch, Share(1, 1)) for batch in batches]), device))
    first, second, third = (batch for batch, _ in found)
    assert first.device == second["packed"].data.device == third[0].device == third[1].device == device
    assert second["packed"].batch_sizes.device == torch.device("cpu")
    assert third[0].layout == torch.sparse_coo
    assert done[:9] == ["a stream", "pinned", "copied", "copied", 1, (1,), "copied", 2, (3,)]
    assert done[9:11] == [3, (3,)]
    assert done.count("a stream") == 1


class Stream(IterableDataset[Tensor]):
    """A shuffled stream of augmented examples; reshuffles by torch's own generator."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Tensor]:
        for i in torch.randperm(self.length).tolist():
            yield torch.tensor([float(i), float(torch.rand(()))])


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


def resume_stream(strategy: mirrored.Strategy) -> bool:
    data = strategy.distribute_dataset(Stream(10), 4, seed=3)
    whole = [batch.tolist() for batch in data]
    data.load_state_dict({"seed": 3, "epoch": 0, "step": 2})
    return [batch.tolist() for batch in data] == whole[2:]


def test_streams_resume() -> None:
    assert towers(resume_stream) == [True, True]


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


def evaluate_with_metrics(strategy: mirrored.Strategy) -> tuple[float, float]:
    from torchmetrics.classification import MulticlassAccuracy

    truth, guess = torch.arange(13) % 3, torch.arange(13) % 2
    metric = MulticlassAccuracy(3, average="micro")
    correct = 0
    for own_truth, own_guess in strategy.distribute_dataset(TensorDataset(truth, guess), 5):
        if len(own_truth):
            metric.update(own_guess, own_truth)
        correct += int(strategy.reduce("sum", (own_truth == own_guess).sum()))
    return float(metric.compute()), correct / 13


def test_evaluation_counts_every_example_once() -> None:
    expected = float((torch.arange(13) % 3 == torch.arange(13) % 2).float().mean())
    for metric, own in towers(evaluate_with_metrics):
        assert metric == pytest.approx(expected)
        assert own == pytest.approx(expected)


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
    for error in failures(move_the_chief_alone, how):
        wanted = "different data, settings or places" if how == "load" else "the towers called different things"
        with pytest.raises(mirrored.DisagreementError, match=wanted):
            raise error


class Shuffled(IterableDataset[int]):
    """A stream that draws its order from the global generator, as a shuffle buffer does."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(3):
            yield from torch.randperm(3).tolist()


def with_noise(examples: list[int]) -> Tensor:
    """Collates to (number, noise); how much noise is drawn depends on the share."""
    return torch.stack([torch.tensor(examples, dtype=torch.float64), torch.rand(len(examples), dtype=torch.float64)], 1)


def collate_with_noise(strategy: mirrored.Strategy, kind: str, workers: int) -> list[list[float]]:
    data = Shuffled() if kind == "stream" else list(range(9))
    distributed = strategy.distribute_dataset(data, 3, collate_fn=with_noise, num_workers=workers)
    torch.manual_seed(5)
    joined = [strategy.gather(batch) for batch in distributed]
    return [*torch.cat(joined).T.tolist(), torch.rand(1).tolist()]


@pytest.mark.parametrize("kind", ["stream", "indexed"])
@pytest.mark.parametrize("workers", [0, 1])
def test_what_collating_draws_is_kept_apart(kind: str, workers: int) -> None:
    """From the stream's own numbers, from the model's, and from the other towers'."""
    for numbers, noise, after in towers(collate_with_noise, kind, workers):
        assert sorted(numbers[:3]) == sorted(numbers[3:6]) == sorted(numbers[6:]) == [0, 1, 2] or kind == "indexed"
        assert sorted(numbers) == sorted([0, 1, 2] * 3 if kind == "stream" else range(9))
        assert len(set(noise)) == 9
        assert after == torch.rand(1, generator=torch.Generator().manual_seed(5)).tolist()


class CountsUp(Dataset[int]):
    """Changes between epochs, as a curriculum does."""

    def __init__(self) -> None:
        self.offset = 0

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return index + self.offset


def test_loader_workers_see_changes_of_the_dataset() -> None:
    dataset = CountsUp()
    data = mirrored.OneDeviceStrategy().distribute_dataset(dataset, 2, num_workers=1)
    found = []
    for dataset.offset in (0, 10):
        found += [batch.tolist() for batch in data]
    assert found == [[0, 1], [10, 11]]


class Backwards(RandomSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.data_source))[::-1])  # type: ignore[arg-type]


def test_a_loaders_own_sampler_is_kept() -> None:
    one = mirrored.OneDeviceStrategy()
    assert batches(one, DataLoader(range(4), 2, sampler=Backwards(range(4)))) == [[3, 2], [1, 0]]  # type: ignore[arg-type]
    assert batches(one, DataLoader(range(10), 2, sampler=SequentialSampler(range(3)))) == [[0, 1], [2]]  # type: ignore[arg-type]
    never_ending = DataLoader(torch.arange(8).view(4, 2), batch_size=None, sampler=itertools.cycle([1, 0]))  # type: ignore[arg-type]
    found = itertools.islice(one.distribute_dataset(never_ending), 3)
    assert [batch.tolist() for batch in found] == [[2, 3], [0, 1], [2, 3]]
    endless = DataLoader(range(4), 2, sampler=(i for i in (2, 0, 1)))  # type: ignore[arg-type, var-annotated]
    assert batches(one, endless) == [[2, 0], [1]]


def test_a_state_that_does_not_fit_is_refused() -> None:
    data = mirrored.OneDeviceStrategy().distribute_dataset(range(6), 2, seed=np.int64(3))
    json.dumps(data.state_dict())
    data.load_state_dict(data.state_dict())
    with pytest.raises(ValueError, match="step is 99, but an epoch of this data has 3 steps"):
        data.load_state_dict({"seed": 0, "epoch": 0, "step": 99})


def own_generator(strategy: mirrored.Strategy, kind: str) -> None:
    """Orders that each tower draws from numbers of its own."""
    own = np.random.default_rng(strategy.topology.index)
    drawn = own.permutation(9).tolist()
    data = {
        "sampler": lambda: strategy.distribute_dataset(DataLoader(range(9), 4, sampler=Listed(drawn))),
        "batches": lambda: strategy.distribute_dataset(DataLoader(range(9), batch_sampler=[drawn[:3], drawn[3:]])),
        "subset": lambda: strategy.distribute_dataset(Subset(Subset(range(9), drawn), range(8)), 4, shuffle=True),
        "joined": lambda: strategy.distribute_dataset(ConcatDataset([Subset(range(9), drawn[:5])]), 4),
        "no batches": lambda: strategy.distribute_dataset(
            DataLoader(torch.arange(18).view(9, 2), batch_size=None, sampler=Listed(drawn))
        ),
    }[kind]()
    list(data)


class Listed(Sampler[int]):
    def __init__(self, indices: list[int]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


@pytest.mark.parametrize("kind", ["sampler", "batches", "subset", "joined", "no batches"])
def test_towers_that_draw_other_orders_are_refused(kind: str) -> None:
    for error in failures(own_generator, kind):
        with pytest.raises(mirrored.DisagreementError, match="different orders of the examples.*on tower 1"):
            raise error


class Once(Listed):
    """Counts how often it is drawn from."""

    draws = 0

    def __iter__(self) -> Iterator[int]:
        self.draws += 1
        return iter(self.indices)


def draws(strategy: mirrored.Strategy) -> int:
    sampler = Once([2, 0, 1])
    data = strategy.distribute_dataset(DataLoader(range(3), 2, sampler=sampler))
    list(data)
    data.state_dict()
    return sampler.draws


def test_an_order_is_drawn_once() -> None:
    assert [draws(mirrored.OneDeviceStrategy()), *towers(draws)] == [1, 1, 1]


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
    for error in failures(resume_with, str(tmp_path), 5):
        with pytest.raises(mirrored.CheckpointError, match="nothing was changed.*global_batch_size was 6 and is 5"):
            raise error
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


def seeded(strategy: mirrored.Strategy, kind: str, seed: int) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    if kind == "loader":
        return batches(strategy, DataLoader(range(8), 8, shuffle=True, generator=g))
    if kind == "stream":
        loader = DataLoader(Stream(8), 8, generator=g)
        return [[int(row[0]) for row in batch] for batch in strategy.distribute_dataset(loader)]
    return batches(strategy, DataLoader(range(8), 8, sampler=WeightedRandomSampler([1.0] * 8, 8, generator=g)))


@pytest.mark.parametrize("kind", ["loader", "stream", "sampler"])
def test_a_loaders_generator_seeds_its_order(kind: str) -> None:
    one = mirrored.OneDeviceStrategy()
    assert seeded(one, kind, 1) == seeded(one, kind, 1) != seeded(one, kind, 2)
    g = torch.Generator().manual_seed(1)
    weighted = DataLoader(range(8), 8, sampler=WeightedRandomSampler([1.0] * 8, 8, generator=g))
    assert batches(one, weighted) == batches(one, weighted), "it keeps its seed"
    g = torch.Generator().manual_seed(1)
    loader = DataLoader(range(8), 8, shuffle=True, generator=g)
    assert batches(one, loader, seed=2) == batches(one, range(8), 8, shuffle=True, seed=2), "seed= comes first"


def draw(strategy: mirrored.Strategy) -> list[list[float]]:
    """Numbers from all generators before the first run and in it."""

    def some() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    return [some(), strategy.run(some)]


def test_without_a_seed_towers_make_the_same_data_and_then_part() -> None:
    (before, inside), (other_before, other_inside) = towers_without_seed(draw)
    assert before == other_before
    assert all(a != b for a, b in zip(inside, other_inside, strict=True))
    assert towers_without_seed(draw)[0][0] != before


def towers_without_seed(fn: Callable[[mirrored.Strategy], object]) -> list[Any]:
    return mirrored.launch(_without_seed, (fn,), devices=["cpu:0", "cpu:1"], timeout=60)


def _without_seed(fn: Callable[[mirrored.Strategy], object]) -> object:
    return fn(mirrored.MirroredStrategy())
