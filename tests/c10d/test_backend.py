"""The c10d backend: collectives against a reference, messages, groups, DDP and others on it, and what goes wrong."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mirrored
import towers.backend
from tests.collectives.test_shared_memory import DTYPES, agrees, fixed_order, random_tensor
from tests.support.jobs import assert_close, make_data, make_mlp, parameters_of
from tests.support.waiting import at_most, wait_until
from towers.c10d.group import Group
from towers.c10d.store import StoreCommunicator
from towers.errors import (
    ArgumentError,
    CollectiveTimeoutError,
    DisagreementError,
    PeerLostError,
    StartupError,
    TowersError,
)

OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


def ranks(
    fn: Callable[..., Any], *args: Any, count: int = 2, backend: str = "towers_shm", timeout: float = 60.0
) -> Any:
    """``fn(*args)`` on ``count`` ranks of a default group; the results in order."""
    devices = [f"cpu:{i}" for i in range(count)]
    return mirrored.launch(_in_group, (fn, args, backend), devices=devices, timeout=timeout)


def _in_group(fn: Callable[..., Any], args: tuple[Any, ...], backend: str) -> Any:
    dist.init_process_group(backend)
    result = fn(*args)
    dist.destroy_process_group()
    return result


def strided(tensor: Tensor) -> Tensor:
    """The same values, not one after the other in memory."""
    return torch.stack([tensor, torch.zeros_like(tensor)], dim=-1)[..., 0]


# -- collectives ---------------------------------------------------------------------------------------------


def collectives_at_random(rounds: int) -> None:
    """All ranks draw all ranks' values, so each knows the reference."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)

    def pick(among: Any) -> Any:
        return among[int(torch.randint(len(among), (), generator=generator))]

    for number in range(rounds):
        dtype = pick(DTYPES)
        shape = pick([(), (1,), (0,), (7,), (5, 3), (1000, 31), (300_001,)])
        name = pick(list(OPERATIONS)) if not dtype.is_complex else "sum"
        op, root, lay = OPERATIONS[name], pick(range(size)), pick([strided, torch.clone])
        drawn = [random_tensor(generator, (size, *shape), dtype) for _ in range(size)]
        mine, firsts = drawn[rank], [values[0] for values in drawn]
        where = f"round {number}: {dtype} {shape} {name} root {root} {lay.__name__}"

        def close(found: Tensor, parts: list[Tensor], name: str = name, where: str = where) -> None:
            assert agrees(found, fixed_order(parts, name), size), where

        value = lay(mine[0])
        dist.all_reduce(value, op)
        close(value, firsts)
        value = lay(mine[0])
        dist.reduce(value, root, op)
        close(value, firsts) if rank == root else None
        assert rank == root or torch.equal(value, mine[0]), where
        value = lay(mine[0])
        dist.broadcast(value, root)
        assert torch.equal(value, firsts[root]), where
        rows = [lay(torch.zeros_like(mine[0])) for _ in range(size)]
        dist.all_gather(rows, mine[0])
        assert all(map(torch.equal, rows, firsts)), where
        gathered = torch.zeros_like(mine)
        dist.all_gather_into_tensor(gathered, lay(mine[0]))
        assert torch.equal(gathered, torch.stack(firsts)), where
        rows = [torch.zeros_like(mine[0]) for _ in range(size)]
        dist.gather(lay(mine[0]), rows if rank == root else None, root)
        assert rank != root or all(map(torch.equal, rows, firsts)), where
        value = lay(torch.zeros_like(mine[0]))
        dist.scatter(value, list(mine.unbind(0)) if rank == root else None, root)
        assert torch.equal(value, drawn[root][rank]), where
        value = lay(torch.zeros_like(mine[0]))
        dist.reduce_scatter(value, list(lay(mine).unbind(0)), op)
        close(value, [values[rank] for values in drawn])
        value = torch.zeros_like(mine[0])
        if shape:
            dist.reduce_scatter_tensor(value, mine, op)
            close(value, [values[rank] for values in drawn])
        rows = [lay(torch.zeros_like(mine[0])) for _ in range(size)]
        dist.all_to_all(rows, list(lay(mine).unbind(0)))
        assert all(torch.equal(row, values[rank]) for row, values in zip(rows, drawn, strict=True)), where
        value = torch.zeros_like(mine)
        dist.all_to_all_single(value, lay(mine))
        assert torch.equal(value, torch.stack([values[rank] for values in drawn])), where


