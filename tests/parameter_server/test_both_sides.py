"""What the chief does to models and optimizers between calls, and what workers do to buffers, on real servers."""

from __future__ import annotations

import copy
import functools
import io
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mirrored

ray = pytest.importorskip("ray")

from mirrored.parameter_server.partitioners import FixedShardsPartitioner  # noqa: E402
from mirrored.parameter_server.servers import ServerLostError  # noqa: E402


class Side:
    """A small model on servers, and its coordinator."""

    def __init__(self, make: Callable[[], nn.Module], **options: Any) -> None:
        self.strategy = mirrored.ParameterServerStrategy(**{"workers": 1, "servers": 1, "seed": 0, **options})
        with self.strategy.scope():
            self.model = make()
        self.coordinator = mirrored.ClusterCoordinator(self.strategy)

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        value = self.coordinator.schedule(fn, args=args)
        self.coordinator.join()
        return value.fetch()


def stepping(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """A step whose gradient is 1 everywhere."""

    def step() -> None:
        optimizer.zero_grad()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.sum().backward()
        optimizer.step()

    return step


def zeros(inputs: int = 2) -> nn.Module:
    model = nn.Linear(inputs, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def test_the_state_of_a_cut_variable_counts_once_after_it_was_restored(tmp_path: pathlib.Path) -> None:
    for expected in (1, 2):
        side = Side(zeros, variable_partitioner=FixedShardsPartitioner(3), servers=2)
        adam = torch.optim.Adam(side.model.parameters())
        manager = mirrored.CheckpointManager(side.strategy, tmp_path, {"model": side.model, "adam": adam})
        manager.restore_newest()
        side.call(stepping(side.model, adam))
        assert {float(entry["step"]) for entry in adam.state_dict()["state"].values()} == {expected}
        manager.save()
        manager.wait()


def test_a_copy_of_a_model_leaves_its_original_alone() -> None:
    side = Side(lambda: nn.Sequential(nn.Embedding(4, 2, sparse=True), zeros()))
    model, sgd = side.model, torch.optim.SGD(side.model[1].parameters(), 1.0)
    side.call(stepping(model[1], sgd))
    teacher = copy.deepcopy(model)
    side.call(stepping(model[1], sgd))
    assert side.call(lambda: teacher(torch.tensor(1)).tolist()) == [
        -1.0 + w for w in (teacher[1].weight @ teacher[0].weight[1]).tolist()
    ]
    assert model.state_dict()["1.bias"].tolist() == [-2.0] * 3
    torch.save(teacher, io.BytesIO())
    side.strategy.mirror(teacher)
    side.call(stepping(teacher[1], torch.optim.SGD(teacher[1].parameters(), 5.0)))
    assert teacher[1].bias.tolist() == [-6.0] * 3
    assert model[1].bias.tolist() == [-2.0] * 3


def test_what_a_function_of_several_steps_adds_to_buffers_is_kept() -> None:
    side = Side(lambda: nn.Sequential(nn.BatchNorm1d(2)))
    model, sgd = side.model, torch.optim.SGD(side.model.parameters(), 0.1)

    def three_steps() -> None:
        for _ in range(3):
            model(torch.randn(4, 2)).square().sum().backward()
            sgd.step()

    side.call(three_steps)
    assert int(model.state_dict()["0.num_batches_tracked"]) == 3


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("seen", torch.tensor([False, False]))
        self.register_buffer("least", torch.tensor(float("inf")))
        self.register_buffer("mean", torch.tensor(0.0))


def test_buffers_that_are_no_sums_are_assigned() -> None:
    side = Side(Buffers)
    model = side.model

    def look() -> None:
        model.seen[1] = True
        model.least.fill_(3.0)

    side.call(look)
    assert (model.seen.tolist(), float(model.least)) == ([False, True], 3.0)


def test_synchronous_steps_take_the_mean_of_what_is_added_to_buffers() -> None:
    side = Side(Buffers, workers=2, replicas_to_aggregate=2)
    model, sgd = side.model, torch.optim.SGD(side.model.parameters(), 0.1)

    def step(value: float) -> None:
        model.mean += value
        model.weight.sum().backward()
        sgd.step()

    for value in (1.0, 2.0):
        side.coordinator.schedule(step, args=(value,))
    side.coordinator.join()
    assert float(model.mean) == 1.5


def test_synchronous_functions_of_several_steps_wait_for_slow_ones() -> None:
    side = Side(zeros, workers=2, replicas_to_aggregate=2)
    model, sgd = side.model, torch.optim.SGD(side.model.parameters(), 1.0)

    def steps(*gradients: float) -> list[float]:
        outputs = []
        for gradient in gradients:
            outputs.append(float(model(torch.zeros(2))[0]))
            if gradient == 5.0:
                time.sleep(1.5)  # longer than anybody waits without a look at who else is there
            sgd.zero_grad()
            (gradient * model.bias.sum()).backward()
            sgd.step()
        return outputs

    values = [side.coordinator.schedule(steps, args=args) for args in ((1.0, 2.0, 3.0), (5.0, 6.0, 7.0), (1.0, 1.0))]
    side.coordinator.join()
    together = [0.0, -3.0, -7.0]
    assert side.coordinator.fetch(values) == [together, together, [-12.0, -13.0]]  # the third one is alone
    assert model.bias.tolist() == [-14.0] * 3


def test_synchronous_optimizers_that_step_in_turn_keep_nobody_waiting() -> None:
    side = Side(zeros, workers=2, replicas_to_aggregate=2)
    first, second = (torch.optim.SGD([p], 1.0) for p in side.model.parameters())
    values = [
        side.coordinator.schedule(stepping(nn.ParameterList(o.param_groups[0]["params"]), o))
        for _ in range(3)
        for o in (first, second)
    ]
    side.coordinator.join()
    assert len(side.coordinator.fetch(values)) == 6
    assert side.model.bias.max() < 0


def test_a_server_and_the_only_worker_that_are_lost_at_once() -> None:
    side = Side(zeros, replicas_to_aggregate=1)
    side.call(stepping(side.model, torch.optim.SGD(side.model.parameters(), 1.0)))
    server = ray.get(side.strategy._servers.actors[0].__ray_call__.remote(lambda _: os.getpid()))

    def kill_both() -> None:
        os.kill(server, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ServerLostError, match="parameter server 0 "):
        side.call(kill_both)


def test_the_chief_may_write_to_a_part_of_a_variable() -> None:
    side = Side(zeros)
    side.call(stepping(side.model, torch.optim.SGD(side.model.parameters(), 1.0)))
    with torch.no_grad():
        side.model.bias[0] = 7.0
    assert side.call(lambda: side.model.bias.tolist()) == [7.0, -1.0, -1.0]


def test_how_the_model_trains_is_as_on_the_chief() -> None:
    side = Side(lambda: nn.Sequential(zeros(), zeros()))
    model, sgd = side.model, torch.optim.SGD(side.model.parameters(), 1.0)
    model[0].requires_grad_(False)
    side.call(stepping(model, sgd))
    assert (model[0].bias.tolist(), model[1].bias.tolist()) == ([0.0] * 3, [-1.0] * 3)
    model.eval()
    assert side.call(lambda: (model.training, model[0].weight.requires_grad)) == (False, False)
    model.train()
    assert side.call(lambda: model.training)


def test_what_the_chief_may_not_change() -> None:
    side = Side(lambda: nn.Sequential(zeros(), zeros()))
    sgd = torch.optim.SGD(side.model.parameters(), 1.0)
    step = stepping(side.model, sgd)
    side.call(step)
    with pytest.raises(RuntimeError, match="takes no more parameters: make another optimizer of them"):
        sgd.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    side.model[1] = nn.Linear(2, 3)
    with pytest.raises(RuntimeError, match="a model has got other modules since the first schedule"):
        side.call(step)


def test_what_cannot_be_placed_is_said_every_time() -> None:
    side = Side(zeros, variable_partitioner=lambda shape, dtype: [1, 2])
    for _ in range(2):
        with pytest.raises(ValueError, match="variables are split along dimension 0 only"):
            side.call(lambda: None)


def test_a_learning_rates_schedule_may_come_later() -> None:
    side = Side(zeros)
    model: Any = side.model
    sgd = model.optimizer = torch.optim.SGD(model.parameters(), 1.0)

    def step() -> None:
        stepping(model, model.optimizer)()

    side.call(step)
    schedule = torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.5)
    schedule.step()
    side.call(step)
    assert side.model.bias.tolist() == [-1.5] * 3


def test_a_write_and_an_error_are_one_calls_own() -> None:
    side = Side(zeros)

    def write_and_fail() -> None:
        with torch.no_grad():
            side.model.bias.fill_(3.0)
        raise KeyError("the cause")

    with pytest.raises(KeyError, match="the cause"):
        side.call(write_and_fail)
    assert side.call(lambda: side.model.bias.tolist()) == [0.0] * 3


class Trainer:
    """What holds its coordinator, as many scripts' trainers do."""

    def __init__(self) -> None:
        self.side = Side(zeros)
        self.coordinator = self.side.coordinator

    def double(self, number: int = 21) -> int:
        return 2 * number


def test_methods_of_what_holds_the_coordinator() -> None:
    trainer = Trainer()
    assert trainer.coordinator.schedule(trainer.double).fetch() == 42


class Unreadable(Exception):
    def __init__(self, first: int = 1, *, second: int) -> None:
        super().__init__(first)


class Unsendable(Exception):
    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_a_result_that_cannot_be_read_is_an_error() -> None:
    side = Side(zeros)
    with pytest.raises(TypeError):
        side.call(lambda: Unreadable(second=2))
    assert side.call(lambda: 1) == 1


def test_errors_of_all_kinds_arrive() -> None:
    side = Side(zeros)

    def fail(kind: type[Exception], **arguments: int) -> None:
        raise kind(**arguments)

    for kind in (LookupError, OSError, ray.exceptions.ActorDiedError):  # the last one is no loss of the worker
        with pytest.raises(kind) as error:
            side.call(fail, kind)
        assert type(error.value) is kind
        assert "raised by a scheduled function on worker 0:\n" in str(error.value.__cause__)
        assert "\x1b" not in str(error.value.__cause__)
    for kind, arguments in ((Unreadable, {"second": 2}), (Unsendable, {})):
        with pytest.raises(ray.exceptions.RayError, match=kind.__name__):
            side.call(functools.partial(fail, kind, **arguments))
    assert side.call(lambda: 1) == 1
