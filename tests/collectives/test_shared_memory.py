"""Collectives through shared memory: numbers, bits, and what is left behind."""

from __future__ import annotations

import os
import pathlib
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mirrored
from tests.support.jobs import GLOO, ROOT, assert_close, make_data, make_mlp, parameters_of, towers
from tests.support.processes import await_ends
from tests.support.programs import start_program
from tests.support.reference import DTYPES, FLOAT8, agrees, fixed_order, random_tensor
from tests.support.shared_memory import left, names
from tests.support.steps import averaging_step
from tests.support.waiting import wait_until
from towers import errors as towers_errors
from towers.collectives.hierarchical import HierarchicalCommunicator
from towers.collectives.shared_memory.communicator import SharedMemoryCommunicator


def reduce_at_random(strategy: mirrored.Strategy, rounds: int) -> list[str]:
    """All towers draw all towers' values, so each knows the reference; returns the digests of the results."""
    comm = strategy.communicator
    assert isinstance(comm, (SharedMemoryCommunicator, HierarchicalCommunicator))
    shared = isinstance(comm, SharedMemoryCommunicator)
    dtypes = [dtype for dtype in DTYPES if shared or dtype != torch.int16]  # which Gloo has not
    generator = torch.Generator().manual_seed(comm.size)
    sizes = (0, 1, 3, 17, 1000, 8192, 8193, 100_000, 700_001)
    digests = []
    for _ in range(rounds):
        pick = lambda among: among[int(torch.randint(len(among), (), generator=generator))]  # noqa: E731
        dtype, size = pick(dtypes), pick(sizes)
        op = pick(("sum", "prod", "min", "max") if not dtype.is_complex else ("sum",))
        parts = [random_tensor(generator, (size,), dtype) for _ in range(comm.size)]
        mine = parts[comm.index].clone()
        comm.all_reduce(mine, op)
        assert agrees(mine, fixed_order(parts, op), comm.size), (dtype, size, op)
        strided = torch.stack([parts[comm.index]] * 2, dim=1)[:, 0]
        comm.all_reduce(strided, op)
        differing = strided != mine
        assert not differing.any(), (
            dtype,
            size,
            op,
            differing.nonzero()[:5],
            strided[differing][:5],
            mine[differing][:5],
        )
        gathered = comm.all_gather(parts[comm.index])
        assert all(torch.equal(row, part) for row, part in zip(gathered, parts, strict=True))
        if shared:
            exchange_rows(comm, generator, dtype, size % 100_000, op)
        source = int(torch.randint(comm.size, (), generator=generator))
        copy = parts[comm.index].clone()
        comm.broadcast(copy, source)
        assert torch.equal(copy, parts[source])
        digests.append(str(hash(tuple(mine.view(torch.uint8)[:999].tolist()))))
    return digests


def exchange_rows(
    comm: SharedMemoryCommunicator, generator: torch.Generator, dtype: torch.dtype, size: int, op: str
) -> None:
    rows = [random_tensor(generator, (comm.size, size, 1), dtype) for _ in range(comm.size)]
    mine = comm.reduce_scatter(rows[comm.index], op)
    assert agrees(mine, fixed_order([row[comm.index] for row in rows], op), comm.size), (dtype, size, op)
    given = comm.all_to_all(rows[comm.index])
    assert torch.equal(given, torch.stack([row[comm.index] for row in rows]))


@pytest.mark.extended
@pytest.mark.parametrize(("count", "rounds"), [(2, 60), (3, 60), (8, 4)])  # the last: more than there are cores
def test_random_collectives_equal_a_reference_and_each_other_to_the_bit(count: int, rounds: int) -> None:
    first, *others = towers(reduce_at_random, rounds, count=count)
    assert all(other == first for other in others)


def test_random_collectives_give_the_same_bits_in_every_run() -> None:
    assert towers(reduce_at_random, 30) == towers(reduce_at_random, 30)


