"""Scripts that call parts of models, put tensors in the place of variables, and schedule from several threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

pytest.importorskip("ray")

from tests.parameter_server.test_both_sides import Side, stepping, zeros


@pytest.fixture(scope="module")
def shared() -> Side:
    """A worker and a server for tests that bring models of their own."""
    return Side(zeros)


def test_a_function_that_calls_a_part_of_a_model_sees_its_own_steps(shared: Side) -> None:
    with shared.strategy.scope():
        parts = nn.ModuleDict({"one": zeros()})
    step = stepping(parts, torch.optim.SGD(parts.parameters(), 1.0))

    def three_steps() -> list[float]:
        outputs = []
        for _ in range(3):
            outputs.append(float(parts["one"](torch.zeros(2))[0]))
            step()
        return outputs

    assert shared.call(three_steps) == [0.0, -1.0, -2.0]


def test_a_table_that_the_chief_writes_to_and_calls(shared: Side) -> None:
    with shared.strategy.scope():
        parts = nn.ModuleDict({"table": nn.Embedding(4, 1, sparse=True)})
    table, row = parts["table"], torch.tensor([1])
    shared.call(lambda: None)
    with torch.no_grad():
        table.weight.fill_(7.0)
    assert table(row).tolist() == shared.call(lambda: table(row).tolist()) == [[7.0]]
    assert table.state_dict()["weight"].tolist() == [[7.0]] * 4


def test_tensors_in_the_place_of_variables_are_their_values(shared: Side) -> None:
    class Counter(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 3)
            self.register_buffer("count", torch.tensor(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = self.count + 1
            return super().forward(x)

    with shared.strategy.scope():
        model = Counter()
    sgd = torch.optim.SGD(model.parameters(), 1.0)

    def two_steps() -> None:
        for _ in range(2):
            model(torch.zeros(2))
            stepping(model, sgd)()

    for _ in range(2):
        shared.call(two_steps)
    assert int(model.state_dict()["count"]) == 4
    state = {name: torch.full_like(value, 5) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert shared.call(lambda: (model.bias.tolist(), int(model.count))) == ([5.0] * 3, 5)
    shared.call(stepping(model, sgd))
    assert model.bias.tolist() == [4.0] * 3


def test_gradients_of_a_function_that_failed_are_gone(shared: Side) -> None:
    with shared.strategy.scope():
        model = zeros()
    sgd = torch.optim.SGD(model.parameters(), 1.0)

    def step(fails: bool) -> None:
        model.bias.sum().backward()
        if fails:
            raise KeyError
        sgd.step()
        sgd.zero_grad()

    with pytest.raises(KeyError):
        shared.call(step, True)
    shared.call(step, False)
    assert model.bias.tolist() == [-1.0] * 3


def test_several_threads_schedule_what_was_not_placed_before(shared: Side) -> None:
    with shared.strategy.scope():
        model = nn.Sequential(*(zeros(3) for _ in range(30)))
    together = threading.Barrier(4)

    def schedule(_: int) -> float:
        together.wait()
        return shared.coordinator.schedule(lambda: float(model[29].bias.sum())).fetch()

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(schedule, range(4))) == [0.0] * 4
    shared.coordinator.join()


def test_a_function_may_compile_a_model(shared: Side) -> None:
    with shared.strategy.scope():
        model = nn.Sequential(nn.Embedding(4, 2, sparse=True), zeros())
    sgd = torch.optim.SGD(model[1].parameters(), 1.0)

    def two_steps() -> list[float]:
        outputs, compiled = [], torch.compile(model, backend="eager")
        for _ in range(2):
            outputs.append(float(compiled(torch.tensor(1))[0]))
            stepping(model[1], sgd)()
        return outputs

    first, second = shared.call(two_steps)
    assert second == pytest.approx(first - 1 - float(model.state_dict()["0.weight"][1].sum()))
