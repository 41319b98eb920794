"""N towers compute what one device computes, ragged and empty shares included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import mirrored
from tests.support.jobs import assert_close, make_data, make_mlp, parameters_of, towers

EXAMPLES, GLOBAL_BATCH, EPOCHS, L2 = 66, 32, 2, 0.01


def penalty(model: torch.nn.Module) -> Tensor:
    return L2 * sum((p**2).sum() for p in model.parameters())


def on_a_single_device(dtype: torch.dtype) -> list[Tensor]:
    """The reference: a plain PyTorch loop with a mean loss."""
    model, (x, y) = make_mlp(dtype), make_data(EXAMPLES, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(EPOCHS):
        for start in range(0, EXAMPLES, GLOBAL_BATCH):
            optimizer.zero_grad()
            batch = slice(start, start + GLOBAL_BATCH)
            (F.cross_entropy(model(x[batch]), y[batch]) + penalty(model)).backward()
            optimizer.step()
    return parameters_of(model)


def on_towers(strategy: mirrored.Strategy, dtype: torch.dtype) -> tuple[list[Tensor], list[int]]:
    with strategy.scope():
        # Tower 0's values must win: the others start elsewhere.
        model = make_mlp(dtype, seed=strategy.topology.index)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = strategy.distribute_dataset(TensorDataset(*make_data(EXAMPLES, dtype)), GLOBAL_BATCH)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        per_example = F.cross_entropy(model(x), y, reduction="none")
        loss = mirrored.compute_average_loss(per_example) + mirrored.scale_regularization_loss(penalty(model))
        loss.backward()
        optimizer.step()

    sizes = []
    for _ in range(EPOCHS):
        for x, y in data:
            sizes.append(len(x))
            strategy.run(step, args=(x, y))
    return parameters_of(model), sizes


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_parameters_equal_the_single_device_run(count: int, dtype: torch.dtype, tolerance: float) -> None:
    expected = on_a_single_device(dtype)
    results = towers(on_towers, dtype, count=count)
    for parameters, _ in results:
        assert_close(parameters, expected, tolerance)
        assert all(torch.equal(a, b) for a, b in zip(parameters, results[0][0], strict=True)), "towers differ"
    if count == 5:
        assert [sizes[2] for _, sizes in results] == [1, 1, 0, 0, 0]


def plain_mean_and_ddp(strategy: mirrored.Strategy) -> tuple[list[Tensor], list[Tensor]]:
    """A script written for DDP, with ``loss.mean()``, under both: same data, same start."""
    x, y = make_data(32, torch.float32)
    own = slice(16 * strategy.topology.index, 16 * (strategy.topology.index + 1))
    ours = strategy.mirror(make_mlp(torch.float32))
    theirs = make_mlp(torch.float32)
    ddp = DistributedDataParallel(theirs)
    trained = []
    for model, called in ((ours, ours), (theirs, ddp)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def step(called=called, optimizer=optimizer) -> None:
            optimizer.zero_grad()
            F.cross_entropy(called(x[own]), y[own]).backward()
            optimizer.step()

        for _ in range(5):
            strategy.run(step) if model is ours else step()
        trained.append(parameters_of(model))
    return trained[0], trained[1]


def test_a_plain_mean_loss_gives_the_bits_of_ddp() -> None:
    # All parameters fit into one bucket in both, so the layout is the same.
    for ours, ddp in towers(plain_mean_and_ddp):
        assert all(torch.equal(a, b) for a, b in zip(ours, ddp, strict=True))
