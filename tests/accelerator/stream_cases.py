"""Batches, random numbers and streams of towers on any accelerator; as :mod:`tests.accelerator.cases`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from torch.utils.data import TensorDataset

import mirrored
from mirrored.checkpoint.tensors import FileLayout
from tests import simulated_device
from tests.accelerator.cases import SIMULATED, flat, waiting_is_an_error
from tests.support.jobs import make_data, make_mlp
from towers.system.tensors import CopyFromDevices, extremes


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
    width, times = (10, 5) if SIMULATED else (1000, 20)
    numbers = torch.arange(400.0 * width).view(400, width)
    seen = []
    for (batch,) in strategy.distribute_dataset(TensorDataset(numbers), 16):
        assert batch.device == strategy.device
        for _ in range(times):
            batch = batch * 1.0
        seen.append(batch.cpu())
    return torch.equal(torch.cat(seen), numbers)


def a_checkpoint_is_copied() -> None:
    """Tensors of many kinds and sizes come to the host without waiting for each of them."""
    device = mirrored.MirroredStrategy().device
    numbers = torch.arange(24.0, device=device)
    tensors = {
        **{f"small {count}": torch.full((count,), count, device=device) for count in range(40)},
        "on the host": torch.arange(5),
        "columns": numbers.view(4, 6).t(),
        "every second": numbers[::2],
        "half": numbers.to(torch.bfloat16),
        "complex": torch.complex(numbers, -numbers),
        "flags": numbers > 5,
        "large": torch.arange(300_000, device=device),
        "empty": numbers[:0],
        "one": numbers[3],
    }
    layout = FileLayout(tensors)
    memory = torch.zeros(layout.nbytes, dtype=torch.uint8, device="cpu")
    with waiting_is_an_error():
        layout.copy_to(memory)
    _, *pieces = layout.pieces()
    assert b"".join(pieces) == bytes(memory.numpy())


def bytes_are_copied() -> None:
    """Several buffers are filled in turn, with tensors that are smaller and larger than a buffer."""
    device = mirrored.MirroredStrategy().device
    sources = [torch.randint(0, 256, (count,), dtype=torch.uint8, device=device) for count in (0, 1, 7, 8, 9, 30, 3, 8)]
    for nbytes in (8, 1000):
        targets = [torch.zeros(len(source), dtype=torch.uint8, device="cpu") for source in sources]
        copies = CopyFromDevices(nbytes)
        with waiting_is_an_error():
            for source, target in zip(sources, targets, strict=True):
                copies.add(source, target)
            copies.finish()
        assert all(torch.equal(source.cpu(), target) for source, target in zip(sources, targets, strict=True))


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


def extremes_on_several_devices() -> bool:
    """Values of the device that are computed while they are asked for, beside one of the CPU."""
    device = mirrored.MirroredStrategy().device
    tensors = [torch.tensor([-2.0, 1.0]), torch.full((1000,), 3.0, device=device)]
    found = []
    for _ in range(3):
        if not SIMULATED:
            torch.cuda._sleep(10**8)
        tensors[1] += 1
        found.append(extremes(tensors).tolist() == [2, float(tensors[1][0])])
    return all(found)


def what_cannot_be_pinned() -> int:
    """Batches that lie on the device already, packed sequences, sparse tensors, and those whose elements overlap."""
    device = mirrored.MirroredStrategy().device
    strategy = mirrored.OneDeviceStrategy(device)
    numbers = torch.arange(12.0, device=device).view(6, 2)
    seen = [batch for (batch,) in strategy.distribute_dataset(TensorDataset(numbers), 2)]
    assert torch.equal(torch.cat(seen).cpu(), numbers.cpu())

    def collate(examples: list[Tensor]) -> tuple[Any, Tensor, Tensor]:
        rows = torch.stack(examples)
        return pack_sequence(examples), rows[:1].expand(2, 2), rows if SIMULATED else rows.to_sparse()

    data = strategy.distribute_dataset(list(numbers.cpu()), 2, collate_fn=collate)
    for at, (packed, expanded, sparse) in enumerate(data):
        rows = numbers[2 * at : 2 * at + 2].cpu()
        assert packed.batch_sizes.device.type == "cpu"
        assert torch.equal(pad_packed_sequence(packed, batch_first=True)[0].cpu(), rows)
        assert torch.equal(expanded.cpu(), rows[:1].expand(2, 2))
        assert torch.equal(sparse.cpu().to_dense(), rows)
    return len(data)
