"""The c10d backend: collectives against a reference, messages in all directions, and groups."""

from __future__ import annotations

import os
import pathlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import mirrored
from tests.c10d.ranks import ranks
from tests.support.jobs import towers
from tests.support.late import take_turns
from tests.support.meeting import say, wait_for
from tests.support.reference import DTYPES, agrees, fixed_order, random_tensor
from tests.support.waiting import HANG, wait_until
from towers.backend import StorePeerGroup
from towers.c10d import mailbox
from towers.c10d.group import Group
from towers.errors import TowersError
from towers.system.timeouts import Deadline

OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


def strided(tensor: Tensor) -> Tensor:
    """The same values, not one after the other in memory."""
    return torch.stack([tensor, torch.zeros_like(tensor)], dim=-1)[..., 0]


def collectives_at_random(generator: torch.Generator) -> None:
    """All ranks draw all ranks' values, so each knows the reference."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def pick(among: Any) -> Any:
        return among[int(torch.randint(len(among), (), generator=generator))]

    dtype = pick(DTYPES)
    shape = pick([(), (1,), (0,), (7,), (5, 3), (1000, 31), (300_001,)])
    name = pick(list(OPERATIONS)) if not dtype.is_complex else "sum"
    op, root, lay = OPERATIONS[name], pick(range(size)), pick([strided, torch.clone])
    drawn = [random_tensor(generator, (size, *shape), dtype) for _ in range(size)]
    mine, firsts, own = drawn[rank], [values[0] for values in drawn], [values[rank] for values in drawn]
    where = f"{dtype} {shape} {name} root {root} {lay.__name__}"

    def zeros() -> Tensor:
        return lay(torch.zeros_like(mine[0]))

    def after(call: Callable[[Any], object], value: Any) -> Any:
        """What a collective has written to."""
        call(value)
        return value

    def reduced(found: Tensor, parts: list[Tensor]) -> None:
        assert agrees(found, fixed_order(parts, name), size), where

    def equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
        assert all(map(torch.equal, found, expected)), where

    reduced(after(lambda value: dist.all_reduce(value, op), lay(mine[0])), firsts)
    value = after(lambda value: dist.reduce(value, root, op), lay(mine[0]))
    reduced(value, firsts) if rank == root else equal([value], [mine[0]])
    equal([after(lambda value: dist.broadcast(value, root), lay(mine[0]))], [firsts[root]])
    equal(after(lambda rows: dist.all_gather(rows, mine[0]), [zeros() for _ in drawn]), firsts)
    equal(after(lambda rows: dist.all_gather_into_tensor(rows, lay(mine[0])), torch.zeros_like(mine)), firsts)
    rows = [torch.zeros_like(mine[0]) for _ in drawn] if rank == root else None
    equal(after(lambda rows: dist.gather(lay(mine[0]), rows, root), rows) or firsts, firsts)
    rows = list(mine.unbind(0)) if rank == root else None
    equal([after(lambda value: dist.scatter(value, rows, root), zeros())], [drawn[root][rank]])
    reduced(after(lambda value: dist.reduce_scatter(value, list(lay(mine).unbind(0)), op), zeros()), own)
    if shape:
        reduced(after(lambda value: dist.reduce_scatter_tensor(value, mine, op), torch.zeros_like(mine[0])), own)
    equal(after(lambda rows: dist.all_to_all(rows, list(lay(mine).unbind(0))), [zeros() for _ in drawn]), own)
    equal(after(lambda rows: dist.all_to_all_single(rows, lay(mine)), torch.zeros_like(mine)), own)


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
    generator = torch.Generator().manual_seed(0)
    for _ in range(25):
        collectives_at_random(generator)
    uneven()
    operations()


def test_every_collective_equals_a_reference() -> None:
    ranks(all_collectives, count=3)


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
    sent = torch.full((4,), 5.0 + rank)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, arriving[0], before), dist.P2POp(dist.isend, sent, after)]
    ):
        work.get_future().wait()
    assert bool((arriving[0] == 5 + before).all())
    dist.send(torch.full((3,), 8.0 + rank), after)
    work = dist.irecv(came := strided(torch.zeros(3)), before)
    wait_until(work.is_completed)
    assert came.tolist() == [8.0 + before] * 3
    with pytest.raises(TowersError, match=r"has 8 bytes, but the tensor it is to be received into has 12"):
        dist.send(torch.zeros(2), after)
        dist.recv(torch.zeros(3), before)
    if rank == 0:
        wait_for("the message is sent")
        dist.recv(came := torch.zeros(2_000_000), 1)
        assert bool((came == 7).all())
    elif rank == 1:
        dist.send(torch.full((2_000_000,), 7.0), 0)  # and leaves the group with the message still unread
        say("the message is sent")


def take_a_message_that_another_thread_delivers_at_the_deadline(strategy: mirrored.Strategy) -> list[int]:
    box = mailbox.Mailbox(strategy.communicator, HANG)
    if strategy.topology.index == 1:
        wait_for("the deadline passes")
        box.send(torch.tensor([7], dtype=torch.uint8), 0)
        wait_for("the message is there")
        return []
    receive = box.receive(into := torch.zeros(1, dtype=torch.uint8), 1)

    class Passes(Deadline):
        def has_passed(self) -> bool:
            say("the deadline passes")
            thread = threading.Thread(target=wait_until, args=(receive.is_completed,))
            thread.start()
            thread.join()
            return True

    mailbox.Deadline = Passes  # type: ignore[misc]
    box.wait_for(receive, 1.0)
    mailbox.Deadline = Deadline  # type: ignore[misc]
    say("the message is there")
    return into.tolist()


def test_a_message_that_comes_in_the_moment_of_the_deadline_is_received() -> None:
    assert towers(take_a_message_that_another_thread_delivers_at_the_deadline) == [[7], []]


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
            base = StorePeerGroup(store, index, 3, HANG)
            said[index].append(base.all_gather_bytes(bytes([index, number])))
            said[index].append(base.all_gather_bytes(b"x" * 1000 * index))
            base.close()
            all_closed.wait(HANG)

    threads = [threading.Thread(target=form, args=(index,)) for index in said]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
    assert said[0] == said[1] == said[2]
    assert said[0][4:] == [[bytes([index, 2]) for index in range(3)], [b"x" * 1000 * index for index in range(3)]]
    assert store.num_keys() == 0


def test_groups_of_some_ranks_and_one_after_the_other() -> None:
    ranks(groups, count=3)


def beside() -> str:
    """What tensors on GPUs would go through; Gloo takes them in NCCL's place."""
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [2.0, 2.0]
    group: Any = dist.group.WORLD
    other = group.other_devices(torch.device("cuda"))
    assert group.other_devices(torch.device("cuda")) is other
    assert dist.get_process_group_ranks(other) == [0, 1]
    return str(dist.get_backend_config(other))


def test_a_backend_beside_ours_gets_a_group_of_its_own() -> None:
    assert ranks(beside, backend="cpu:towers_shm,cuda:gloo") == ["cuda:gloo"] * 2


def leave_the_group_beside(late: int) -> None:
    group: Any = dist.group.WORLD

    def leave() -> None:
        dist.destroy_process_group(group._other)
        group._other = None

    take_turns([late], lambda: group.other_devices(torch.device("cuda")), leave)


@pytest.mark.extended
def test_a_rank_that_leaves_a_group_beside_ours_at_once_cuts_nobody_off() -> None:
    for late in (0, 1, 0, 1):  # c10d would give one more group in the same job the name, and the addresses, of the last
        ranks(leave_the_group_beside, late, backend="cpu:towers_shm,cuda:gloo")


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
