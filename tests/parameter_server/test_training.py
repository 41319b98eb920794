"""Training with parameter servers, on actors of a real Ray cluster."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import threading
from concurrent.futures import CancelledError

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mirrored
from tests.support.jobs import parameters_of, towers
from tests.support.waiting import wait_until

ray = pytest.importorskip("ray")

from mirrored.parameter_server.worker import current_worker_index  # noqa: E402
from tests.parameter_server.training import Training, Words, examples  # noqa: E402


@pytest.fixture(scope="module")
def training() -> Training:
    return Training()


def test_it_learns_and_the_chief_has_the_model(training: Training) -> None:
    losses = training.train(150)
    assert sum(losses[-20:]) < 0.7 * sum(losses[:20])
    words, y = examples(0)
    training.model.eval()
    assert F.mse_loss(training.model(words), y) < sum(losses[:20]) / 20
    training.model.train()
    alone = Words()
    alone.load_state_dict(training.model.state_dict())
    alone.eval()
    assert F.mse_loss(alone(words), y) < sum(losses[:20]) / 20
    assert alone.dense[0].num_batches_tracked == 150
    state = training.adam.state_dict()["state"]
    assert {int(entry["step"]) for entry in state.values()} == {150}
    assert state[2]["exp_avg"].shape == (7, 4)


def test_an_error_cancels_what_was_scheduled_after_it(training: Training, tmp_path: pathlib.Path) -> None:
    def wait_for(name: str) -> None:
        wait_until((tmp_path / name).exists)

    def fail() -> None:
        wait_for("all are scheduled")
        raise KeyError("no such word")

    failed = training.coordinator.schedule(fail)
    training.coordinator.schedule(wait_for, args=("it has failed",))  # on the other worker
    later = [training.coordinator.schedule(training.step, args=(training.batches,)) for _ in range(3)]
    (tmp_path / "all are scheduled").touch()
    with pytest.raises(KeyError):
        failed.fetch()
    (tmp_path / "it has failed").touch()
    with pytest.raises(KeyError, match="no such word") as error:
        training.coordinator.join()
    assert re.search(r"raised by a scheduled function on worker \d:[\s\S]* in fail", str(error.value.__cause__))
    for value in later:
        with pytest.raises(CancelledError):
            value.fetch()
    assert training.coordinator.done()
    assert len(training.train(2)) == 2


def test_what_the_chief_writes_counts(training: Training) -> None:
    model = training.model

    def look() -> float:
        return float(model.dense[1].bias.sum())

    with torch.no_grad():
        model.dense[1].bias.fill_(3.0)
    assert training.coordinator.schedule(look).fetch() == 21.0
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    assert training.coordinator.schedule(look).fetch() == 0.0


def test_what_a_worker_writes_is_refused(training: Training) -> None:
    model = training.model

    def write() -> None:
        with torch.no_grad():
            model.dense[1].bias.fill_(3.0)

    training.coordinator.schedule(write)
    with pytest.raises(RuntimeError, match=r"wrote to Words\.dense\.1\.bias itself, which would stay on this worker"):
        training.coordinator.join()


@pytest.mark.row(65)
def test_what_cannot_be_sent(training: Training) -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot be sent to the workers with all objects that it refers to"):
        training.coordinator.schedule(lambda: lock.acquire())
    value = training.coordinator.schedule(lambda: 1)
    with pytest.raises(TypeError, match="pass the result of its fetch"):
        training.coordinator.schedule(lambda x: x, args=([value],))
    foreign = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    with pytest.raises(TypeError, match="SGD steps parameters that were not made in the strategy's scope"):
        training.coordinator.schedule(lambda: foreign.step())
    with pytest.raises(RuntimeError, match="the data are the workers'"):
        next(training.batches)


def train_alone(strategy: mirrored.Strategy) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The synchronous training of three steps of two examples each that tower i makes with batches i, i + 2, …."""
    with strategy.scope():
        model = Words()
    optimizers = torch.optim.Adam(model.dense.parameters(), 0.02), torch.optim.Adagrad(model.table.parameters(), 0.1)

    def step(words: Tensor, y: Tensor) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        mirrored.compute_average_loss((model(words) - y).square(), global_batch_size=16).backward()
        for optimizer in optimizers:
            optimizer.step()

    for number in range(3):
        strategy.run(step, examples(2 * number + strategy.topology.index))
    return parameters_of(model), {name: value.clone() for name, value in model.named_buffers()}


