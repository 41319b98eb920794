"""Contexts: scope, run, neither, and strategies inside each other."""

from __future__ import annotations

import copy
import gc
import os
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import mirrored
from tests.support.datasets import Streamed
from tests.support.jobs import WAYS, make_data, make_mlp, parameters_of, towers
from tests.support.waiting import HANG, wait_until


def look_around() -> tuple[bool, bool, bool, int]:
    context = mirrored.get_replica_context()
    return (
        mirrored.has_strategy(),
        mirrored.in_cross_replica_context(),
        context is not None,
        mirrored.get_strategy().num_replicas_in_sync,
    )


def contexts(strategy: mirrored.Strategy) -> list[tuple[object, ...]]:
    def step() -> tuple[object, ...]:
        context = mirrored.get_replica_context()
        ours = context.strategy is strategy
        return context.replica_id_in_sync_group, context.num_replicas_in_sync, context.device.type, ours

    with strategy.scope(), strategy.scope():
        inside = look_around()
    return [look_around(), inside, strategy.run(look_around), strategy.run(step)]


def test_contexts_are_tensorflows() -> None:
    nowhere, scope, run = (False, False, True, 1), (True, True, False, 2), (True, False, True, 2)
    assert towers(contexts) == [[nowhere, scope, run, (tower, 2, "cpu", True)] for tower in (0, 1)]


@pytest.mark.row(50)
def test_one_strategy_inside_another() -> None:
    first, second = mirrored.OneDeviceStrategy(), mirrored.OneDeviceStrategy()
    with first.scope():
        for call in (second.scope().__enter__, lambda: second.run(int), lambda: second.reduce("sum", 1)):
            with pytest.raises(RuntimeError, match="inside the scope of another: strategies cannot be mixed"):
                call()
    with pytest.raises(RuntimeError, match="inside the run of another"):
        first.run(lambda: second.run(int))
    with pytest.raises(RuntimeError, match=r"scope\(\) was called inside strategy.run"):
        first.run(lambda: first.scope().__enter__())


def fork_and_run(strategy: mirrored.Strategy) -> str:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            strategy.run(int)
            os.write(writer, b"nothing was raised")
        except RuntimeError as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return os.read(reader, 1000).decode()


@pytest.mark.row(50)
def test_process_forked_after_the_start() -> None:
    for text in towers(fork_and_run):
        assert text.startswith("ForkedError: run() was called in a process that was forked after the strategy")


def raise_in_run(strategy: mirrored.Strategy) -> tuple[bool, bool]:
    error = ValueError("mine")

    def fail() -> None:
        raise error

    try:
        strategy.run(fail)
    except ValueError as caught:
        return caught is error, mirrored.has_strategy()
    raise AssertionError


def test_an_exception_reaches_the_caller_unchanged() -> None:
    assert towers(raise_in_run) == [(True, False)] * 2


def keep_the_model_plain(strategy: mirrored.Strategy) -> dict[str, object]:
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    strategy.run(lambda: model(torch.randn(4, 2)).sum().backward())
    twin = copy.deepcopy(model)
    return {
        "type": type(model).__name__,
        "keys": list(model.state_dict()),
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "parameter": type(model[0].weight).__name__,
        "twin": all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True)),
    }


def test_no_wrapper_no_prefix_no_class_change() -> None:
    keys = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"]
    expected = {"type": "Sequential", "keys": keys, "hooks": [0, 0, 0], "parameter": "Parameter", "twin": True}
    assert towers(keep_the_model_plain) == [expected] * 2


def mirror_values(strategy: mirrored.Strategy, make: Callable[[], nn.Module]) -> list[float]:
    """The first value of each parameter and buffer after the first run; towers made different ones."""
    torch.manual_seed(strategy.topology.index)
    with strategy.scope():
        model = make()
    later = strategy.mirror(nn.Linear(1, 1))
    strategy.run(lambda: None)
    tensors = [*model.parameters(), *model.buffers(), *later.parameters()]
    return [float(t.detach().flatten()[0]) for t in tensors]


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8)
        self.encoder = nn.TransformerEncoder(layer, 2)  # copies its layer: no registration of its parameters
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(3))])
        self.register_buffer("noise", torch.randn(2), persistent=False)


def test_parameters_buffers_copies_and_mirrored_modules_are_broadcast() -> None:
    first, second = towers(mirror_values, WithBuffer)
    assert first == second
    assert len(first) == 2 * 12 + 1 + 1 + 2


def make_after_throwing_away(strategy: mirrored.Strategy) -> int:
    """Dead modules' addresses come back, differently on each tower."""
    with strategy.scope():
        kept = [nn.Linear(1, 1)]
        for i in range(20):
            thrown_away = [nn.Linear(1, 1) for _ in range(1 + (i + strategy.topology.index) % 3)]
            del thrown_away
            kept.append(nn.Conv1d(1, 1, 1) if i % 2 else nn.Linear(1, 1))
    strategy.run(lambda: None)
    return sum(strategy.is_mirrored(p) for module in kept for p in module.parameters())


def test_the_order_of_modules_does_not_depend_on_memory() -> None:
    assert towers(make_after_throwing_away) == [42, 42]


def test_one_tower_runs_in_place() -> None:
    strategy = mirrored.MirroredStrategy(["cpu:0"], seed=3)
    assert strategy.num_replicas_in_sync == 1
    assert strategy.is_chief
    assert not torch.distributed.is_initialized()
    with strategy.scope():
        model = make_mlp()
    assert strategy.is_mirrored(model[0].weight)
    assert strategy.run(lambda x: x + 1, (2,)) == 3
    assert strategy.run(lambda *, x: x, kwargs={"x": 5}) == 5


