"""Sharded optimizers: their groups, settings, hooks and state, and those that cannot be shared out."""

from __future__ import annotations

import copy
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import mirrored
from tests.support.features import mlp
from tests.support.jobs import assert_close, make_data, parameters_of, text_of
from tests.support.processes import await_ends
from tests.support.sharded import assert_same_state, equal_unsharded, launch, small_training, tensors
from towers.sharding.optimizer import OptimizerSharder
from towers.sharding.shards import ShardedState


def edit_groups(strategy: mirrored.Strategy, what: str) -> list[Tensor]:
    """Parameters that leave their group, come back, or change places: their state stays theirs."""
    model = strategy.mirror(nn.Sequential(*(nn.Linear(5, 5) for _ in range(3))))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 5) * (strategy.topology.index + 1)).square().mean().backward()
        optimizer.step()

    strategy.run(step)
    group = optimizer.param_groups[0]
    kept = list(group["params"])
    group["params"] = {"reordered": kept[::-1], "left": kept[2:], "left and back": kept[2:]}[what]
    strategy.run(step)
    if what == "left and back":
        group["params"] = kept
        strategy.run(step)
    # torch's own state_dict() fails while there is state of parameters that have left.
    return [*parameters_of(model), *(tensors(optimizer) if what != "left" else ())]


def test_groups_that_a_script_edits() -> None:
    equal_unsharded(edit_groups, ("reordered", "left", "left and back"))


class Scaled(torch.optim.SGD):
    """Takes an argument more, and counts its steps in the group."""

    elementwise = True

    @torch.no_grad()
    def step(self, scale: float = 1.0) -> None:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for p in group["params"]:
                p.sub_(p.grad * scale)


def step_with_an_argument(strategy: mirrored.Strategy) -> tuple[float, int, int]:
    model = strategy.mirror(nn.ParameterList([torch.zeros(3)]))
    optimizer = Scaled(model.parameters(), 0.1)

    def step() -> None:
        optimizer.zero_grad()
        model[0].sum().backward()
        optimizer.step(scale=2.0)

    strategy.run(step)
    strategy.run(step)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "model.safetensors")
        save_model(model, str(path))  # refuses parameters that are parts of a larger storage
        return float(model[0][0]), optimizer.param_groups[0]["steps"], path.stat().st_size


def test_arguments_of_a_step_its_settings_and_what_is_saved() -> None:
    for value, steps, size in launch(step_with_an_argument):
        assert value == -4.0
        assert steps == 2
        assert size < 1000


class Normalized(torch.optim.SGD):
    """Not element-wise, whatever it derives from."""


def refused(
    strategy: mirrored.Strategy, make: Callable[[Any], torch.optim.Optimizer], model: nn.Module, x: Tensor
) -> str:
    strategy.mirror(model)
    optimizer = make(model.parameters())

    def step() -> None:
        model(x).sum().backward()
        optimizer.step(*([lambda: 1.0] if isinstance(optimizer, torch.optim.LBFGS) else []))

    return text_of(mirrored.MirrorError, strategy.run, step)


REFUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "cannot shard Adafactor.step()": torch.optim.Adafactor,
    "cannot shard LBFGS.step()": torch.optim.LBFGS,
    "set Normalized.elementwise = True": Normalized,
    "differentiable=True": lambda p: torch.optim.SGD(p, 0.1, differentiable=True),
}
if hasattr(torch.optim, "Muon"):
    REFUSED["cannot shard Muon.step()"] = torch.optim.Muon


def refuse(strategy: mirrored.Strategy, words: str) -> str:
    if words == "sparse":
        return refused(strategy, torch.optim.SGD, nn.Embedding(4, 4, sparse=True), torch.tensor([1]))
    return refused(strategy, REFUSED[words], nn.Linear(4, 4, bias=False), torch.ones(2, 4))


def test_what_cannot_be_shared_out_is_refused_by_name() -> None:
    for texts in launch(refuse, names=[*REFUSED, "sparse"]):
        assert [words for words, text in texts.items() if words not in text] == []
        assert "Embedding.weight" in texts["sparse"]


class Lion(torch.optim.Optimizer):
    """A user's own element-wise optimizer, with state that is no tensor and tensors that are replaced in each step."""

    elementwise = True

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.beta = 0.9

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["momentum"] = self.beta * state.get("momentum", torch.zeros_like(p)) + p.grad
                state["steps"] = state.get("steps", 0) + 1
                p.sub_(state["momentum"].sign() * group["lr"] / state["steps"])


