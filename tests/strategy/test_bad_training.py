"""Values, losses and data that cannot be right: each ends on all towers, with one text, quickly."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import mirrored
from tests.support.datasets import Streamed
from tests.support.jobs import all_raise, text_of, towers
from tests.support.logs import Records


def disagree(strategy: mirrored.Strategy, call: str, row: int) -> list[str]:
    """Values that a backend would mix up (28: equally many bytes) or abort on (29), small and large."""
    said = []
    for length in (2, 1000):
        other = strategy.topology.index == 1
        value = torch.ones(length)
        if row == 28 and other:
            value = value.to(torch.int32)
        if row == 29 and other:
            value = torch.ones(length, 2) if "gather" in call else torch.ones(length + 1)
        args = (value, 0) if "gather" in call else ("sum", value)
        if call.startswith("all"):
            exchange = lambda args=args: getattr(mirrored.get_replica_context(), call)(*args)  # noqa: E731
            said.append(text_of(mirrored.DisagreementError, strategy.run, exchange))
        else:
            said.append(text_of(mirrored.DisagreementError, getattr(strategy, call), *args))
    assert strategy.reduce("sum", 1) == 2, "the towers are in step after it"
    return said


@pytest.mark.row(28, 29)
@pytest.mark.parametrize("row", [28, 29], ids=["equal bytes of another dtype", "sizes"])
@pytest.mark.parametrize("call", ["reduce", "gather", "all_reduce", "all_gather"])
def test_values_that_differ(call: str, row: int) -> None:
    first, second = towers(disagree, call, row)
    assert first == second
    for text, length in zip(first, (2, 1000), strict=True):
        there = "torch.int32" if row == 28 else rf"shape \({length}, 2\)" if "gather" in call else rf"\({length + 1},\)"
        assert re.search(rf"{there}.* on tower 1, but torch.float32 of shape \({length},\) on tower 0", text), text


def loss_with_a_shape(strategy: mirrored.Strategy) -> None:
    model = strategy.mirror(nn.Linear(1, 1))
    strategy.run(lambda: model(torch.ones(3, 1)).backward())


@pytest.mark.row(34)
def test_loss_is_no_scalar() -> None:
    all_raise(RuntimeError, "grad can be implicitly created only for scalar outputs", loss_with_a_shape)


def small_batches(strategy: mirrored.Strategy) -> tuple[list[list[int]], list[str]]:
    records = Records()
    logging.getLogger("mirrored").addHandler(records)
    data = strategy.distribute_dataset(range(5), 2)
    seen = [x.tolist() for x in data] + [x.tolist() for x in data]
    strategy.distribute_dataset(torch.arange(7), 3)
    for size, options in ((8, {"stand_in": True}), (8, {"drop_last": True}), (9, {}), (8, {"stand_in": True})):
        strategy.distribute_dataset(range(size), 6, **options)
    return seen, [message for message in records.messages if "without examples" in message]


@pytest.mark.row(37)
def test_global_batch_smaller_than_the_tower_count() -> None:
    results = towers(small_batches, count=3)
    assert results[0][0] == [[0], [2], [4]] * 2
    assert results[1][0] == [[1], [3], []] * 2
    assert results[2][0] == [[], [], []] * 2
    said = [messages for _, messages in results]
    assert said[1:] == [[], []]
    text, other, with_stand_in = said[0]
    assert text.startswith(
        "the global batch (range, 5 examples) has 2 examples for 3 towers, which leaves 1 tower without examples"
    )
    assert other.startswith(
        "the last batch of an epoch (Tensor, 7 examples) has 1 example for 3 towers, which leaves 2 towers without"
    )
    assert with_stand_in.startswith(
        "the last batch of an epoch (range, 8 examples) has 2 examples for 3 towers, which leaves 1 "
    )
    assert ["stand_in=True" in message for message in said[0]] == [True, True, False]


def different_lengths(strategy: mirrored.Strategy, kind: str) -> list[list[int]]:
    r = strategy.topology.index
    data: dict[str, Callable[[], Any]] = {
        "map": lambda: strategy.distribute_dataset(range(10 + 4 * r), 4),
        "stream": lambda: strategy.distribute_dataset(Streamed(range(8 + 4 * r)), 4),
        "empty pipeline": lambda: strategy.distribute_datasets_from_function(lambda _: [torch.ones(1)] * r),
        "pipeline": lambda: strategy.distribute_datasets_from_function(
            lambda context: [torch.tensor([10 * context.input_pipeline_id + i]) for i in range(1 + 2 * r)]
        ),
    }
    return [x.tolist() for x in data[kind]()]


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("map", mirrored.DisagreementError, "different data, settings .*'examples': 14.* on tower 1, .*10"),
        ("stream", mirrored.DisagreementError, "the stream has ended after 2 batches on tower 0"),
        ("empty pipeline", ValueError, "the pipeline of tower 0 has no batch at all"),
    ],
)
@pytest.mark.row(38)
def test_different_numbers_of_steps_are_refused(kind: str, error: type[Exception], words: str) -> None:
    all_raise(error, words, different_lengths, kind, same=True)


@pytest.mark.row(38)
def test_pipelines_of_different_lengths_are_agreed_on() -> None:
    assert towers(different_lengths, "pipeline") == [[[0], [], []], [[10], [11], [12]]]


def losses_of_data_that_are_not_distributed(strategy: mirrored.Strategy) -> list[str]:
    """What is said of towers with the same examples, and then of towers with their own."""
    records = Records()
    logging.getLogger("mirrored").addHandler(records)
    for tower in (0, strategy.topology.index):
        x = torch.arange(3.0) + tower
        for _ in range(2):
            strategy.run(lambda batch: mirrored.compute_average_loss(batch["x"] + torch.rand(3)), args=({"x": x},))
        strategy.known_shares.compared_examples = False
    return records.messages


@pytest.mark.row(79)
def test_towers_that_were_given_the_same_examples() -> None:
    (same, own), others = towers(losses_of_data_that_are_not_distributed)
    assert same.startswith("all 2 towers received the same 3 examples in their first step")
    assert own.startswith("compute_average_loss got no batch from strategy.distribute_dataset")
    assert others == []


@pytest.mark.row(80)
def test_data_that_are_shuffled_anew_for_each_epoch(caplog: pytest.LogCaptureFixture) -> None:
    strategy, rows = mirrored.OneDeviceStrategy("cpu"), torch.arange(4)
    for _ in range(3):  # the warning is logged once, for the second epoch, which repeats the order of the first
        assert strategy.distribute_dataset((rows, rows), 2, shuffle=True)
        assert strategy.distribute_dataset(rows.clone(), 2, shuffle=True)
        assert strategy.distribute_dataset(rows, 2)
    for seed in range(2):
        assert strategy.distribute_dataset(rows, 2, shuffle=True, seed=7 + seed)
    assert [text.partition(" for the same data")[0] for text in caplog.messages] == [
        "distribute_dataset(…, shuffle=True) was called again"
    ]


def test_data_that_cannot_be_distributed() -> None:
    strategy = mirrored.OneDeviceStrategy()
    twice = DataLoader(range(4), 2, sampler=DistributedSampler(range(4), 2, 0))
    for arguments, options, error, words in (
        ((range(3),), {}, ValueError, "global_batch_size is missing"),
        (([torch.ones(4, 2), torch.ones(4)], 2), {}, ValueError, r"shapes \(4, 2\) and \(4,\).*: .* give a tuple"),
        ((range(3), 0), {}, ValueError, "global_batch_size is 0, but must be a whole number from 1"),
        ((iter([1]), 2), {}, TypeError, "no __getitem__ and __len__.*distribute_datasets_from_function"),
        ((Streamed(range(3)), 2), {"shuffle": True}, ValueError, "its own order: shuffle inside it"),
        ((DataLoader(range(4), 2), 4), {}, ValueError, "batch_size, which is the global one, is 2"),
        ((DataLoader(range(4), 2),), {"shuffle": True}, ValueError, "belong to the DataLoader"),
        ((twice,), {}, ValueError, "has a DistributedSampler, so its data would be split twice"),
    ):
        with pytest.raises(error, match=words):
            strategy.distribute_dataset(*arguments, **options)
    with pytest.raises(ValueError, match="state of a distributed dataset: step is -1"):
        strategy.distribute_dataset(range(3), 2).load_state_dict({"seed": 0, "epoch": 0, "step": -1})
