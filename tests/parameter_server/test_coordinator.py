"""What the coordinator promises, by the scenarios of TensorFlow's tests (tests/parameter_server/tensorflow.md)."""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mirrored
from tests.support.processes import await_ends
from tests.support.waiting import wait_until

ray = pytest.importorskip("ray")

from mirrored.parameter_server.worker import current_worker_index  # noqa: E402
from tests.parameter_server.training import Training, examples  # noqa: E402


@pytest.fixture(scope="module")
def training() -> Training:
    return Training()


def fail() -> None:
    raise KeyError("no such word")


def test_data_that_end_are_an_error_that_names_the_worker(training: Training) -> None:
    data = iter(training.coordinator.create_per_worker_dataset(lambda: [1, 2, 3]))
    with pytest.raises(RuntimeError, match=r"the data of worker \d ended after 3 batches"):
        for _ in range(20):
            training.coordinator.schedule(next, args=(data,)).fetch()
    with contextlib.suppress(RuntimeError, CancelledError):
        training.coordinator.join()


@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration, GeneratorExit])
def test_an_exception_with_a_meaning_for_loops_is_another_one_here(training: Training, kind: type[Exception]) -> None:
    def stop() -> None:
        raise kind

    with pytest.raises(RuntimeError, match=rf"a scheduled function on worker \d raised {kind.__name__}"):
        training.coordinator.schedule(stop).fetch()
    with pytest.raises(RuntimeError):
        training.coordinator.join()


SURFACES: dict[str, Callable[[Training], Any]] = {
    "join": lambda training: training.coordinator.join(),
    "schedule": lambda training: [training.coordinator.schedule(int) for _ in iter(int, 1)],
    "done": lambda training: [training.coordinator.done() for _ in iter(int, 1)],
    "fetch": lambda training: training.coordinator.fetch([training.coordinator.schedule(int) for _ in range(100)]),
}
"""The calls that an error comes out of; those that may come before it are repeated."""


@pytest.mark.parametrize("call", SURFACES)
def test_an_error_comes_out_once(training: Training, call: str) -> None:
    failed = training.coordinator.schedule(fail)
    with pytest.raises((KeyError, CancelledError)):
        SURFACES[call](training)
    with pytest.raises(KeyError):
        failed.fetch()
    if call == "fetch":  # it may have been told of by the values
        with pytest.raises(KeyError):
            training.coordinator.join()
    training.coordinator.join()
    assert training.coordinator.schedule(int).fetch() == 0


def test_several_errors_are_one(training: Training) -> None:
    failed = [training.coordinator.schedule(fail) for _ in range(3)]
    with pytest.raises(KeyError):
        training.coordinator.join()
    for value in failed:
        with pytest.raises((KeyError, CancelledError)):
            value.fetch()
    training.coordinator.join()


def test_an_error_waits_for_what_runs(training: Training, tmp_path: pathlib.Path) -> None:
    def run_until() -> str:
        (tmp_path / "runs").touch()
        wait_until((tmp_path / "end").exists)
        return "ran"

    running = training.coordinator.schedule(run_until)
    wait_until((tmp_path / "runs").exists)
    failed = training.coordinator.schedule(fail)
    with pytest.raises(KeyError):
        failed.fetch()
    joined = threading.Event()

    def join() -> None:
        with pytest.raises(KeyError):
            training.coordinator.join()
        joined.set()

    thread = threading.Thread(target=join)
    thread.start()
    assert not joined.is_set()
    (tmp_path / "end").touch()
    thread.join()
    assert joined.is_set()
    assert running.fetch() == "ran"


def test_one_coordinator(training: Training) -> None:
    with pytest.raises(RuntimeError, match="has a ClusterCoordinator already"):
        mirrored.ClusterCoordinator(training.strategy)


def test_join_may_be_repeated(training: Training) -> None:
    for _ in range(3):
        training.coordinator.join()
    assert training.coordinator.done()
    training.train(3)
    training.coordinator.join()
    assert training.coordinator.done()


