"""Checks, values, data and random numbers on an NVIDIA GPU. Every test skips cleanly without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from torch.utils.data import TensorDataset

import mirrored
from tests.accelerator import cases, stream_cases
from tests.gpu.pairs import on_one_gpu
from towers.mirroring.extremes import extremes

pytestmark = pytest.mark.gpu


def test_a_changed_bit_is_found_later() -> None:
    cases.check_changed_bit(on_one_gpu(cases.find_a_changed_bit))


def test_rows_of_every_kind() -> None:
    assert on_one_gpu(cases.gather_shapes) == [9, 9]


def test_a_nan_is_named() -> None:
    first, second = on_one_gpu(cases.train_into_nan)
    assert first == second
    assert "(nan on tower 1)" in first


def test_data_in_a_scope() -> None:
    assert on_one_gpu(stream_cases.data_in_a_scope) == [20, 20]


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
