"""torch.compile around a model, forward and backward, or a whole step: the same numbers, and no graph of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mirrored
from tests.support.jobs import GLOO, ROOT, SETTINGS, assert_close, parameters_of, seeded, towers, trace_no_backward

Step = Callable[[Tensor, Tensor], Tensor]
RUNS, EXAMPLES = 4, 7

VIRTUAL = {"virtual_towers": 2}
WAYS: dict[str, dict[str, Any]] = {**SETTINGS, "virtual": VIRTUAL, "virtual gloo": {**VIRTUAL, **GLOO}}


class Graphs:
    """A backend that runs what it is given, and keeps from which files it comes."""

    def __init__(self, inner: str) -> None:
        self._inner = inner
        self.count = 0
        self.traces = ""

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        self.traces += "".join(str(node.meta.get("stack_trace", "")) for node in graph.graph.nodes)
        return torch._dynamo.lookup_backend(self._inner)(graph, inputs)


def train(
    what: str, width: int, settings: dict[str, Any], inner: str, fullgraph: bool
) -> tuple[list[float], list[Tensor], int, str]:
    """Losses and parameters of a short training in which ``what`` is compiled; how many graphs, and from where."""
    strategy = mirrored.MirroredStrategy(seed=0, **settings)
    layers = lambda: (nn.Linear(20, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 3))  # noqa: E731
    model = strategy.mirror(nn.Sequential(*seeded(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    graphs = Graphs(inner)

    def compiled(name: str, fn: Any) -> Any:
        return torch.compile(fn, backend=graphs, fullgraph=fullgraph) if what == name else fn

    net = compiled("model", model)

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(net(x), y, reduction="none")

    def by_backward(x: Tensor, y: Tensor) -> Tensor:
        loss = mirrored.compute_average_loss(losses(x, y))
        loss.backward()
        return loss.detach()

    def by_strategy(x: Tensor, y: Tensor) -> Tensor:
        return strategy.backward(losses, x, y)

    gradients: Step = compiled("forward and backward", by_backward)
    if what == "strategy.backward" or strategy.virtual_towers is not None:
        gradients = by_strategy

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = gradients(x, y)
        optimizer.step()
        return loss

    step = compiled("strategy.backward", compiled("step", step))
    x = torch.randn(RUNS * EXAMPLES, 20, generator=torch.Generator().manual_seed(1))
    data = strategy.distribute_dataset(torch.utils.data.TensorDataset(x, torch.arange(len(x)) % 3), EXAMPLES)
    found = []
    for batch in data:
        loss = strategy.run(step, args=batch)
        found.append(float(loss if gradients is by_strategy else strategy.reduce("sum", loss)))
    strategy.check_mirrored()
    return found, parameters_of(model), graphs.count, graphs.traces


def several(cases: list[tuple[str, int, bool]], settings: dict[str, Any], inner: str) -> list[Any]:
    """Several trainings in one job: starting towers takes longer."""
    trace_no_backward()
    results = []
    for what, width, fullgraph in cases:
        torch.compiler.reset()
        results.append(train(what, width, settings, inner, fullgraph))
    return results


def check(cases: list[tuple[str, int, bool]], setting: str, inner: str) -> None:
    settings = WAYS[setting]
    plain = [("nothing", width, False) for _, width, _ in cases]
    alone = {"virtual_towers": settings["virtual_towers"]} if "virtual_towers" in settings else {}
    expected = mirrored.launch(several, (plain, alone, inner), devices=["cpu:0"])[0]
    for found in mirrored.launch(several, (cases, settings, inner), devices=["cpu:0", "cpu:1"]):
        for case, result, reference in zip(cases, found, expected, strict=True):
            assert result[0] == pytest.approx(reference[0], abs=1e-6), case
            assert_close(result[1], reference[1], 1e-6)
            assert result[2] > 0, case
            ours = [f'"{ROOT}/{package}/' for package in ("mirrored", "towers")]  # the clone may have such a name
            assert not any(f in result[3].replace(f"{ours[0]}losses.py", "") for f in ours), case


SMALL, LARGE = 16, 1500  # the large one has several buckets

WHOLE = [("model", LARGE, True), ("forward and backward", LARGE, False), ("step", LARGE, False)]
CASES = {
    "shared memory": [*WHOLE, ("model", SMALL, False), ("step", SMALL, False), ("strategy.backward", SMALL, False)],
    "gloo": WHOLE,
    "sharded": WHOLE,
    "virtual": [("model", SMALL, True), ("step", LARGE, False)],
    "virtual gloo": [("strategy.backward", SMALL, False)],
}


@pytest.mark.parametrize(
    "setting",
    [pytest.param(name, marks=pytest.mark.extended if name != "virtual gloo" else ()) for name in CASES],
)
def test_whatever_is_compiled_has_the_numbers_of_the_plain_step(setting: str) -> None:
    check(CASES[setting], setting, "eager")


@pytest.mark.extended
@pytest.mark.parametrize(
    ("setting", "cases"),
    [("shared memory", [("model", SMALL, False), ("step", 2800, False)]), ("virtual gloo", [("step", 2800, False)])],
)
def test_a_step_of_eight_million_parameters_through_inductor(setting: str, cases: list[tuple[str, int, bool]]) -> None:
    """And a small model."""
    check(cases, setting, "inductor")


def backward_without_hooks(option: str) -> None:
    strategy = mirrored.MirroredStrategy(seed=0)
    with strategy.scope():
        model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def gradients(x: Tensor) -> None:
        model(x).square().sum().backward()

    def step() -> None:
        torch.compile(gradients, backend="eager")(torch.ones(1, 4))
        optimizer.step()

    with torch._dynamo.config.patch({option: True}):
        strategy.run(step)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("compiled_autograd", r"compiled autograd runs this backward\(\) on tower \d"),
        ("trace_autograd_ops", r"uses gradients that no backward\(\) has averaged .*trace_autograd_ops"),
    ],
)
def test_ways_of_compiling_that_leave_hooks_out_are_refused(option: str, words: str) -> None:
    if not hasattr(torch._dynamo.config, option):
        pytest.skip("not in this version of torch")
    with pytest.raises(mirrored.TowerFailedError, match=words):
        mirrored.launch(backward_without_hooks, (option,), devices=["cpu:0", "cpu:1"])


class Block(nn.Module):
    """Has 4 MB of parameters, the size of a bucket of Gloo."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layers = how, nn.Sequential(nn.Linear(1000, 1000), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "checkpoints":
            return checkpoint(self.layers, x, use_reentrant=False)
        if self.how == "graph breaks":
            torch._dynamo.graph_break()
        return self.layers(x)