def reduce_8_bits(strategy: mirrored.Strategy) -> None:
    comm = strategy.communicator
    generator = torch.Generator().manual_seed(0)
    for dtype in FLOAT8:
        for size in (0, 3, 50_000):
            parts = [torch.rand(size, generator=generator).mul_(3).to(dtype) for _ in range(comm.size)]
            total = parts[comm.index].clone()
            comm.all_reduce(total)
            expected = sum((part.float() for part in parts), torch.zeros(size)).to(dtype)
            assert torch.equal(total.view(torch.uint8), expected.view(torch.uint8)), (dtype, size)
            rows = comm.all_gather(parts[comm.index]).view(torch.uint8)
            assert torch.equal(rows, torch.stack([part.view(torch.uint8) for part in parts])), (dtype, size)


def test_numbers_of_8_bits_are_added_in_float32() -> None:
    towers(reduce_8_bits, count=3)


def reduce_what_torch_cannot(strategy: mirrored.Strategy) -> None:
    comm = strategy.communicator
    with pytest.raises(towers_errors.ArgumentError, match="max of torch.complex64"):
        comm.all_reduce(torch.zeros(100_000, dtype=torch.complex64), "max")
    total = torch.ones(3)
    comm.all_reduce(total)  # nobody has waited for anybody: the towers go on together
    assert total.tolist() == [2.0] * 3


def test_what_torch_cannot_reduce_is_refused_before_anybody_waits() -> None:
    towers(reduce_what_torch_cannot)


def average_regions(strategy: mirrored.Strategy, fails_on: int | None) -> bool:
    """Averages in place, with windows that one tower makes anew, or cannot make."""
    comm, create = strategy.communicator, os.memfd_create
    if comm.index == fails_on:
        del os.memfd_create
    late = comm.allocate(1, 9, torch.float32, comm.device)
    for _ in range(2):  # the tower that could not allocate can now, alone
        late.fill_(float(comm.index))
        comm.submit_average(late).wait()
        assert late.tolist() == [(comm.size - 1) / 2] * 9
        if comm.index == fails_on and not hasattr(os, "memfd_create"):
            os.memfd_create = create
            late = comm.allocate(1, 9, torch.float32, comm.device)
    if comm.index == fails_on:
        del os.memfd_create
    generator = torch.Generator().manual_seed(0)
    right = True
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for key, size in enumerate((5, 4096, 300_001), start=10 * dtype.itemsize):
            region = comm.allocate(key, size, dtype, comm.device)
            for turn in range(3):
                parts = [random_tensor(generator, (size,), dtype) for _ in range(comm.size)]
                if turn == 1 and comm.index == 1:
                    region = comm.allocate(key, size, dtype, comm.device)
                region.copy_(parts[comm.index])
                comm.submit_average(region).wait()
                right = right and agrees(region, fixed_order(parts, "sum") / comm.size, comm.size)
            comm.release(key)
    return right


@pytest.mark.parametrize("fails_on", [None, 1])
def test_regions_are_averaged_in_place(fails_on: int | None) -> None:
    assert all(towers(average_regions, fails_on, count=3))