def test_what_a_function_returns_keeps_its_structure(training: Training) -> None:
    x = torch.tensor(1)
    value = training.coordinator.schedule(lambda: (x + 1, (x + 2, x + 3), [x + 4], {"v": x}))
    expected = 2, (3, 4), [5], {"v": 1}
    assert value.fetch() == value.get() == expected
    assert training.coordinator.fetch({"a": [value, 7], "b": value}) == {"a": [expected, 7], "b": expected}


def on_each_worker(training: Training, tmp_path: pathlib.Path, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """What a function returns on two workers, in their order."""

    def call(number: int, *args: Any) -> tuple[int | None, Any]:
        (tmp_path / str(number)).touch()
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)  # both are at it
        return current_worker_index(), fn(*args)

    values = [training.coordinator.schedule(call, args=(number, *args)) for number in range(2)]
    results = sorted(training.coordinator.fetch(values))
    assert [index for index, _ in results] == [0, 1]
    return [result for _, result in results]


def test_data_know_their_worker(training: Training, tmp_path: pathlib.Path) -> None:
    data = iter(training.coordinator.create_per_worker_dataset(lambda: range(current_worker_index() or 0, 10, 2)))
    assert on_each_worker(training, tmp_path, sum, data) == [20, 25]


def test_data_are_shuffled_differently(training: Training, tmp_path: pathlib.Path) -> None:
    data = iter(training.coordinator.create_per_worker_dataset(lambda: torch.randperm(1000).tolist()))
    first, second = on_each_worker(training, tmp_path, list, data)
    assert first != second
    assert sorted(first) == sorted(second)


def first_of(*iterators: Iterator[Any]) -> list[Any]:
    return [next(iterator) for iterator in iterators]


def test_data_may_be_given_as_they_are() -> None:
    training = Training(workers=1)
    data = training.coordinator.create_per_worker_dataset([10, 11, 12])
    assert training.coordinator.schedule(first_of, args=(iter(data),)).fetch() == [10]
    assert training.coordinator.schedule(len, args=(data,)).fetch() == 3


def test_several_data_and_iterators() -> None:
    training = Training(workers=1)
    made = training.coordinator.create_per_worker_dataset

    def numbers() -> Iterator[int]:
        yield from range(5)

    first, second = made(numbers), made(lambda: range(5, 10))
    one, two = iter(first), iter(second)
    assert training.coordinator.schedule(first_of, args=(one, two)).fetch() == [0, 5]
    assert training.coordinator.schedule(first_of, args=(iter(first), two)).fetch() == [0, 6]
    assert training.coordinator.schedule(first_of, args=(one, iter(second))).fetch() == [1, 5]


def test_data_that_cannot_be_made(training: Training) -> None:
    unused = iter(training.coordinator.create_per_worker_dataset(fail))
    assert len(training.train(2)) == 2
    value = training.coordinator.schedule(first_of, args=(unused,))
    with pytest.raises(KeyError):
        training.coordinator.join()
    with pytest.raises(KeyError):
        value.fetch()
    assert len(training.train(2)) == 2  # what was made before is still there


def test_run_and_data_of_the_strategy_on_workers(training: Training) -> None:
    strategy, model = training.strategy, training.model

    def data() -> Any:
        return strategy.distribute_dataset(torch.arange(1.0, 11), global_batch_size=4, shuffle=False)

    def step(batches: Iterator[Tensor]) -> tuple[Tensor, Tensor]:
        batch = next(batches)
        return batch, strategy.reduce("sum", strategy.run(lambda: batch.sum() + 0 * model.dense[1].bias.sum()))

    batches = iter(training.coordinator.create_per_worker_dataset(data))
    batch, total = training.coordinator.schedule(step, args=(batches,)).fetch()
    assert batch.tolist() == [1, 2, 3, 4]
    assert total == 10


