"""Central storage between CPU towers: the numbers of one tower, one copy of everything, and what is refused."""

from __future__ import annotations

import contextlib
import os
import pathlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import mirrored
from tests.faults import training
from tests.support.features import mlp
from tests.support.jobs import failures, make_data, make_mlp, parameters_of, text_of, towers
from tests.support.sharded import equal_unsharded, small_training
from tests.virtual.test_with_others import sparse_table
from towers.sharding import central
from towers.sharding.central import SingleCopy
from towers.sharding.optimizer import OptimizerSharder

CENTRAL = {"central": True}


class Words(nn.Module):
    """A classifier of bags of words, and of the numbers beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(31, 4, sparse=True, dtype=torch.float64)
        self.dense = nn.Linear(9, 3, dtype=torch.float64)

    def forward(self, words: Tensor, x: Tensor) -> Tensor:
        return self.dense(torch.cat([self.table(words), x], 1))


SPARSE = {
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, 0.05),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "SGD": lambda p: torch.optim.SGD(p, 0.5),
}


def train(strategy: mirrored.Strategy, names: list[str]) -> dict[str, tuple[list[Tensor], list[Any]]]:
    """Parameters and state after two epochs of 22 examples by 8, and of 3, where towers are without any."""
    results = {}
    for name in names:
        torch.manual_seed(4)
        with strategy.scope():
            model = Words()
        optimizers = [SPARSE[name](model.table.parameters()), torch.optim.AdamW(model.dense.parameters(), 0.05)]
        x, y = make_data(22)
        words = torch.arange(22 * 3).view(22, 3) ** 2 % 17

        def step(words: Tensor, x: Tensor, y: Tensor, model: Words = model, optimizers: Any = optimizers) -> None:
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses = F.cross_entropy(model(words, x), y, reduction="none")
            mirrored.compute_average_loss(losses).backward()
            for optimizer in optimizers:
                optimizer.step()

        for count in (22, 3):
            for batch in strategy.distribute_dataset(TensorDataset(words[:count], x[:count], y[:count]), 8):
                strategy.run(step, batch)
        states = [optimizer.state_dict()["state"] for optimizer in optimizers]
        results[name] = parameters_of(model), states
    return results


@pytest.fixture(scope="module")
def alone() -> Any:
    return towers(train, list(SPARSE), count=1)[0]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_numbers_of_one_tower_with_tables_ragged_and_empty_shares(count: int, alone: Any) -> None:
    first, *others = towers(train, list(SPARSE), settings=CENTRAL, count=count)
    torch.testing.assert_close(first, alone, rtol=0, atol=1e-12)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


def test_gradients_that_are_averaged_otherwise() -> None:
    gloo = {"communication": mirrored.CommunicationOptions(implementation="gloo")}
    expected = towers(train, ["SparseAdam"], settings=gloo)
    ours = towers(train, ["SparseAdam"], settings={**gloo, **CENTRAL})
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    virtual, central_too = (towers(sparse_table, False, settings={"virtual_towers": 4, **c}) for c in ({}, CENTRAL))
    assert [digest for digest, _, _ in central_too] == [digest for digest, _, _ in virtual]


def inode_of(address: int) -> str:
    """The file in whose mapping an address lies, and whether writes there stay this process's own."""
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        (start, end), kind = (int(number, 16) for number in line.split()[0].split("-")), line.split()[1][3]
        if start <= address < end:
            return f"{line.split()[4]} {kind}"
    raise AssertionError(hex(address))


