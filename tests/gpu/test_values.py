"""Checks, values, data and random numbers on an NVIDIA GPU. Every test skips cleanly without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from torch.utils.data import TensorDataset

import mirrored
from tests.gpu.pairs import on_one_gpu
from tests.support.jobs import make_data, make_mlp
from towers.mirroring.extremes import extremes

pytestmark = pytest.mark.gpu


def find_a_changed_bit() -> list[Any]:
    """The run in which a change before run 12 is an error, that error, and the one of a check at once."""
    strategy = mirrored.MirroredStrategy(seed=0, mirror_check_interval=6)
    with strategy.scope():
        model = make_mlp(torch.float32).to(strategy.device)
        large = torch.nn.Linear(300, 200, device=strategy.device)
    optimizer = torch.optim.Adam([*model.parameters(), *large.parameters()], lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        (model(torch.ones(2, 5, device=strategy.device)).sum() + large.weight.square().sum()).backward()
        optimizer.step()

    run, texts = 0, []
    try:
        for run in range(1, 40):
            if run == 12:
                strategy.check_mirrored()
                if strategy.topology.index == 1:
                    large.weight.data.view(torch.int32)[100, 7] ^= 1
            strategy.run(step)
    except mirrored.MirrorError as error:
        texts.append(str(error))
    try:
        strategy.check_mirrored()
    except mirrored.MirrorError as error:
        texts.append(str(error))
    return [run, *texts]


def test_a_changed_bit_is_found_later() -> None:
    first, second = on_one_gpu(find_a_changed_bit)
    assert first == second
    run, later, at_once = first
    assert run == 18  # where the check after the one that found it is due
    words = "parameter Linear.weight is no longer the same on all towers: tower 0 differs from tower 1."
    assert later.startswith(words)
    assert "when run 12 began; the towers were equal when run 10 began" in later
    assert at_once.startswith(words)


def gather_shapes() -> int:
    """Rows of every kind of tensor."""
    comm = mirrored.MirroredStrategy(seed=0).communicator

    def of(tower: int) -> list[Tensor]:
        numbers = torch.arange(12, device=comm.device).view(3, 4) * (tower + 1)
        others = [numbers.to(dtype) for dtype in (torch.float64, torch.bfloat16, torch.uint8, torch.complex64)]
        return [numbers[1, 1], numbers[:0], numbers.t(), numbers[:, ::2], numbers > 5, *others]

    for kind, mine in enumerate(of(comm.index)):
        expected = torch.stack([of(tower)[kind] for tower in range(comm.size)])
        pending, rows = comm.start_all_gather(mine)
        assert torch.equal(comm.all_gather(mine), expected), kind
        pending.wait()
        assert torch.equal(rows, expected), kind
    return len(of(0))


def test_rows_of_every_kind() -> None:
    assert on_one_gpu(gather_shapes) == [9, 9]


def train_into_nan() -> str:
    strategy = mirrored.MirroredStrategy(seed=0, nonfinite_gradients="raise")
    with strategy.scope():
        model = make_mlp(torch.float32).to(strategy.device)
    factor = float("nan") if strategy.topology.index == 1 else 1.0
    try:
        strategy.run(lambda: (model(torch.ones(2, 5, device=strategy.device)).sum() * factor).backward())
    except mirrored.NonFiniteGradientError as error:
        return str(error)
    return ""


def test_a_nan_is_named() -> None:
    first, second = on_one_gpu(train_into_nan)
    assert first == second
    assert "(nan on tower 1)" in first


def test_values_and_data_in_a_scope() -> None:
    """Where tensors are made on the GPU if nobody says where."""
    strategy = mirrored.OneDeviceStrategy("cuda:0", seed=0)
    with strategy.scope():
        assert strategy.reduce("mean", 3) == 3
        assert strategy.gather(torch.ones(2, 3)).device == strategy.device
        data = strategy.distribute_dataset(
            TensorDataset(*make_data(40, torch.float32)), 12, shuffle=True, num_workers=1
        )
        inside = list(data)
    for batch, again in zip(inside, data, strict=True):
        assert [tensor.device for tensor in batch] == [strategy.device] * 2
        assert batch[0].shape == again[0].shape
    assert sum(len(x) for x, _ in inside) == 40


def test_extremes_on_several_devices() -> None:
    tensors = [torch.tensor([-2.0, 1.0]), torch.full((1000,), 3.0, device="cuda:0")]
    for _ in range(3):
        torch.cuda._sleep(10**8)
        tensors[1] += 1
        assert extremes(tensors).tolist() == [2, float(tensors[1][0])]


def test_batches_are_copied_ahead_and_arrive_whole() -> None:
    strategy = mirrored.OneDeviceStrategy("cuda:0")
    numbers = torch.arange(400_000, dtype=torch.float32).view(400, 1000)
    seen = []
    for (batch,) in strategy.distribute_dataset(TensorDataset(numbers), 16):
        assert batch.device == strategy.device
        for _ in range(20):
            batch = batch * 1.0
        seen.append(batch.cpu())
    assert torch.equal(torch.cat(seen), numbers)


def test_what_cannot_be_pinned_arrives_too() -> None:
    strategy = mirrored.OneDeviceStrategy("cuda:0")
    numbers = torch.arange(12.0, device=strategy.device).view(6, 2)
    seen = [batch for (batch,) in strategy.distribute_dataset(TensorDataset(numbers), 2)]
    assert torch.equal(torch.cat(seen), numbers)

    def collate(examples: list[Tensor]) -> tuple[Any, Tensor, Tensor]:
        rows = torch.stack(examples)
        return pack_sequence(examples), rows.to_sparse(), rows[:1].expand(2, 2)

    data = strategy.distribute_dataset(list(numbers.cpu()), 2, collate_fn=collate)
    for at, (packed, sparse, expanded) in enumerate(data):
        rows = numbers[2 * at : 2 * at + 2]
        assert packed.batch_sizes.device.type == "cpu"
        assert torch.equal(pad_packed_sequence(packed, batch_first=True)[0], rows)
        assert torch.equal(sparse.to_dense(), rows)
        assert torch.equal(expanded, rows[:1].expand(2, 2))


def test_random_numbers_outside_run_do_not_depend_on_what_run_draws() -> None:
    """Also where a graph draws that was captured in a run, and replayed in others."""
    strategy = mirrored.OneDeviceStrategy("cuda:0", seed=0)
    drawn = torch.empty(3, device=strategy.device)

    def draw() -> list[float]:
        return torch.rand(3, device=strategy.device).tolist()

    torch.cuda.manual_seed(1)
    expected = [draw() for _ in range(4)]
    strategy.run(draw)
    torch.cuda.manual_seed(1)
    graph = torch.cuda.CUDAGraph()
    inside, outside = [strategy.run(draw)], [draw()]
    with torch.cuda.graph(graph):
        strategy.run(lambda: drawn.uniform_())
    for _ in range(3):
        strategy.run(graph.replay)
        inside.append(drawn.tolist())
        outside.append(draw())
    assert outside == expected
    numbers = [number for numbers in inside for number in numbers]
    assert len(set(numbers)) == len(numbers)
    assert set(numbers).isdisjoint(number for numbers in outside for number in numbers)
