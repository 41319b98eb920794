"""Partitioners, with the cases of TensorFlow's ``sharded_variable_test``, and which server gets which part."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from mirrored.parameter_server.layout import join_state, lay_out, split_state
from mirrored.parameter_server.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)


@pytest.mark.parametrize(
    ("partitioner", "shape", "shards"),
    [
        (FixedShardsPartitioner(2), (10, 3), [2, 1]),
        (FixedShardsPartitioner(2), (1, 3), [1, 1]),
        (FixedShardsPartitioner(2), (10,), [2]),
        (MinSizePartitioner(min_shard_bytes=4, max_shards=2), (6, 1), [2, 1]),
        (MinSizePartitioner(min_shard_bytes=4, max_shards=6), (6, 1), [6, 1]),
        (MinSizePartitioner(min_shard_bytes=8, max_shards=6), (6, 1), [3, 1]),
        (MinSizePartitioner(min_shard_bytes=9, max_shards=6), (6, 1), [3, 1]),
        (MinSizePartitioner(), (1 << 20, 1), [1, 1]),
        (MaxSizePartitioner(max_shard_bytes=4), (6, 1), [6, 1]),
        (MaxSizePartitioner(max_shard_bytes=4, max_shards=2), (6, 1), [2, 1]),
        (MaxSizePartitioner(max_shard_bytes=1024), (6, 1), [1, 1]),
        (MaxSizePartitioner(max_shard_bytes=1), (6, 2), [6, 1]),
    ],
)
def test_how_many_shards(partitioner: Partitioner, shape: tuple[int, ...], shards: list[int]) -> None:
    assert partitioner(shape, torch.float32) == shards


@pytest.mark.parametrize(
    ("rows", "shards", "sizes"), [(13, 5, [3, 3, 3, 2, 2]), (4, 2, [2, 2]), (3, 3, [1, 1, 1]), (5, 1, [5])]
)
def test_the_first_shards_have_a_row_more(rows: int, shards: int, sizes: list[int]) -> None:
    model = nn.Linear(2, rows, bias=False)
    (variable,) = lay_out(named(model), 0, set(), set(), turns(1), FixedShardsPartitioner(shards))
    assert [len(part.of(model.weight)) for part in variable.parts] == sizes


def named(model: nn.Module) -> dict[Tensor, str]:
    return {p: name for name, p in model.named_parameters()}


def turns(servers: int) -> Iterator[int]:
    return itertools.cycle(range(servers))


def test_parts_of_sparse_gradients() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([4, 0, 3, 4])).sum().backward()
    (variable,) = lay_out(named(table), 0, set(), set(), turns(2), FixedShardsPartitioner(2))
    gradient = table.weight.grad
    assert gradient is not None
    parts = [part.of(gradient) for part in variable.parts]
    assert [part.coalesce().indices().tolist() for part in parts] == [[[0]], [[0, 1]]]
    assert torch.equal(torch.cat([part.to_dense() for part in parts]), gradient.to_dense())


def test_servers_take_turns() -> None:
    model = nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 1))
    variables = lay_out(named(model), 0, set(), set(), turns(3), FixedShardsPartitioner(2))
    placed = [[(part.start, part.end, part.server) for part in variable.parts] for variable in variables]
    assert placed == [[(0, 3, 0), (3, 5, 1)], [(0, 3, 2), (3, 5, 0)], [(0, 0, 1)], [(0, 0, 2)]]
    whole = lay_out(named(model), 0, set(), set(), turns(3), None)
    assert [variable.parts[0].server for variable in whole] == [0, 1, 2, 0]


@pytest.mark.parametrize("shards", [[1, 2], [2], [6, 1], [0, 1]])
def test_only_rows_are_cut(shards: list[int]) -> None:
    with pytest.raises(ValueError, match=r"splits weight, of shape \(5, 2\), into .* along dimension 0 only"):
        lay_out(named(nn.Linear(2, 5, bias=False)), 0, set(), set(), turns(2), lambda shape, dtype: shards)


def test_what_has_no_shape_yet_has_no_place() -> None:
    with pytest.raises(RuntimeError, match="weight has no shape yet: call its model in the scope"):
        lay_out(named(nn.LazyLinear(2)), 0, set(), set(), turns(1), None)


def test_state_of_parts_is_that_of_the_whole() -> None:
    model = nn.Linear(3, 5, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    (variable,) = lay_out(named(model), 0, set(), set(), turns(2), FixedShardsPartitioner(2))
    state = optimizer.state[model.weight]
    parts = [(part, split_state(state, model.weight, part)) for part in variable.parts]
    assert [entry["exp_avg"].shape[0] for _, entry in parts] == [3, 2]
    torch.testing.assert_close(join_state(parts, model.weight), dict(state), rtol=0, atol=0)
