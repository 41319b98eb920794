"""Backwards that belong to different steps are never averaged together: the difference is an error on all towers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mirrored
from tests.support.jobs import failures, make_data, make_mlp, parameters_of, towers
from tests.support.waiting import HANG

RUNS = 20
SKIPS = {5: 0, 15: 1}
"""In which runs a tower leaves out a backward, and which tower: the numbers of backwards balance in the end."""

SETTINGS: dict[str, dict[str, Any]] = {
    "shared memory": {},
    "gloo": {"communication": mirrored.CommunicationOptions(implementation="gloo")},
    "sharded": {"shard_optimizer": True},
    "virtual towers": {"virtual_towers": 4},
}


def _train(strategy: mirrored.Strategy, losses: int, skip: Callable[[int], bool], accumulate: bool) -> None:
    """``losses`` backwards a run; where ``skip(run)``, the first of them is left out or accumulates alone."""
    with strategy.scope():
        model = make_mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = make_data(8 * RUNS)
    virtual = strategy.virtual_towers is not None

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y, reduction="none")

    def step(run: int, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        for number in range(losses):
            skipped = number == 0 and skip(run)
            if skipped and accumulate:
                with strategy.no_sync():
                    mirrored.compute_average_loss(loss_fn(x, y)).backward()
                optimizer.zero_grad()
            elif skipped:
                continue
            elif virtual:
                strategy.backward(loss_fn, x, y)
            else:
                mirrored.compute_average_loss(loss_fn(x, y)).backward()
        if optimizer.param_groups[0]["params"][0].grad is not None:
            optimizer.step()

    data = strategy.distribute_dataset(torch.utils.data.TensorDataset(x, y), 8)
    for run, batch in enumerate(data, start=1):
        strategy.run(step, args=(run, *batch))


def _skip_in_turn(setting: str, losses: int, accumulate: bool) -> None:
    strategy = mirrored.MirroredStrategy(seed=0, mirror_check_interval=None, **SETTINGS[setting])
    _train(strategy, losses, lambda run: SKIPS.get(run) == strategy.topology.index, accumulate)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("losses", "accumulate"), [(1, True), (2, False)], ids=["no_sync", "two losses"])
def test_a_backward_that_one_tower_leaves_out_is_an_error_in_that_step(
    setting: str, losses: int, accumulate: bool
) -> None:
    with pytest.raises(mirrored.TowerFailedError) as caught:
        mirrored.launch(_skip_in_turn, (setting, losses, accumulate), devices=["cpu:0", "cpu:1"], timeout=HANG)
    errors = {failed.tower: failed.exception for failed in caught.value.failures}
    assert sorted(errors) == [0, 1]
    for error in errors.values():
        assert isinstance(error, mirrored.DisagreementError), error
        text = str(error)
        assert 'strategy.reduce("max"' in text  # how towers decide together
        if setting == "sharded" and losses == 2:  # found in step 5 on both, where the optimizer's step begins
            assert "tower 0 steps SGD" in text
            assert "tower 1 uses the averaged gradients" in text
        elif setting == "virtual towers":
            call = f"strategy.backward() number {5 * losses} of 4 virtual towers"
            assert f"tower 1 {call} with batch 4 of epoch 0" in text
            assert f"tower 0 {call} with batch 5 of epoch 0" in text
        else:
            loop = "(loop 1 over distributed data)"
            assert f"backward() 1 of step 6 with batch 5 of epoch 0 {loop} on tower 0" in text
            assert f"backward() {losses} of step 5 with batch 4 of epoch 0 {loop} on tower 1" in text


def _extra_run(setting: str) -> None:
    strategy = mirrored.MirroredStrategy(seed=0, mirror_check_interval=None, **SETTINGS[setting])
    with strategy.scope():
        model = make_mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y, reduction="none")

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        if strategy.virtual_towers is not None:
            strategy.backward(loss_fn, x, y)
        else:
            mirrored.compute_average_loss(loss_fn(x, y)).backward()
        optimizer.step()

    data = strategy.distribute_dataset(torch.utils.data.TensorDataset(*make_data(8 * RUNS)), 8)
    for number, batch in enumerate(data):
        strategy.run(step, args=batch)
        if number == 4 and strategy.topology.index == 0:
            strategy.run(step, args=batch)  # for which the other tower has the next batch


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_run_that_one_tower_makes_once_more_is_an_error_in_that_step(setting: str) -> None:
    with pytest.raises(mirrored.TowerFailedError) as caught:
        mirrored.launch(_extra_run, (setting,), devices=["cpu:0", "cpu:1"], timeout=HANG)
    errors = {failed.tower: failed.exception for failed in caught.value.failures}
    assert sorted(errors) == [0, 1]
    for error in errors.values():
        assert isinstance(error, mirrored.DisagreementError), error
        assert "batch 4 of epoch 0" in str(error)
        assert "batch 5 of epoch 0" in str(error)


def _several_loops(implementation: str) -> int:
    """Batches in hand that are not those of the step: a thread takes them ahead, or a tower trains on earlier ones."""
    options = mirrored.CommunicationOptions(implementation=implementation)
    strategy = mirrored.MirroredStrategy(seed=0, communication=options)
    model = strategy.mirror(make_mlp())

    def step(x: Tensor, y: Tensor) -> None:
        mirrored.compute_average_loss(nn.functional.cross_entropy(model(x), y, reduction="none")).backward()

    dataset = torch.utils.data.TensorDataset(*make_data(24))
    train, other = (strategy.distribute_dataset(dataset, size) for size in (8, 4))
    earlier = []
    for batch, own in zip(train, other, strict=False):  # the loop over the second is left early
        strategy.run(step, args=batch)
        strategy.run(step, args=own)
        earlier.append(batch)
        strategy.run(step, args=earlier[strategy.topology.index % len(earlier)])
    for batch in earlier[strategy.topology.index :] + earlier[: strategy.topology.index]:
        strategy.run(step, args=batch)

    taken: queue.Queue[Any] = queue.Queue()
    ahead = threading.Thread(target=lambda: [taken.put(batch) for batch in train])
    ahead.start()
    if strategy.topology.index == 0:
        ahead.join()  # this tower is at the last batch before its first step, the others are where they are
    for _ in range(len(train)):
        strategy.run(step, args=taken.get())
    ahead.join()
    return strategy.health.run


@pytest.mark.parametrize("implementation", ["shared_memory", "gloo"])
def test_a_tower_may_have_other_batches_at_hand(implementation: str) -> None:
    assert mirrored.launch(_several_loops, (implementation,), devices=["cpu:0", "cpu:1"], timeout=HANG) == [15, 15]


def _one_more(strategy: mirrored.Strategy) -> None:
    model = strategy.mirror(make_mlp())
    x, _ = make_data(4)

    def step() -> None:
        for _ in range(2 if strategy.topology.index == 2 and strategy.health.step == 3 else 1):
            model(x).sum().backward()

    for _ in range(6):
        strategy.run(step)


def test_one_backward_more_of_one_of_three_towers_is_an_error_on_all() -> None:
    texts = {str(error) for error in failures(_one_more, count=3)}
    assert len(texts) == 1
    text = texts.pop()
    assert "backward() 2 of step 3 on tower 2" in text
    assert "backward() 1 of step 4 on towers 0 and 1" in text


class _Layers(nn.Module):
    """Checkpointed layers, of which some are left out at random (LayerDrop)."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5, dtype=torch.float64) for _ in range(layers))

    def forward(self, x: Tensor, kept: list[int], reentrant: bool) -> Tensor:
        for index in kept:
            x = checkpoint(self.layers[index], torch.tanh(x), use_reentrant=reentrant)
        return x