def average_early(how: str) -> tuple[list[float], list[bool]]:
    """Losses of a training, and whether each all-reduce of its last step started before the last gradient was there."""
    strategy = mirrored.MirroredStrategy(seed=0, **(GLOO if how != "eager" else {}))
    with strategy.scope():
        model = nn.Sequential(nn.Linear(20, 1000), *(Block(how) for _ in range(3)), nn.Linear(1000, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch._dynamo.config.optimize_ddp = how != "not split"
    net: Any = torch.compile(model, backend="aot_eager") if how != "eager" else model

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = mirrored.compute_average_loss(nn.functional.cross_entropy(net(x), y, reduction="none"))
        loss.backward()
        optimizer.step()
        return loss.detach()

    x = torch.randn(60, 20, generator=torch.Generator().manual_seed(1))
    batch = 14  # the last one has 4 examples
    losses = []
    for rows in strategy.distribute_dataset(torch.utils.data.TensorDataset(x, torch.arange(len(x)) % 3), batch):
        with contextlib.suppress(ZeroDivisionError):
            strategy.run(lambda: 1 / 0)
        with torch.profiler.profile(acc_events=True) as profile:
            loss = strategy.run(step, args=rows)
        losses.append(float(strategy.reduce("sum", loss)))
        assert torch.nn.parallel.DistributedDataParallel._active_ddp_module is None
    events = profile.events() or []
    computed = max(e.time_range.end for e in events if e.name.startswith("autograd::engine") and "Accum" not in e.name)
    return losses, [e.time_range.start < computed for e in events if e.name == "c10d::allreduce_"]


@pytest.mark.extended
@pytest.mark.parametrize("how", ["one graph", "checkpoints", "graph breaks", "not split"])
def test_gradients_of_a_compiled_model_are_averaged_while_its_backward_runs(how: str) -> None:
    expected, _ = mirrored.launch(average_early, ("eager",), devices=["cpu:0"])[0]
    for losses, early in mirrored.launch(average_early, (how,), devices=["cpu:0", "cpu:1"]):
        assert losses == pytest.approx(expected, abs=1e-6)
        assert early == [how != "not split"] * 2 + [False]


def compile_alone(strategy: mirrored.Strategy) -> list[float]:
    """Trains inside the scope; in the fourth step, one tower has another share and compiles again."""
    with strategy.scope():
        model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def scaled(x: Tensor) -> Tensor:
            return model(x * torch.tensor([1.0, 2.0, 3.0, 4.0]))  # a constant, which a graph has as a buffer

        compiled = torch.compile(scaled, dynamic=False, backend="aot_eager")

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = mirrored.compute_average_loss(compiled(x).square()[:, 0], global_batch_size=8)
            loss.backward()
            optimizer.step()
            return loss.detach()

        sizes = [4, 4, 4, 3 if strategy.topology.index == 0 else 4, 4, 4]
        return [float(strategy.reduce("sum", strategy.run(step, args=(torch.ones(size, 4),)))) for size in sizes]


def test_a_tower_that_compiles_alone_is_in_step_with_the_others() -> None:
    first, second = towers(compile_alone)
    assert first == second
    assert first[-1] < first[0]
