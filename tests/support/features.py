"""A training that uses one feature of plain PyTorch at a time, named in ``FEATURES``."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, OneCycleLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import mirrored
from tests.support.jobs import make_data, parameters_of, seeded

Result = dict[str, list[Tensor]]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))


def train(
    strategy: mirrored.Strategy,
    make: Callable[[], nn.Module] = mlp,
    dtype: torch.dtype = torch.float64,
    around_step: Callable[..., None] | None = None,
    schedule: Callable[..., object] | None = None,
    ema: bool = False,
    autocast: bool = False,
    steps: int = 6,
) -> Result:
    """Train on ragged batches of 8 of 21 examples; what a feature changes comes in as arguments."""
    with strategy.scope():
        model = seeded(make)
    model.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = schedule(optimizer) if schedule else None
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if ema else None
    x, y = make_data(21, dtype)
    data = strategy.distribute_dataset(TensorDataset(x, y), 8)
    rates: list[float] = []

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses = F.cross_entropy(model(x).float() if autocast else model(x), y, reduction="none")
        mirrored.compute_average_loss(losses).backward()
        if around_step:
            around_step(model)
        optimizer.step()
        if scheduler:
            scheduler.step()
        if averaged:
            averaged.update_parameters(model)
        rates.append(optimizer.param_groups[0]["lr"])

    done = 0
    while done < steps:
        for batch in data:
            strategy.run(step, args=batch)
            done += 1
    result = {"parameters": parameters_of(model), "rates": [torch.tensor(rates)]}
    if averaged:
        result["ema"] = parameters_of(averaged)
    return result


def train_gan(strategy: mirrored.Strategy) -> list[Tensor]:
    """Two models, two optimizers, two losses in one step: the parameters, and the losses of virtual towers.

    The generator's step goes through the critic, whose gradients nobody wants.
    """
    generator = strategy.mirror(seeded(lambda: nn.Linear(3, 5).double()))
    last = [nn.Dropout(0.2)] if strategy.virtual_towers is not None else []
    critic = seeded(lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), *last, nn.Linear(8, 1), nn.Flatten(0)).double())
    strategy.mirror(critic)
    generator_optimizer, critic_optimizer = (torch.optim.Adam(m.parameters(), 0.01) for m in (generator, critic))
    losses: list[Tensor] = []

    def backward(loss_of: Callable[[Tensor, Tensor], Tensor], *batch: Tensor) -> None:
        if strategy.virtual_towers is not None:
            losses.append(strategy.backward(loss_of, *batch))
        else:
            mirrored.compute_average_loss(loss_of(*batch)).backward()

    def step(real: Tensor, noise: Tensor) -> None:
        critic_optimizer.zero_grad()
        backward(lambda x, z: F.softplus(-critic(x)) + F.softplus(critic(generator(z).detach())), real, noise)
        critic_optimizer.step()
        generator_optimizer.zero_grad()
        backward(lambda x, z: F.softplus(-critic(generator(z))), real, noise)
        generator_optimizer.step()

    noise = torch.randn(41, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for batch in strategy.distribute_dataset(TensorDataset(make_data(41)[0], noise), 16):
        strategy.run(step, args=batch)
    return [*parameters_of(generator), *parameters_of(critic), *losses]


def clip(model: nn.Module) -> None:
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    assert norm > 0.05, "the test must really clip"


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 6, num_layers=2, batch_first=True)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x.unsqueeze(-1))[0][:, -1])


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(checkpoint(self.first, x, use_reentrant=False))


def partly_frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


FEATURES: dict[str, dict[str, object]] = {
    "clip_grad_norm_": {"around_step": clip},
    "StepLR": {"schedule": lambda optimizer: StepLR(optimizer, 2, 0.5)},
    "OneCycleLR": {"schedule": lambda optimizer: OneCycleLR(optimizer, 0.3, total_steps=12)},
    "ExponentialLR": {"schedule": lambda optimizer: ExponentialLR(optimizer, 0.9)},
    # TensorFlow's exponential decay with ``staircase=True``: 0.5 every third step.
    "exponential decay with staircase": {
        "schedule": lambda optimizer: LambdaLR(optimizer, lambda step: 0.5 ** (step // 3))
    },
    "AveragedModel (EMA)": {"ema": True},
    "LSTM": {"make": Recurrent},
    "activation checkpointing": {"make": Checkpointed},
    "frozen layers": {"make": partly_frozen},
}


def with_feature(strategy: mirrored.Strategy, name: str) -> Result:
    return train(strategy, **FEATURES[name])