def test_rows_that_are_looked_up(training: Training) -> None:
    model = training.model
    rows = torch.tensor([[0, 24], [25, 49]])
    expected = model.state_dict()["table.weight"][rows].mean(1)
    torch.testing.assert_close(training.coordinator.schedule(lambda: model.table(rows)).fetch(), expected)
    looked_up = training.coordinator.schedule(lambda: model.table(rows.int())).fetch()
    torch.testing.assert_close(looked_up, expected)


def test_buffers_that_workers_add_to() -> None:
    training = Training()
    with training.strategy.scope():
        counts = nn.Module()
        counts.register_buffer("total", torch.zeros(2, dtype=torch.int64))

    def add(number: int) -> None:
        counts.total += torch.tensor([1, number])

    for number in range(20):
        training.coordinator.schedule(add, args=(number,))
    training.coordinator.join()
    assert counts.state_dict()["total"].tolist() == [20, 190]


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_a_schedule_of_the_learning_rate(first: bool) -> None:
    training = Training(workers=1)

    def make() -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(training.adam, 1, gamma=0.5)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if first:
            scheduler = make()
        training.train(1)
        if not first:
            scheduler = make()
        scheduler.step()
        adam = training.adam
        rates = training.coordinator.schedule(lambda: [group["lr"] for group in adam.param_groups]).fetch()
        scheduler.step()
    assert rates == [0.01]
    assert [str(warning.message) for warning in warned if "lr_scheduler" in str(warning.message)] == []


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mirrored-worker")]


def test_what_is_dropped_ends() -> None:
    gc.collect()
    before = len(threads())
    training = Training()
    training.train(3)
    assert len(threads()) == before + 2
    actors = [*training.strategy._workers, *training.strategy._servers.actors]
    pids = ray.get([actor.__ray_call__.remote(lambda actor: os.getpid()) for actor in actors])
    value = training.coordinator.schedule(int)
    strategy, coordinator = weakref.ref(training.strategy), weakref.ref(training.coordinator)
    assert value.fetch() == 0
    training.coordinator.join()
    del training, actors
    gc.collect()
    wait_until(lambda: gc.collect() >= 0 and len(threads()) <= before)
    assert coordinator() is strategy() is None
    await_ends(*pids)
    assert len(Training(workers=1).train(2)) == 2


def test_what_a_dropped_coordinator_has_not_begun_is_cancelled(tmp_path: pathlib.Path) -> None:
    training = Training(workers=1)

    def wait() -> None:
        (tmp_path / "runs").touch()
        wait_until((tmp_path / "end").exists)

    values = [training.coordinator.schedule(wait) for _ in range(2)]
    wait_until((tmp_path / "runs").exists)
    del training
    gc.collect()
    (tmp_path / "end").touch()
    assert values[0].fetch() is None
    wait_until(lambda: gc.collect() >= 0 and values[1]._future.done())
    with pytest.raises(CancelledError, match="the coordinator is gone"):
        values[1].fetch()


def test_a_checkpoint_of_other_shards(tmp_path: pathlib.Path) -> None:
    from mirrored.parameter_server.partitioners import FixedShardsPartitioner

    def objects(training: Training) -> dict[str, Any]:
        return {"model": training.model, "adam": training.adam, "adagrad": training.adagrad}

    training = Training(workers=1)
    training.train(3)
    mirrored.CheckpointManager(training.strategy, tmp_path, objects(training)).save(wait=True)
    expected = training.train(1)
    for placed in (False, True):
        other = Training(workers=1, servers=3, variable_partitioner=FixedShardsPartitioner(4))
        if placed:
            other.train(1)
        mirrored.CheckpointManager(other.strategy, tmp_path, objects(other)).restore_newest()
        batches = iter(other.coordinator.create_per_worker_dataset(lambda: [examples(3)]))
        assert other.coordinator.schedule(other.step, args=(batches,)).fetch() == pytest.approx(expected[0], rel=1e-5)