def uneven() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    lengths = [[100_000 * i + 7 * j for j in range(size)] for i in range(size)]  # from i to j
    sent = torch.cat([torch.full((n,), 10.0 * rank + j) for j, n in enumerate(lengths[rank])])
    came = torch.zeros(sum(row[rank] for row in lengths))
    dist.all_to_all_single(came, sent, [row[rank] for row in lengths], lengths[rank])
    assert torch.equal(came, torch.cat([torch.full((row[rank],), 10.0 * i + rank) for i, row in enumerate(lengths)]))
    rows = [torch.zeros(i + 1) for i in range(size)]
    dist.all_gather(rows, torch.full((rank + 1,), float(rank)))
    assert all(bool((row == i).all()) for i, row in enumerate(rows))


def operations() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    bits = torch.tensor([0b1100 >> rank, 7 + rank])
    for op, expected in (
        (dist.ReduceOp.BAND, [0b1100 & 0b0110 & 0b0011, 7 & 8 & 9]),
        (dist.ReduceOp.BOR, [0b1100 | 0b0110 | 0b0011, 7 | 8 | 9]),
        (dist.ReduceOp.BXOR, [0b1100 ^ 0b0110 ^ 0b0011, 7 ^ 8 ^ 9]),
        (dist.ReduceOp.AVG, [(12 + 6 + 3) // 3, 8]),
    ):
        value = bits.clone()
        dist.all_reduce(value, op)
        assert value.tolist() == expected, op
    flags = torch.tensor([rank == 0, True, False])
    for op, right in ((dist.ReduceOp.MAX, [True, True, False]), (dist.ReduceOp.BAND, [False, True, False])):
        value = flags.clone()
        dist.all_reduce(value, op)
        assert value.tolist() == right
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        value = torch.full((9,), 2.0**14 if dtype == torch.float16 else 1.5 + rank).to(dtype)
        dist.all_reduce(value, dist.ReduceOp.AVG)  # of which the sum would overflow
        assert (value == (2.0**14 if dtype == torch.float16 else 2.5)).all()
    small = torch.tensor([0.5 + rank, 448.0 if rank == 0 else -416.0]).to(torch.float8_e4m3fn)
    dist.all_reduce(small)
    assert small.float().tolist() == [4.5, -384.0]
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, rank]]), torch.tensor([1.0, 2.0]), (size,))
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [3.0 + 2.0, 2.0, 2.0]
    assert sparse.coalesce().values().tolist() == [3.0 + 2.0, 2.0, 2.0]
    leaf = torch.ones(3, requires_grad=True)
    dist.all_reduce(leaf)
    assert leaf.is_leaf
    assert leaf.tolist() == [size] * 3
    with torch.inference_mode():
        inference = torch.ones(3)
    dist.all_reduce(inference, async_op=True).wait()
    assert inference.tolist() == [size] * 3


def all_collectives() -> None:
    collectives_at_random(25)
    uneven()
    operations()


def test_every_collective_equals_a_reference() -> None:
    ranks(all_collectives, count=3)


# -- messages and groups -------------------------------------------------------------------------------------


def messages() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    for numel in (0, 1, 10_000, 3_000_000, 5):
        sent, came = torch.full((numel,), float(rank)), torch.full((numel,), -1.0)
        dist.send(sent, after)  # all send before any receives
        sent.zero_()
        dist.recv(came, before)
        assert torch.equal(came, torch.full((numel,), float(before)))
    for number in range(200):  # more than fit in a stream's memory, received the other way round
        dist.send(torch.full((300,), 1000.0 * rank + number), after, tag=number)
    for number in reversed(range(200)):
        came = strided(torch.zeros(300))
        dist.recv(came, before, tag=number)
        assert bool((came == 1000.0 * before + number).all())
    arriving = [torch.zeros(4) for _ in range(size - 1)]
    works = [dist.irecv(tensor) for tensor in arriving]
    for other in range(size):
        if other != rank:
            dist.isend(torch.full((4,), float(rank)), other).wait()
    dist.barrier()  # nobody has waited for a message yet
    sources = []
    for work, tensor in zip(works, arriving, strict=True):
        work.wait()
        sources.append(work._source_rank())
        assert bool((tensor == sources[-1]).all())
    assert sorted(sources) == [other for other in range(size) if other != rank]
    dist.barrier()  # else what comes next could be received above
    pair = [
        dist.P2POp(dist.irecv, arriving[0], before),
        dist.P2POp(dist.isend, torch.full((4,), 5.0 + rank), after),
    ]
    for work in dist.batch_isend_irecv(pair):
        work.get_future().wait()
    assert bool((arriving[0] == 5 + before).all())
    dist.send(torch.full((3,), 8.0 + rank), after)
    work = dist.irecv(came := strided(torch.zeros(3)), before)
    wait_until(work.is_completed, 10)
    assert came.tolist() == [8.0 + before] * 3
    with pytest.raises(TowersError, match=r"has 8 bytes, but the tensor it is to be received into has 12"):
        dist.send(torch.zeros(2), after)
        dist.recv(torch.zeros(3), before)
    if rank == 0:
        time.sleep(0.5)
        dist.recv(came := torch.zeros(2_000_000), 1)
        assert bool((came == 7).all())
    elif rank == 1:
        dist.send(torch.full((2_000_000,), 7.0), 0)  # and leaves the group with the message still unread