def train_in_two_halves(
    strategy: mirrored.Strategy, given: dict[str, Any] | None, lion: bool, chief_alone: bool = False
) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
    """Three steps of six, from the start or from ``given``; state dicts of model and optimizer, elements of state."""
    with strategy.scope():
        model = mlp()
        optimizer = Lion(model.parameters(), 0.01) if lion else torch.optim.AdamW(model.parameters(), 0.02)
    if given is not None:
        model.load_state_dict(given["model"])
        optimizer.load_state_dict(given["optimizer"])
        assert_same_state(optimizer.state_dict(), given["optimizer"])
    x, y = make_data(48, torch.float32)
    batches = list(zip(x.split(8), y.split(8), strict=True))

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        share = strategy.topology.index if strategy.num_replicas_in_sync > 1 else slice(None)
        x, y = x.view(2, 4, -1)[share].flatten(0, -2), y.view(2, 4)[share].flatten()
        losses = F.cross_entropy(model(x), y, reduction="none")
        mirrored.compute_average_loss(losses, global_batch_size=8).backward()
        optimizer.step()

    for batch in batches[3:] if given is not None else batches[:3]:
        strategy.run(step, batch)
    processes = strategy.gather(torch.tensor([os.getpid()])).tolist()
    if chief_alone and not strategy.is_chief:
        return {}, {}, []
    if chief_alone:
        await_ends(*processes[1:])
    sharded = isinstance(optimizer.state, ShardedState)
    inner = strategy.engine.attached(OptimizerSharder)._known[optimizer].inner if sharded else optimizer
    held = [sum(v.numel() for v in s.values() if isinstance(v, Tensor)) for s in inner.state.values()]
    return model.state_dict(), optimizer.state_dict(), held


@pytest.mark.parametrize("lion", [False, True], ids=["AdamW", "own optimizer"])
def test_state_moves_between_sharded_unsharded_and_another_number_of_towers(lion: bool) -> None:
    unsharded = launch(train_in_two_halves, None, lion, sharded=False)[0]
    sharded = launch(train_in_two_halves, None, lion, True)[0]
    assert_same_state(sharded[1], unsharded[1])
    given = {"model": sharded[0], "optimizer": sharded[1]}
    expected = launch(train_in_two_halves, given, lion, sharded=False)[0]
    for count in (2, 1):
        model, state, _ = launch(train_in_two_halves, given, lion, sharded=count > 1, count=count)[0]
        if count == 2:
            assert_same_state(state, expected[1])
        assert_close(list(model.values()), list(expected[0].values()), 0 if count == 2 else 1e-5)


def test_a_tower_holds_its_part_of_the_state() -> None:
    *_, all_of_it = launch(train_in_two_halves, None, False, sharded=False, count=1)[0]
    parts = [sum(held) for *_, held in launch(train_in_two_halves, None, False)]
    scalars = 4 * 2  # each tower counts the steps of its shards
    assert abs(sum(parts) - sum(all_of_it)) <= scalars
    assert max(parts) <= sum(all_of_it) / 2 + 2 * 64 + scalars


def own_hooks(strategy: mirrored.Strategy) -> None:
    model, optimizer, step = small_training(strategy, lambda parameters: torch.optim.SGD(parameters, 1.0))
    said: list[str] = []

    def before(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        said.append("before")
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1e-3)

    def after(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
        said.append("after")

    everywhere = register_optimizer_step_post_hook(after)
    optimizer.register_step_post_hook(after)

    strategy.run(step)
    optimizer.register_step_pre_hook(before)
    start = parameters_of(model)
    strategy.run(step)
    moved = torch.stack([(a - b).norm() for a, b in zip(start, parameters_of(model), strict=True)]).norm()
    assert abs(float(moved) - 1e-3) < 1e-5, "the hook's clipping must count"
    everywhere.remove()
    assert said == ["after", "after", "before", "after", "after"]


def test_hooks_of_the_optimizer_see_its_parameters_and_come_first() -> None:
    launch(own_hooks)


def ask_for_the_state(strategy: mirrored.Strategy) -> list[str]:
    model, optimizer, step = small_training(strategy, torch.optim.Adam)
    strategy.run(step)
    weight = model[0].weight
    asks = (
        lambda: optimizer.state[weight],
        lambda: optimizer.state.get(weight),
        lambda: weight in optimizer.state,
        lambda: optimizer.state.clear(),
        lambda: optimizer.state.values(),
        lambda: copy.deepcopy(optimizer),
    )
    return [text_of(mirrored.MirrorError, ask) for ask in asks]


def test_the_state_itself_is_refused_with_a_way_out() -> None:
    for texts in launch(ask_for_the_state):
        assert all("optimizer.state_dict()" in text for text in texts)