KEPT = [[0, 1, 2, 3], [0, 2], [1], [0, 1, 3], [3, 2], [0, 1, 2, 3]]


def _layer_drop(strategy: mirrored.Strategy, reentrant: bool) -> list[Tensor]:
    with strategy.scope():
        torch.manual_seed(0)
        model = _Layers(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, _ = make_data(12)
    index, count = strategy.topology.index, strategy.num_replicas_in_sync
    own = x[index::count].clone().requires_grad_()

    def step(kept: list[int]) -> None:
        optimizer.zero_grad()
        mirrored.compute_average_loss(model(own, kept, reentrant).square().sum(1), global_batch_size=12).backward()
        optimizer.step()

    for run in range(len(KEPT)):
        # Each tower leaves out other layers, and another number of them.
        strategy.run(step, args=(KEPT[(run + index) % len(KEPT)],))
    return parameters_of(model)


@pytest.mark.parametrize("implementation", ["shared_memory", "gloo"])
def test_reentrant_checkpoints_of_a_random_depth_are_one_backward(implementation: str) -> None:
    nested = mirrored.launch(_reentrant, (implementation, True), devices=["cpu:0", "cpu:1", "cpu:2"])
    plain = mirrored.launch(_reentrant, (implementation, False), devices=["cpu:0", "cpu:1", "cpu:2"])
    for tower in range(3):
        for a, b in zip(nested[tower], plain[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def _reentrant(implementation: str, reentrant: bool) -> list[Tensor]:
    options = mirrored.CommunicationOptions(implementation=implementation)
    return _layer_drop(mirrored.MirroredStrategy(seed=0, communication=options), reentrant)


class _Tied(nn.Module):
    """The same layer in two checkpoints, so that its gradient comes twice in a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(5, 5, dtype=torch.float64)
        self.once = nn.Linear(5, 5, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.twice, self.once, self.twice):
            x = checkpoint(torch.nn.Sequential(layer, nn.Tanh()), x, use_reentrant=True)
        return x


def _tied(strategy: mirrored.Strategy) -> list[Tensor]:
    with strategy.scope():
        torch.manual_seed(0)
        model = _Tied()
    x, _ = make_data(6)
    index = strategy.topology.index
    for _ in range(3):
        model.zero_grad()
        own = x[3 * index : 3 * index + 3].clone().requires_grad_()
        strategy.run(lambda own=own: model(own).square().sum().backward())
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_a_layer_in_two_reentrant_checkpoints_is_averaged_once_it_is_complete() -> None:
    results = towers(_tied)
    torch.manual_seed(0)
    model = _Tied()
    x, _ = make_data(6)
    model(x.clone().requires_grad_()).square().sum().backward()
    expected = [p.grad / 2 for p in model.parameters() if p.grad is not None]
    for averaged in results:
        for a, b in zip(averaged, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