def test_messages_in_all_directions_at_once() -> None:
    ranks(messages, count=3)


def groups() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    pair, others = dist.new_group([2, 0]), dist.new_group([0, 1, 2])
    assert isinstance(others, Group)
    value = torch.tensor([float(rank)])
    if rank != 1:
        dist.all_reduce(value, group=pair)
        assert value.item() == 2
        dist.broadcast(value, 2, group=pair)
    first, second = (dist.group.WORLD, others) if rank == 0 else (others, dist.group.WORLD)
    works = []
    for group in (first, second):  # not in one order on all ranks, which is right for who does not wait
        ones = torch.ones(100_000)
        works.append((dist.all_reduce(ones, group=group, async_op=True), ones))
    for work, ones in works:
        assert work.wait()
        assert work.is_completed()
        assert bool((work.get_future().value()[0] == size).all())
        assert bool((ones == size).all())
    if rank == 0:  # the others come into the collective only when they have the message
        work = dist.all_reduce(value := torch.ones(3), async_op=True)
        for other in range(1, size):
            dist.send(torch.ones(1), other)
        work.wait()
    else:
        dist.recv(torch.zeros(1), 0)
        dist.all_reduce(value := torch.ones(3))
    assert value.tolist() == [size] * 3
    counts = []
    for _ in range(3):
        again = dist.new_group()
        dist.all_reduce(torch.ones(5), group=again, async_op=True).wait()
        dist.destroy_process_group(again)
        dist.barrier()
        counts.append((len(os.listdir("/proc/self/fd")), memory_maps(), threading.active_count()))
    assert counts[0] == counts[1] == counts[2], counts
    dist.destroy_process_group()
    dist.init_process_group("cpu:towers_shm")
    dist.all_reduce(value)
    assert value.tolist() == [size * size] * 3


def memory_maps() -> int:
    return pathlib.Path("/proc/self/maps").read_text().count("memfd:towers")


def test_forming_a_group_leaves_nothing_in_the_store() -> None:
    store = dist.HashStore()
    said: dict[int, list[list[bytes]]] = {0: [], 1: [], 2: []}
    all_closed = threading.Barrier(3)

    def form(index: int) -> None:
        for number in range(3):
            base = StoreCommunicator(store, index, 3, 10.0)
            said[index].append(base.all_gather_bytes(bytes([index, number])))
            said[index].append(base.all_gather_bytes(b"x" * 1000 * index))
            base.close()
            all_closed.wait(10)

    threads = [threading.Thread(target=form, args=(index,)) for index in said]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert said[0] == said[1] == said[2]
    assert said[0][4:] == [[bytes([index, 2]) for index in range(3)], [b"x" * 1000 * index for index in range(3)]]
    assert store.num_keys() == 0


def test_groups_of_some_ranks_and_one_after_the_other() -> None:
    ranks(groups, count=3)


# -- what stands on it ---------------------------------------------------------------------------------------


def then_another() -> None:
    """Functions that run when a collective is done, and wait for a second one."""
    size = dist.get_world_size()

    def again(future: Any) -> Tensor:
        (once,) = future.value()
        return dist.all_reduce(once.clone(), async_op=True).get_future().wait()[0]

    for number in range(20):
        futures = []
        for bucket in range(4):
            value = torch.full((1000,), float(bucket + number))
            work = dist.all_reduce(value, async_op=True)
            if dist.get_rank() == number % 2:
                work.wait()  # so that the function comes when the future is there, on one of the ranks
            futures.append(work.get_future().then(again))
        for bucket, future in enumerate(futures):
            assert bool((future.wait() == (bucket + number) * size**2).all())


def test_a_collective_may_follow_another() -> None:
    ranks(then_another)


class WithEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(7, 5, sparse=True, dtype=torch.float32)
        self.mlp = make_mlp(torch.float32)
        self.unused = nn.Linear(2, 2)
        with torch.no_grad():
            self.rows.weight.copy_(torch.arange(35.0).view(7, 5) / 35)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.rows((x.sum(1).abs() * 10).long() % 7))


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def train() -> list[Tensor]:
    with seeded():
        model = nn.parallel.DistributedDataParallel(WithEmbedding(), find_unused_parameters=True, bucket_cap_mb=0.0001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, classes = make_data(dtype=torch.float32)
    for start in range(0, 64, 16):
        part = slice(start + 8 * dist.get_rank(), start + 8 * dist.get_rank() + 8)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[part]), classes[part]).backward()
        optimizer.step()
    return parameters_of(model)


def test_ddp_gives_the_numbers_of_gloo() -> None:
    ours, others = ranks(train)
    gloo, _ = ranks(train, backend="gloo")
    assert_close(ours, others, 0.0)
    assert_close(ours, gloo, 1e-6)
    assert not torch.equal(ours[1], parameters_of(make_mlp(torch.float32))[0])


def metrics_and_checkpoint(folder: str) -> float:
    import torch.distributed.checkpoint as dcp  # takes a second, which only this test needs

    torchmetrics = pytest.importorskip("torchmetrics")
    rank = dist.get_rank()
    metric = torchmetrics.MeanMetric()
    metric.update(torch.arange(3.0 + rank))  # 0 1 2, 0 1 2 3
    seen = torchmetrics.CatMetric()
    seen.update(torch.full((1 + rank,), float(rank)))
    assert sorted(seen.compute().tolist()) == [0.0, 1.0, 1.0]
    state = {"weight": torch.full((4,), 3.0), "mine": {f"rank{rank}": torch.tensor([10.0 + rank])}, "step": 7}
    dcp.save(state, checkpoint_id=folder)
    found = {"weight": torch.zeros(4), "mine": {f"rank{rank}": torch.zeros(1)}, "step": 0}
    dcp.load(found, checkpoint_id=folder)
    assert found["weight"].tolist() == [3.0] * 4
    assert found["mine"][f"rank{rank}"].item() == 10 + rank
    assert found["step"] == 7
    return float(metric.compute())


def test_torchmetrics_and_checkpoints(tmp_path: pathlib.Path) -> None:
    assert ranks(metrics_and_checkpoint, str(tmp_path / "checkpoint")) == [pytest.approx(9 / 7)] * 2


def sharded() -> list[Tensor]:
    from torch.distributed.device_mesh import init_device_mesh  # these take a second, which only this test needs
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = fully_shard(make_mlp(torch.float32), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, classes = make_data(dtype=torch.float32)
    for start in range(0, 64, 16):
        part = slice(start + 8 * dist.get_rank(), start + 8 * dist.get_rank() + 8)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[part]), classes[part]).backward()
        optimizer.step()
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def test_sharded_training_gives_the_numbers_of_one_process() -> None:
    ours, others = ranks(sharded)
    assert_close(ours, others, 0.0)
    model = make_mlp(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, classes = make_data(dtype=torch.float32)
    for start in range(0, 64, 16):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[start : start + 16]), classes[start : start + 16]).backward()
        optimizer.step()
    assert_close(ours, parameters_of(model), 1e-6)


# -- what goes wrong -----------------------------------------------------------------------------------------


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
    alone = dist.new_group(timeout=torch.distributed.timedelta(seconds=1))
    if dist.get_rank() == 0:
        with (
            at_most(5),
            pytest.raises(CollectiveTimeoutError, match=r"ranks \[0, 1\] in barrier: Timed out .* rank 1 nothing"),
        ):
            dist.barrier(alone)
        with pytest.raises(TowersError, match="all_reduce: the group has failed before"):
            dist.all_reduce(torch.ones(1), group=alone)
        with pytest.raises(CollectiveTimeoutError, match="waited 1 s for a message from tower 1 with tag 3"):
            dist.recv(torch.ones(1), 1, group=alone, tag=3)
    dist.barrier()


def test_who_waits_in_vain_is_told() -> None:
    ranks(wait_in_vain)


def die_while_others_wait() -> None:
    rank = dist.get_rank()
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    elif rank == 0:
        dist.all_reduce(torch.ones(100_000), async_op=True).wait()
    else:
        dist.recv(torch.ones(5), 1)


def test_a_rank_that_dies_is_named() -> None:
    with at_most(15), pytest.raises(mirrored.TowerFailedError) as caught:
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
