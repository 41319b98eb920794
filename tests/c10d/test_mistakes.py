"""Mistakes on the c10d backend: errors that all ranks are told, quickly."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mirrored
import towers.backend
from tests.c10d.ranks import ranks
from towers.errors import (
    ArgumentError,
    CollectiveTimeoutError,
    DisagreementError,
    PeerLostError,
    StartupError,
    TowersError,
)


def mistakes() -> None:
    size = dist.get_world_size()
    four = torch.ones(4)
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: dist.all_reduce(four, dist.ReduceOp.BAND), r"all_reduce: cannot use ReduceOp.BAND with torch.float32"),
        (lambda: dist.all_reduce(four, dist._make_nccl_premul_sum(2.0)), r"ReduceOp.PREMUL_SUM is not supported"),
        (lambda: dist.broadcast(four.to_sparse(), 0), r"broadcast: takes dense tensors, not torch.sparse_coo"),
        (lambda: dist.all_reduce(four.to_sparse(), dist.ReduceOp.MAX), r"sparse tensors can only be summed"),
        (lambda: dist.all_gather([four], four), r"all_gather: takes one tensor for each of the 2 ranks, not 1"),
        (lambda: dist.all_gather_into_tensor(four, four), r"has 4 elements where 8 are needed"),
        (lambda: dist.reduce_scatter_tensor(four, four), r"has 4 elements where 8 are needed"),
        (lambda: dist.all_to_all_single(four, four, [1, 2], [2, 2]), r"\[1, 2\] do not sum to .* 4"),
        (
            lambda: dist.all_to_all_single(torch.ones(4 + size), four, [4, 2], [2, 2]),
            r"tower \d gives 8 bytes to tower",
        ),
        (lambda: dist.all_reduce(torch.empty(3, device="meta")), r"takes tensors on the CPU.*cpu:towers_shm,cuda:nccl"),
        (lambda: dist.all_reduce(torch.ones(3).to(torch.uint16)), r"cannot use ReduceOp.SUM with torch.uint16"),
    ]
    for number, (call, text) in enumerate(wrong):
        with pytest.raises(TowersError, match=text):
            call()
        value = torch.tensor([number])
        dist.all_reduce(value)  # and the group goes on
        assert value.item() == size * number
    with pytest.raises(ArgumentError, match="takes no options"):
        dist.new_group(pg_options=dist.ProcessGroupGloo._Options())
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    with pytest.raises(TowersError, match="tower 1 all_reduce sum 4 float32, tower 0 all_reduce sum 3 float32"):
        dist.all_reduce(torch.ones(3 + dist.get_rank()))
    dist.all_reduce(four)
    assert four.tolist() == [size] * 4


def disagree() -> None:
    rank = dist.get_rank()
    calls: list[tuple[Callable[[], Any], Callable[[], Any], str]] = [
        (lambda: dist.all_reduce(torch.ones(3)), lambda: dist.all_reduce(torch.ones(4)), "all_reduce sum [34] float32"),
        (lambda: dist.all_reduce(torch.ones(3)), dist.barrier, "(all_reduce sum 3 float32|barrier)"),
        (lambda: dist.broadcast(torch.ones(3), 0), lambda: dist.broadcast(torch.ones(3), 1), "broadcast from [01]"),
        (lambda: dist.all_reduce(torch.ones(0)), lambda: dist.all_reduce(torch.ones(0).int()), "all_reduce sum 0"),
    ]
    for one, other, text in calls:
        group = dist.new_group()
        dist.group.WORLD, world = group, dist.group.WORLD
        with pytest.raises(DisagreementError, match=f"rank {1 - rank} {text}.*, rank {rank} {text}"):
            (one if rank == 0 else other)()
        dist.group.WORLD = world


def test_ranks_that_call_different_things_are_told() -> None:
    ranks(disagree)


def test_mistakes_are_errors_on_all_ranks_and_the_group_goes_on() -> None:
    ranks(mistakes)


def wait_in_vain() -> None:
    alone: Any = dist.new_group()
    dist.barrier()  # both have formed it, so its seconds are those of rank 0's calls alone
    if dist.get_rank() == 0:
        for part, name in (
            (alone, "_seconds"),
            (alone._comm.regions.barrier, "_timeout"),
            (alone._mailbox, "_seconds"),
        ):
            assert getattr(part, name) > 2
            setattr(part, name, 2.0)
        with pytest.raises(CollectiveTimeoutError, match=r"ranks \[0, 1\] in barrier: Timed out .* rank 1 nothing"):
            dist.barrier(alone)
        with pytest.raises(TowersError, match="all_reduce: the group has failed before"):
            dist.all_reduce(torch.ones(1), group=alone)
        with pytest.raises(CollectiveTimeoutError, match="waited 2 s for a message from tower 1 with tag 3"):
            dist.recv(torch.ones(1), 1, group=alone, tag=3)
    dist.barrier()


@pytest.mark.extended
def test_who_waits_in_vain_is_told() -> None:
    ranks(wait_in_vain)


def die_while_others_wait() -> None:
    rank = dist.get_rank()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    elif rank == 0:
        dist.all_reduce(torch.ones(100_000), async_op=True).wait()
    else:
        dist.recv(torch.ones(5), 1)


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(mirrored.TowerFailedError) as caught:
        ranks(die_while_others_wait, count=3)
    assert caught.value.tower == 1
    others = {failure.tower: failure for failure in caught.value.failures if failure.tower != 1}
    assert sorted(others) == [0, 2]
    for failure in others.values():
        assert isinstance(failure.exception, PeerLostError)
        assert "tower 1 (process" in str(failure.exception)


def on_two_hosts() -> str:
    os.environ["NCCL_HOSTID"] = os.environ["RANK"]
    with pytest.raises(StartupError) as caught:
        dist.init_process_group("towers_shm")
    return str(caught.value)


def test_ranks_of_two_hosts_are_refused_on_both() -> None:
    said = mirrored.launch(on_two_hosts, devices=["cpu:0", "cpu:1"])
    assert said[0] == said[1]
    assert "the ranks of a group cannot share memory (the towers run on several hosts)" in said[0]


def test_registering_again_does_nothing() -> None:
    towers.backend.register()
    assert dist.Backend.backend_list.count("towers_shm") == 1
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
