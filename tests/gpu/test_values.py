"""Checks, values, data and random numbers on an NVIDIA GPU. Every test skips cleanly without one."""

from __future__ import annotations

import json

import pytest
import torch

import mirrored
from tests.accelerator import cases, stream_cases
from tests.gpu.pairs import on_one_gpu, program_of, start_pair

pytestmark = pytest.mark.gpu


def test_a_changed_bit_is_found_later() -> None:
    """Where the towers end, the last of them finds it again, and fails."""
    ranks = start_pair(program_of(cases.find_a_changed_bit), limit=120, patience=20)
    assert sorted(rank.code or 0 for rank in ranks) == [0, 1], ranks
    cases.check_changed_bit([json.loads(rank.out.splitlines()[-1]) for rank in ranks])


def test_values() -> None:
    assert on_one_gpu(cases.values) == [cases.VALUES] * 2


def test_rows_of_every_kind() -> None:
    assert on_one_gpu(cases.gather_shapes) == [9, 9]


def test_a_metric_of_the_cpu_is_moved() -> None:
    assert on_one_gpu(cases.average_by_a_metric) == [3.0, 3.0]


def test_a_nan_is_named() -> None:
    first, second = on_one_gpu(cases.train_into_nan)
    assert first == second
    assert "(nan on tower 1)" in first


def test_a_checkpoint_is_copied_without_waiting_for_each_tensor() -> None:
    on_one_gpu(stream_cases.a_checkpoint_is_copied)
    on_one_gpu(stream_cases.bytes_are_copied)


def test_data_in_a_scope() -> None:
    assert on_one_gpu(stream_cases.data_in_a_scope) == [20, 20]


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
    torch.cuda.synchronize()  # on the stream of the capture, torch sets the seed that the first replay would replace
    for _ in range(3):
        strategy.run(graph.replay)
        inside.append(drawn.tolist())
        outside.append(draw())
    assert outside == expected
    numbers = [number for numbers in inside for number in numbers]
    assert len(set(numbers)) == len(numbers)
    assert set(numbers).isdisjoint(number for numbers in outside for number in numbers)
