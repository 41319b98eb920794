"""``shard_optimizer=True``: the bits of the unsharded step, for each optimizer and around plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import mirrored
from tests.support.features import FEATURES, mlp, train_gan, with_feature
from tests.support.jobs import make_data, parameters_of
from tests.support.sharded import assert_same_bits, assert_same_state, both, equal_unsharded, launch, tensors
from towers.sharding.optimizer import OptimizerSharder

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "SGD fused": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, fused=True),
    "SGD without state": lambda p: torch.optim.SGD(p, 0.05),
    "Adam": lambda p: torch.optim.Adam(p, 0.01),
    "Adam fused": lambda p: torch.optim.Adam(p, 0.01, fused=True),
    "Adam foreach": lambda p: torch.optim.Adam(p, 0.01, foreach=True, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, 0.01, fused=True),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
}


class Awkward(nn.Module):
    """Parameters of all kinds: channels-last, complex, half precision, scalars, tied, sharing memory, unused."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(5)
        self.hidden = nn.Linear(180, 37)
        self.low = nn.Linear(37, 37).to(torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.rotation = nn.Parameter(torch.full((37,), 0.8 + 0.6j))
        self.out = nn.Linear(37, 10)
        self.tied = self.out
        self.twice = nn.Parameter(torch.ones(300))
        self.alias = nn.Parameter(self.twice.data[:37])  # the same memory
        self.strided = nn.Parameter(torch.zeros(74)[::2])
        self.unused = nn.Linear(3, 3)
        self.sometimes = nn.Linear(37, 10)

    def forward(self, x: Tensor, other: bool) -> Tensor:
        x = torch.relu(self.hidden(self.norm(self.conv(x)).flatten(1))) * self.scale
        x = self.low(x.to(torch.bfloat16)).float()
        x = (x * self.rotation).real * self.twice.mean() + self.strided + self.alias
        return self.out(x) + self.tied(x) + (self.sometimes(x) if other else 0)


def train_awkward(strategy: mirrored.Strategy, name: str) -> tuple[list[Tensor], dict[str, Any]]:
    index = strategy.topology.index
    with strategy.scope():
        model = Awkward()
        kwargs = {"foreach": False} if name in ("Adam", "SGD") else {}
        groups = [{"params": list(model.conv.parameters()), "lr": 0.02}]
        groups.append({"params": [p for n, p in model.named_parameters() if not n.startswith("conv")], **kwargs})
        if "fused" in name or name == "Rprop":  # fused kernels and Rprop take no complex numbers
            model.rotation.requires_grad_(False)
        if name == "SGD fused":  # its momenta of bfloat16 are not those of SGD, nor the same for parts (torch 2.13)
            model.low.requires_grad_(False)
        optimizer = OPTIMIZERS[name](groups)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    generator = torch.Generator().manual_seed(7 + index)

    def step(x: Tensor, y: Tensor, other: bool) -> None:
        optimizer.zero_grad()
        losses = F.cross_entropy(model(x, other), y, reduction="none")
        mirrored.compute_average_loss(losses, global_batch_size=5 * strategy.num_replicas_in_sync).backward()
        optimizer.step()
        schedule.step()

    for number in range(6):
        x, y = torch.randn(5, 3, 8, 8, generator=generator), torch.randint(0, 10, (5,), generator=generator)
        strategy.run(step, (x, y, number % 3 == index))
    return [p.detach().clone() for p in model.parameters()], optimizer.state_dict()


@pytest.fixture(scope="module")
def optimizers() -> tuple[list[Any], ...]:
    ours, expected = both(train_awkward, list(OPTIMIZERS))
    return ours, expected, launch(train_awkward, names=list(OPTIMIZERS), central=True)


def assert_same_training(name: str, trained: tuple[list[Any], list[Any]]) -> None:
    for ours, expected in zip(*trained, strict=True):
        assert_same_bits(ours[name][0], expected[name][0])
        assert_same_state(ours[name][1], expected[name][1])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_of_the_unsharded_step(name: str, optimizers: tuple[list[Any], ...]) -> None:
    sharded, unsharded, central = optimizers
    assert_same_training(name, (sharded, unsharded))
    assert_same_training(name, (central, unsharded))


@pytest.mark.parametrize("implementation", ["auto", "gloo"])
def test_the_bits_of_the_unsharded_step_on_three_towers(implementation: str) -> None:
    assert_same_training("AdamW", both(train_awkward, ["AdamW"], implementation=implementation, count=3))


def test_the_bits_of_the_unsharded_step_on_two_hosts() -> None:
    assert_same_training("AdamW", both(train_awkward, ["AdamW"], count=3, hosts="aab"))


@pytest.mark.extended
def test_plain_pytorch_has_the_same_bits() -> None:
    equal_unsharded(with_feature, list(FEATURES), central=True)


def changes(strategy: mirrored.Strategy, what: str) -> list[Tensor]:
    """Changes to model and optimizer between steps."""
    with strategy.scope():
        model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
        other = nn.Linear(5, 3)
        model[2].requires_grad_(what != "thawed")
    optimizer = torch.optim.AdamW(model[:4].parameters(), 0.02)
    rest = torch.optim.SGD([*model[4].parameters(), *other.parameters()], 0.1, momentum=0.9)
    x, y = make_data(40, torch.float32)
    extra: list[nn.Module] = []

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        rest.zero_grad()
        output = model(x.to(model[0].weight.dtype)) + other(x.to(other.weight.dtype))
        for module in extra:
            output = output + module(x)
        mirrored.compute_average_loss(F.cross_entropy(output.float(), y, reduction="none")).backward()
        optimizer.step()
        rest.step()

    for number, batch in enumerate(strategy.distribute_dataset(TensorDataset(x, y), 8)):
        if number == 2:
            if what == "thawed":
                model[2].requires_grad_(True)
            elif what == "another group":
                with strategy.scope():
                    extra.append(nn.Linear(5, 3))
                optimizer.add_param_group({"params": list(extra[0].parameters()), "lr": 0.1})
            elif what == "another model":
                with strategy.scope():
                    extra.append(nn.Linear(5, 3))
            elif what == "another dtype":
                model.double()
                other.double()
                for one in (optimizer, rest):
                    one.load_state_dict(one.state_dict())  # gives the state the parameters' dtype
            elif what == "state again":
                optimizer.load_state_dict(optimizer.state_dict())
        strategy.run(step, batch)
    assert model[0].weight.dtype == (torch.float64 if what == "another dtype" else torch.float32)
    return [*parameters_of(model), *parameters_of(other), *tensors(optimizer), *tensors(rest)]


def test_changes_between_steps() -> None:
    equal_unsharded(changes, ("thawed", "another group", "another model", "another dtype", "state again"), central=True)


def test_two_models_with_two_optimizers() -> None:
    equal_unsharded(train_gan, central=True)


def with_another_strategy(strategy: mirrored.Strategy) -> list[Tensor]:
    """One strategy after another trains a model; the first one is still there."""
    model = mlp()
    options = {} if isinstance(strategy, mirrored.CentralStorageStrategy) else {"shard_optimizer": is_sharded(strategy)}
    for present in (strategy, type(strategy)(**options)):
        present.mirror(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            model(torch.ones(2 + strategy.topology.index, 5)).sum().backward()
            optimizer.step()

        for _ in range(2):
            present.run(step)
    return parameters_of(model)


def is_sharded(strategy: mirrored.Strategy) -> bool:
    return strategy.engine.attached(OptimizerSharder) is not None


def test_one_strategy_after_another() -> None:
    equal_unsharded(with_another_strategy, central=True)


def test_one_tower_has_nothing_to_share_out() -> None:
    strategy = mirrored.MirroredStrategy(["cpu:0"], shard_optimizer=True)
    model = strategy.mirror(mlp())
    optimizer = torch.optim.LBFGS(model.parameters())
    strategy.run(lambda: optimizer.step(lambda: model(torch.ones(2, 5)).sum()))
    assert type(optimizer.state) is not dict