def test_synchronous_with_all_workers_is_the_mirrored_step() -> None:
    training = Training(replicas_to_aggregate=2)
    training.train(6)
    training.model.state_dict()  # pulls
    (parameters, one), (_, other) = towers(train_alone)
    torch.testing.assert_close(parameters_of(training.model), parameters, rtol=1e-6, atol=1e-6)
    for name, value in training.model.named_buffers():
        mean = (one[name] + other[name]) / 2
        torch.testing.assert_close(value, mean.to(value.dtype), rtol=1e-6, atol=1e-6)


def test_fewer_gradients_than_a_step_wants_keep_nobody_waiting() -> None:
    training = Training(replicas_to_aggregate=2)
    for steps in (1, 3, 1):
        assert len(training.train(steps)) == steps
    assert {int(entry["step"]) for entry in training.adam.state_dict()["state"].values()} == {4}


def test_an_optimizer_that_a_later_call_brings(training: Training) -> None:
    model, later = training.model, torch.optim.SGD(training.model.dense.parameters(), 0.0)

    def step() -> None:
        model(examples(0)[0]).sum().backward()
        later.step()

    values = [training.coordinator.schedule(training.step, args=(training.batches,)) for _ in range(20)]
    training.coordinator.schedule(step)
    training.coordinator.join()
    assert len(training.coordinator.fetch(values)) == 20


def test_a_worker_that_is_killed_loses_no_call(training: Training, tmp_path: pathlib.Path) -> None:
    def number_of_this_worker(number: int) -> tuple[int, int | None]:
        if number % 20 == 7 and not (place := tmp_path / str(number)).exists():
            place.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number, current_worker_index()

    results = [training.coordinator.schedule(number_of_this_worker, args=(number,)) for number in range(60)]
    training.coordinator.join()
    assert [number for number, _ in training.coordinator.fetch(results)] == list(range(60))
    assert {worker for _, worker in training.coordinator.fetch(results)} == {0, 1}
    assert len(list(tmp_path.iterdir())) == 3
    assert len(training.train(4)) == 4


@pytest.mark.row(66)
def test_a_call_that_kills_every_worker_is_an_error(training: Training) -> None:
    training.coordinator.schedule(lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RuntimeError, match="5 workers were lost in turn in one scheduled function"):
        training.coordinator.join()


def test_a_checkpoint_is_that_of_one_device(tmp_path: pathlib.Path) -> None:
    training = Training(workers=1)
    training.train(3)
    objects = {"model": training.model, "adam": training.adam, "adagrad": training.adagrad}
    manager = mirrored.CheckpointManager(training.strategy, tmp_path, objects)
    manager.save()
    manager.wait()

    alone = mirrored.OneDeviceStrategy()
    with alone.scope():
        model = Words()
    adam, adagrad = torch.optim.Adam(model.dense.parameters()), torch.optim.Adagrad(model.table.parameters())
    objects = {"model": model, "adam": adam, "adagrad": adagrad}
    assert mirrored.CheckpointManager(alone, tmp_path, objects).restore_newest() is not None
    for number in (3, 4):
        words, y = examples(number)
        for optimizer in (adam, adagrad):
            optimizer.zero_grad()
        F.mse_loss(model(words), y).backward()
        for optimizer in (adam, adagrad):
            optimizer.step()

    training.train(2)
    torch.testing.assert_close(training.model.state_dict(), model.state_dict(), rtol=1e-6, atol=1e-6)
    assert int(adam.state_dict()["state"][0]["step"]) == 5

    again = Training(workers=1)
    objects = {"model": again.model, "adam": again.adam, "adagrad": again.adagrad}
    mirrored.CheckpointManager(again.strategy, tmp_path, objects).restore_newest()
    next_batches = iter(again.coordinator.create_per_worker_dataset(lambda: [examples(3), examples(4)]))
    for _ in range(2):
        again.coordinator.schedule(again.step, args=(next_batches,))
    again.coordinator.join()
    torch.testing.assert_close(again.model.state_dict(), model.state_dict(), rtol=1e-6, atol=1e-6)