def train(strategy: mirrored.Strategy) -> list[Tensor]:
    with strategy.scope():
        model = make_mlp(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, classes = make_data(dtype=torch.float32)

    step = averaging_step(model, optimizer)
    for batch in strategy.distribute_dataset(torch.utils.data.TensorDataset(inputs, classes), 16):
        strategy.run(step, args=batch)
    return [*parameters_of(model), torch.tensor(strategy.communicator.backend == "shared memory")]


def test_training_gives_the_numbers_of_gloo() -> None:
    [*ours, shared], _ = towers(train)
    [*gloo, not_shared], _ = towers(train, settings=GLOO)
    assert shared
    assert not not_shared
    assert_close(ours, gloo, 1e-6)


@pytest.mark.extended
def test_nothing_is_left_when_all_are_killed(tmp_path: pathlib.Path) -> None:
    before = names()
    words = [str(ROOT / "tests" / "programs" / "reduces.py"), str(tmp_path)]
    process = start_program(words)
    files = [tmp_path / "0", tmp_path / "1"]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    running = [int(file.read_text()) for file in files]
    # What the towers share has no name anywhere, so there is nothing that could be left.
    assert left(before) == []
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    process.kill()
    process.communicate()
    await_ends(*running)
    assert left(before) == []


def without_memfd(implementation: str) -> str:
    if os.environ["RANK"] == "1":
        del os.memfd_create
    options = mirrored.CommunicationOptions(implementation=implementation)
    strategy = mirrored.MirroredStrategy(communication=options)
    assert strategy.reduce("sum", 1) == 2
    return strategy.communicator.backend


def test_without_shared_memory_it_is_gloo_and_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    assert mirrored.launch(without_memfd, ("auto",), devices=["cpu:0", "cpu:1"]) == ["gloo", "gloo"]
    said = (
        "towers of this host cannot share memory (tower 1: [Errno 38] this system has no memfd_create); they use Gloo"
    )
    assert capfd.readouterr().err.count(said) == 1


def test_shared_memory_that_was_asked_for_must_be_there() -> None:
    with pytest.raises(mirrored.TowerFailedError) as caught:
        mirrored.launch(without_memfd, ("shared_memory",), devices=["cpu:0", "cpu:1"])
    assert isinstance(caught.value.__cause__, mirrored.StartupError)
    assert "implementation is 'shared_memory', but the towers cannot share memory: tower 1" in str(caught.value)


def across_hosts(strategy: mirrored.Strategy, fn: Callable[..., Any], *args: object) -> Any:
    assert isinstance(strategy.communicator, HierarchicalCommunicator)
    return fn(strategy, *args)


def reduce_and_average(strategy: mirrored.Strategy) -> tuple[list[str], bool]:
    return reduce_at_random(strategy, 20), average_regions(strategy, None)


@pytest.mark.extended
@pytest.mark.parametrize("hosts", ["aab", "abba", "abbbc"])
def test_any_mix_of_towers_per_host(hosts: str) -> None:
    first, *others = towers(across_hosts, reduce_and_average, count=len(hosts), hosts=hosts)
    assert all(other == first for other in others)
    assert first[1]


def swap_on_two_channels_at_once(strategy: mirrored.Strategy) -> list[list[float]]:
    """One tower makes the exchange of each channel in another order; a group for both would mix them up."""
    first = strategy.communicator
    second, rows = first.channel(), torch.arange(3.0)[:, None] + 10 * first.index
    found: dict[int, torch.Tensor] = {}

    def swap(number: int) -> None:
        found[number] = (first, second)[number].all_to_all(rows + 100 * number)

    threads = []
    for number in (1, 0) if first.index == 2 else (0, 1):
        group: Any = (first, second)[number]._group
        before = group.count
        threads.append(threading.Thread(target=swap, args=(number,)))
        threads[-1].start()
        wait_until(lambda group=group, before=before: group.count > before)  # type: ignore[misc]
    for thread in threads:
        thread.join()
    return [found[number].flatten().tolist() for number in (0, 1)]


def test_channels_across_hosts_exchange_rows_beside_each_other() -> None:
    found = towers(swap_on_two_channels_at_once, count=3, hosts="aab")
    rows = [[float(tower + 10 * source) for source in range(3)] for tower in range(3)]
    assert found == [[row, [value + 100 for value in row]] for row in rows]


def test_training_on_several_hosts_gives_the_numbers_of_one_device() -> None:
    [*ours, _], *_ = towers(across_hosts, train, count=3, hosts="aab")
    [*alone, _] = train(mirrored.OneDeviceStrategy(seed=0))
    assert_close(ours, alone, 1e-6)
