"""Batches, random numbers and streams of towers on any accelerator; as :mod:`tests.accelerator.cases`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

import mirrored
from tests import simulated_device
from tests.accelerator.cases import SIMULATED, flat
from tests.support.jobs import make_data, make_mlp


def data_in_a_scope() -> int:
    """Where tensors are made on the device if nobody says where."""
    strategy = mirrored.MirroredStrategy(seed=0)
    with strategy.scope():
        assert strategy.reduce("mean", 3) == 3
        assert strategy.gather(torch.ones(2, 3)).device == strategy.device
        dataset = TensorDataset(*make_data(40, torch.float32))
        data = strategy.distribute_dataset(dataset, 12, shuffle=True, num_workers=1)
        inside = list(data)
    for batch, again in zip(inside, data, strict=True):
        assert [tensor.device for tensor in batch] == [strategy.device] * 2
        assert batch[0].shape == again[0].shape
    return sum(len(x) for x, _ in inside)


def batches_arrive_whole() -> bool:
    """Batches that are copied ahead, while the device is busy with the ones before."""
    strategy = mirrored.MirroredStrategy()
    numbers = torch.arange(4_000, dtype=torch.float32).view(400, 10)
    seen = []
    for (batch,) in strategy.distribute_dataset(TensorDataset(numbers), 16):
        assert batch.device == strategy.device
        for _ in range(5):
            batch = batch * 1.0
        seen.append(batch.cpu())
    return torch.equal(torch.cat(seen), numbers)


def random_numbers() -> bool:
    """Numbers outside of run do not depend on what run draws; inside each tower has its own."""
    strategy = mirrored.MirroredStrategy(seed=0)

    def draw() -> list[float]:
        numbers: list[float] = torch.rand(3, device=strategy.device).tolist()
        return numbers

    torch.manual_seed(1)
    expected = [draw() for _ in range(3)]
    strategy.run(draw)
    torch.manual_seed(1)
    inside, outside = [], []
    for _ in range(3):
        inside.append(strategy.run(draw))
        outside.append(draw())
    assert outside == expected
    everybody = strategy.gather(torch.tensor(inside)).flatten().tolist()
    return len(set(everybody)) == len(everybody) == 9 * strategy.num_replicas_in_sync


def gradients_of_two_streams() -> list[float]:
    """Parameters of one bucket whose gradients are computed on two streams, one of them that of a captured part."""
    # The first of two buckets has all of the first model and a little of the second.
    both = mirrored.CommunicationOptions(bucket_bytes=1700)
    strategy = mirrored.MirroredStrategy(communication=both, seed=0)
    with strategy.scope():
        first, second = (make_mlp(seed=seed).to(strategy.device) for seed in (0, 1))
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    data = strategy.distribute_dataset(TensorDataset(*make_data(32)), 8)
    side = torch.Stream(strategy.device)
    with side:  # autograd finishes a gradient on the stream on which the parameter's node was made
        nodes = [p.view_as(p).grad_fn.next_functions[0][0] for p in second.parameters()]

    def step(x: Tensor, y: Tensor) -> None:
        main = torch.accelerator.current_stream(strategy.device)
        optimizer.zero_grad()
        side.wait_stream(main)
        with side:
            beside = second(x)
        main.wait_stream(side)
        losses = F.cross_entropy(first(x) + beside, y, reduction="none")
        mirrored.compute_average_loss(losses).backward()
        optimizer.step()

    for batch in data:
        strategy.run(step, args=batch)
    assert len(nodes) == 4
    return flat([*first.parameters(), *second.parameters()])


def batches_kept_by_queued_copies() -> bool:
    """Batches that nobody holds any more, but that the device has not used yet when the next one is copied."""
    strategy = mirrored.MirroredStrategy()
    numbers = torch.arange(4_000, dtype=torch.float32).view(400, 10)
    if SIMULATED:
        simulated_device.load().run_side_streams_at_once(True)
    seen = []
    for (batch,) in strategy.distribute_dataset(TensorDataset(numbers), 16):
        seen.append(torch.empty(batch.shape, dtype=batch.dtype, device="cpu", pin_memory=True))
        seen[-1].copy_(batch, non_blocking=True)
        del batch
    torch.accelerator.synchronize()
    return torch.equal(torch.cat(seen), numbers)