def use_all(strategy: mirrored.Strategy, folder: pathlib.Path, setting: str, default: str) -> list[Any]:
    """Values of what communicates or loads, where tensors are made on ``default`` if nobody says where."""
    r, plain = strategy.topology.index, setting != "virtual towers"
    x, y = make_data(40, torch.float32)
    ones, rows, own = torch.ones(2), torch.full((r + 1, 100), float(r)), torch.tensor([1.0, r], requires_grad=True)
    words = torch.tensor([r, 2])
    with strategy.scope(sync_batch_norm=plain):
        model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        unused, table = nn.Linear(2, 2), nn.Embedding(4, 2, sparse=setting != "sharded")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kept = {"model": model, "optimizer": optimizer, "rest": {"own": rows, "none": rows[:0]}}
    checkpoints = mirrored.CheckpointManager(strategy, folder, kept, every_steps=1)
    pipeline = DataLoader(TensorDataset(x, y), 7)

    def train(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = strategy.backward(lambda x, y: F.cross_entropy(model(x), y, reduction="none"), x, y, sample_weight=0.5)
        optimizer.step()
        return loss

    def communicate() -> None:
        context = mirrored.get_replica_context()
        context.all_reduce("sum", own * context.all_gather(own).sum()).sum().backward()
        if strategy.is_chief:
            unused(ones).sum().backward()
        else:
            (table(words).sum() + mirrored.scale_regularization_loss(1.0)).backward()

    with strategy.scope():
        torch.set_default_device(default)
        found = [strategy.reduce("mean", r), strategy.reduce("max", rows.sum(0)), strategy.gather(rows)]
        batches = list(strategy.distribute_dataset(TensorDataset(x, y), 20, shuffle=True))
        found += batches
        if plain:
            loader = DataLoader(TensorDataset(x, y), 12, sampler=RandomSampler(x), num_workers=1)
            found += strategy.distribute_dataset(loader)
            found += strategy.distribute_dataset(Streamed(x), 12)
            found += strategy.distribute_datasets_from_function(lambda _: pipeline)
        torch.set_default_device(None)
    torch.set_default_device(default)
    for batch in batches:
        found.append(strategy.run(train, args=batch))
        checkpoints.step()
    if plain:
        strategy.run(communicate)
        found += [own.grad, unused.weight.grad, table.weight.grad]
    strategy.check_mirrored()
    checkpoints.save("end", wait=True)
    found += [*parameters_of(model), *model.buffers()]
    with torch.no_grad():
        model[0].weight.zero_()
    checkpoints.restore("end")
    found += parameters_of(model)
    torch.set_default_device(None)
    return found


@pytest.mark.parametrize("setting", WAYS)
def test_another_default_device(setting: str, tmp_path: pathlib.Path) -> None:
    """As in the scope of a strategy on a GPU, where tensors are made there if nobody says where."""
    checks = {"nonfinite_gradients": "raise", "mirror_check_interval": 2}
    settings = {**WAYS[setting], **checks}
    results = {
        default: towers(use_all, tmp_path / default, setting, default, settings=settings) for default in ("cpu", "meta")
    }
    torch.testing.assert_close(results["meta"], results["cpu"], rtol=0, atol=0)


def drop_a_model(strategy: mirrored.Strategy, where: list[int]) -> str:
    """The name of a model's weight, where another one was dropped before, and some towers collected their garbage."""
    gc.disable()
    with strategy.scope():
        dropped = nn.Linear(2, 1)
        dropped.cycle = [dropped]
        del dropped
        if strategy.topology.index in where:
            gc.collect()
        model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        mirrored.compute_average_loss(model(torch.ones(4, 2)).flatten(), global_batch_size=8).backward()
        optimizer.step()

    strategy.run(step)
    gc.collect()
    strategy.run(step)
    strategy.check_mirrored()
    return strategy.engine.recorder.name_of(model.weight)


@pytest.mark.parametrize("where", [[], [1], [0, 1]], ids=["nowhere", "on tower 1", "everywhere"])
def test_garbage_is_no_difference(where: list[int]) -> None:
    names = towers(drop_a_model, where)
    assert names[0] == names[1] == ("Linear.weight" if where else "Linear[1].weight")


THREADS = {"towers-heartbeat", "towers-step-deadline"}


def make_strategies(how_many: int) -> list[tuple[int, int]]:
    """Open files and threads after the first few strategies that were made and dropped, and after all."""
    found = []
    for number in range(1, how_many + 1):
        strategy = mirrored.MirroredStrategy()
        with strategy.scope():
            model = nn.Linear(2, 1)
        strategy.run(lambda model=model: model(torch.ones(2, 2)).mean().backward())
        del strategy, model
        gc.collect()
        if number in (3, how_many):
            # Threads look once a second whether they are still wanted.
            wait_until(lambda: THREADS.isdisjoint(thread.name for thread in threading.enumerate()))
            found.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return found


@pytest.mark.extended
@pytest.mark.parametrize("count", [1, 2])
def test_strategies_that_are_dropped_leave_nothing(count: int) -> None:
    names = [f"cpu:{tower}" for tower in range(count)]
    for few, many in mirrored.launch(make_strategies, (13,), devices=names, timeout=HANG):
        assert many[0] - few[0] < 10
        assert many[1] - few[1] < 10