def where_all_lies(strategy: mirrored.Strategy) -> tuple[list[str], int, int]:
    """The memory of the parameters, elements of state here, and elements of parameters."""
    model = strategy.mirror(Words())
    optimizers = [torch.optim.SparseAdam(model.table.parameters()), torch.optim.Adam(model.dense.parameters())]

    def step() -> None:
        model(torch.tensor([[1, 2]]), torch.ones(1, 5, dtype=torch.float64)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    strategy.run(step)
    sharder = strategy.engine.attached(OptimizerSharder)
    states = [s for o in optimizers for s in sharder._known[o].inner.state.values()]
    held = sum(v.numel() for s in states for v in s.values() if isinstance(v, Tensor) and v.dim())
    return [inode_of(p.data_ptr()) for p in model.parameters()], held, sum(p.numel() for p in model.parameters())


def test_parameters_and_state_are_there_once() -> None:
    (files, held, numel), *others = towers(where_all_lies, settings=CENTRAL, count=3)
    assert all(name.endswith(" p") and not name.startswith("0 ") for name in files)
    assert [other for other, _, _ in others] == [files, files]
    assert held + sum(held for _, held, _ in others) == 2 * numel


def divide_rows(strategy: mirrored.Strategy, replaces: bool) -> tuple[list[int], list[int], bool]:
    """Used rows and all rows that this tower updates of two tables, and whether these lie without gaps."""
    tables = strategy.mirror(nn.ModuleList([nn.Embedding(1000, 2, sparse=True), nn.Embedding(3, 2, sparse=True)]))
    optimizer = torch.optim.SparseAdam(tables.parameters())
    words = torch.tensor([0, 1, 2, 3, 5, 8, 500, 999])

    def step() -> None:
        (tables[0](words).sum() + tables[1](words[:1]).sum()).backward()
        if replaces and strategy.topology.index == 1:
            tables[0].weight.grad = torch.sparse_coo_tensor([[700, 701, 702, 703]], torch.ones(4, 2), (1000, 2))
        optimizer.step()

    strategy.run(step)
    division = strategy.engine.attached(OptimizerSharder)._known[optimizer]._division
    used = [int(((words >= shard.start) & (words < shard.end)).sum()) for shard in division.shards[:1]]
    assert len(optimizer.state_dict()["state"]) == 2
    rows = [len(p) for p in division.parameters]
    return used, rows, all(p.is_contiguous() for p in division.parameters)


@pytest.mark.parametrize("replaces", [False, True])
def test_towers_update_as_many_used_rows_each(replaces: bool) -> None:
    """Also where one tower has given a table another gradient: tower 0 has the say."""
    results = towers(divide_rows, replaces, settings=CENTRAL)
    assert results == [([4], [5, 1], True), ([4], [995, 2], True)]


def scale_all(strategy: mirrored.Strategy, kernel: str) -> list[Tensor]:
    """Parameters are scaled after some steps; a kernel that tells nothing makes all count as changed."""

    def refuse(*_: Any) -> int:
        raise OSError(25, "no such question")

    model, _, step = small_training(strategy, torch.optim.Adam)
    asked, told = central.ioctl, SingleCopy.is_changed
    if kernel == "older":
        central.ioctl = refuse
    elif kernel == "silent":
        SingleCopy.is_changed = lambda copy: told(copy) or True
    for number in range(4):
        strategy.run(step)
        if number == 1:
            for p in model.parameters():
                p.data.mul_(0.9)
    central.ioctl, SingleCopy.is_changed = asked, told
    return parameters_of(model)


def scale_a_table(strategy: mirrored.Strategy) -> list[Tensor]:
    """Rows that are used before and after, by ways that raise its version and that do not."""
    table = strategy.mirror(nn.Embedding(3000, 8, sparse=True))
    optimizer = torch.optim.Adagrad(table.parameters(), 0.1)

    def step(number: int) -> None:
        optimizer.zero_grad()
        words = torch.tensor([number, 7, 2999, 5 * strategy.topology.index])
        output = table(words).square().sum() + (table.weight.square().sum() if number == 5 else 0)
        output.backward()
        optimizer.step()

    for number in range(8):
        strategy.run(step, (number,))
        if number in (1, 2):
            table.weight.data.mul_(0.9)
        elif number == 4:
            with torch.no_grad():
                table.weight[7] = 3.0
        elif number == 6:
            table.weight.data = table.weight.data.clone()
    return parameters_of(table)


def test_what_all_towers_write_counts_once() -> None:
    equal_unsharded(scale_all, ("newest", "older", "silent"), central=True, count=3)


def test_what_all_towers_write_into_a_table_counts_once() -> None:
    unsharded = towers(scale_a_table, count=3)
    for ask_again in (64, 2):
        torch.testing.assert_close(
            towers(with_pages_asked, ask_again, settings=CENTRAL, count=3), unsharded, rtol=0, atol=0
        )


def with_pages_asked(strategy: mirrored.Strategy, steps: int) -> list[Tensor]:
    central._ASK_AGAIN = steps
    return scale_a_table(strategy)


def give_other_memory(strategy: mirrored.Strategy, before: str) -> list[Tensor]:
    """Parameters lie elsewhere when an optimizer steps them for the first time, or in other buckets."""
    model = strategy.mirror(nn.ModuleList([mlp(), nn.Linear(5, 1)]))
    optimizer = torch.optim.SGD(model[0].parameters(), 0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        (model[0](torch.ones(2, 5)).sum() + model[1](torch.ones(2, 5)).sum()).backward()
        optimizer.step()

    for _ in range(2):
        strategy.run(step)
    for p in model[0].parameters():
        p.data = p.data * 0.9
    if before == "another optimizer":
        model.double().float()
        optimizer = torch.optim.Adam(model[0].parameters(), 0.1)
    elif before == "another group":
        optimizer.add_param_group({"params": model[1].parameters()})
    else:
        strategy.mirror(nn.Linear(2, 2))
    for _ in range(2):
        strategy.run(step)
    return parameters_of(model)


def test_parameters_that_were_given_other_memory_before_an_optimizer_knew_them() -> None:
    equal_unsharded(give_other_memory, ("another optimizer", "another group", "other buckets"), central=True)


def evaluate_others(strategy: mirrored.Strategy) -> list[Tensor]:
    """The chief alone evaluates other weights, and puts these back."""
    model, _, step = small_training(strategy, torch.optim.Adam)
    for _ in range(3):
        strategy.run(step)
        if strategy.is_chief:
            kept = {name: value.clone() for name, value in model.state_dict().items()}
            for p in model.parameters():
                p.data.zero_()
            model.load_state_dict(kept)
    return parameters_of(model)


def test_what_one_tower_changes_and_puts_back_is_no_change() -> None:
    torch.testing.assert_close(towers(evaluate_others, settings=CENTRAL), towers(evaluate_others), rtol=0, atol=0)


def changed_by_one(strategy: mirrored.Strategy, others: float) -> str:
    model, _, step = small_training(strategy, torch.optim.Adam)
    strategy.run(step)
    model[0].weight.data.mul_(others)
    if strategy.topology.index == 1:
        model[0].bias.data.mul_(0.9)
    return text_of(mirrored.DisagreementError, strategy.run, step)


@pytest.mark.row(58)
@pytest.mark.parametrize("others", [1.0, 0.5])
def test_a_parameter_that_one_tower_changes(others: float) -> None:
    """Also where all towers change others."""
    first, second = towers(changed_by_one, others, settings={**CENTRAL, "mirror_check_interval": None})
    assert first == second
    assert "tower 1 steps Adam number 0 with 4 parameters, after it has changed parameters by itself" in first


class Replacing(torch.optim.Optimizer):
    """An optimizer that gives parameters other memory."""

    elementwise = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.data = p.data - p.grad


def refused(strategy: mirrored.Strategy) -> list[str]:
    model = strategy.mirror(nn.ModuleList([nn.Embedding(4, 4, sparse=True), mlp()]))
    later = torch.optim.SGD(model[0].parameters(), 0.1)

    def step(make: Any) -> None:
        (model[0](torch.tensor([1])).sum() + model[1](torch.ones(2, 5)).sum()).backward()
        make().step()

    strategy.run(step, (lambda: later,))
    later.param_groups[0]["momentum"] = 0.9
    makers = (
        lambda: later,
        lambda: torch.optim.Adam(model[0].parameters(), 0.1, fused=True),
        lambda: torch.optim.Adafactor(model[1].parameters()),
        lambda: Replacing(model[1].parameters()),
    )
    return [text_of(mirrored.MirrorError, strategy.run, step, (make,)) for make in makers] + [
        text_of(ValueError, mirrored.CentralStorageStrategy, parameter_device="cuda:7"),
        text_of(TypeError, mirrored.CentralStorageStrategy, shard_optimizer=True),
    ]


@pytest.mark.row(55, 56)
def test_what_is_refused_by_name() -> None:
    texts = towers(refused, settings=CENTRAL)
    assert texts[0] == texts[1]
    momentum, fused, adafactor, replacing, device, argument = texts[0]
    assert "it holds parameter ModuleList.0.weight, with sparse gradients, together with momentum" in momentum
    assert "it holds parameter ModuleList.0.weight, with sparse gradients, together with fused" in fused
    assert "Replacing number 3: it gives parameters other memory (p.data = …), but has to update them" in replacing
    assert "CentralStorageStrategy cannot shard Adafactor.step()" in adafactor
    assert "cuda:7 asked for, but this process sees no GPU" in device
    assert "leave it out: each tower updates its part already" in argument


@pytest.mark.row(54)
def test_several_hosts_are_refused() -> None:
    for error in failures(parameters_of, settings=CENTRAL, hosts="ab"):
        assert isinstance(error, mirrored.StartupError)
        assert "the towers run on several hosts: " in str(error)


def no_memory(strategy: mirrored.Strategy, tower: int) -> str:
    _, _, step = small_training(strategy, torch.optim.Adam)

    def refuse(*args: Any, **options: Any) -> Any:
        raise OSError(28, "no memory")

    if strategy.topology.index == tower:
        os.memfd_create = torch.from_file = refuse
    return text_of(mirrored.MirrorError, strategy.run, step)


@pytest.mark.row(57)
@pytest.mark.parametrize("tower", [0, 1])
def test_no_memory_for_the_copy(tower: int) -> None:
    first, second = towers(no_memory, tower, settings=CENTRAL)
    assert first == second
    assert "MB of parameters cannot be allocated in the host's memory: [Errno 28] no memory" in first


def open_files(strategy: mirrored.Strategy) -> int:
    tables = strategy.mirror(nn.ModuleList(nn.Embedding(4, 2, sparse=True) for _ in range(30)))
    optimizer = torch.optim.SGD(tables.parameters(), 0.1)

    def step() -> None:
        sum(table(torch.tensor([1])).sum() for table in tables).backward()
        optimizer.step()

    before = len(os.listdir("/proc/self/fd"))
    strategy.run(step)
    return len(os.listdir("/proc/self/fd")) - before


def test_tables_keep_no_files_open() -> None:
    assert max(towers(open_files, settings=CENTRAL)) < 20


def until(strategy: mirrored.Strategy, folder: str, stop: int | None) -> Any:
    """All that a training has in the end; None if it is interrupted."""
    with contextlib.suppress(training.Interrupted):
        done = training.train(strategy, folder, stop=stop)
        return done["restored"] and done["restored"].step, {**done, "restored": None}
    return None


def test_a_checkpoint_goes_on_in_another_kind_of_strategy(tmp_path: pathlib.Path) -> None:
    whole = [done for _, done in towers(until, str(tmp_path / "whole"), None)]
    for name, kinds in {"there": ({}, CENTRAL), "back": (CENTRAL, {})}.items():
        towers(until, str(tmp_path / name), 6, settings=kinds[0])
        assert towers(until, str(tmp_path / name), None, settings=kinds[1]) == [(4, done) for done in whole]


def _stepped(strategy: mirrored.Strategy) -> nn.Module:
    with strategy.scope():
        model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = make_data(8)

    def step() -> None:
        mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"), 8).backward()
        optimizer.step()

    strategy.run(step)
    return model


def _dropped_on_one_tower(strategy: mirrored.Strategy) -> list[Tensor]:
    """The second of two models. The first one's memory exists on tower 1 only, and a script has changed it before."""
    first = _stepped(strategy)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(1.0)
    if strategy.topology.index == 0:
        sharder: Any = strategy.engine.attached(OptimizerSharder)
        sharder._transport._copies.clear()  # as the end of its garbage does, at some time
    return parameters_of(_stepped(strategy))


def test_a_model_that_one_tower_has_not_collected_yet() -> None:
    first, second = towers(_dropped_on_one_tower, settings=CENTRAL)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
