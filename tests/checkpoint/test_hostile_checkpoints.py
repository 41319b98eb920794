"""Who gives a checkpoint gives numbers: whatever they are, they are taken whole, or refused and nothing has changed."""

from __future__ import annotations

import pathlib
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

import mirrored
from tests.support.checkpoints import manager_of
from tests.support.hostile_checkpoints import Run, forge, forge_manifest


def refused(run: Run, words: str, name: str = "forged") -> None:
    """A checkpoint is refused with an error that says ``words``; then everything is as it was, and goes on."""
    before = run.standing()
    with pytest.raises(mirrored.CheckpointError, match=words):
        run.manager.restore(name)
    assert run.standing() == before
    run.step()
    assert run.manager.restore("honest").step == 1


def test_an_honest_checkpoint_is_taken(folder: pathlib.Path) -> None:
    run = Run(folder)
    forge(folder, lambda states: None)
    before = run.standing()
    assert run.manager.restore("forged").step == 1
    assert run.standing() != before


# -- random numbers ------------------------------------------------------------------------------------------


def torch_state(left: int, seeded: int, following: int) -> Callable[[Any], Any]:
    def change(state: torch.Tensor) -> torch.Tensor:
        data = bytearray(state.numpy().tobytes())
        struct.pack_into("<iiQ", data, 8, left, seeded, following)
        return torch.frombuffer(data, dtype=torch.uint8)

    return change


def put(index: int, value: Any) -> Callable[[Any], Any]:
    """Change an entry of a list, or an element of a tensor."""

    def change(state: Any) -> Any:
        state[index] = value
        return state

    return change


def in_tensor(index: int, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda state: put(index, change(state[index]))(state)


RANDOM_STATES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "NumPy's position beyond": ("numpy", put(2, 625)),
    "NumPy's position far beyond": ("numpy", put(2, 2**31 - 2)),
    "NumPy's position before": ("numpy", put(2, -5)),
    "NumPy's position no number": ("numpy", put(2, True)),
    "NumPy's key short": ("numpy", in_tensor(1, lambda key: key[:10])),
    "NumPy's key long": ("numpy", in_tensor(1, lambda key: key.repeat(2))),
    "NumPy's key negative": ("numpy", in_tensor(1, put(3, -1))),
    "NumPy's key too large": ("numpy", in_tensor(1, put(3, 2**32))),
    "NumPy's key fractions": ("numpy", in_tensor(1, lambda key: key.double())),
    "NumPy's other generator": ("numpy", put(0, "PCG64")),
    "NumPy's flag": ("numpy", put(3, 2)),
    "NumPy's normal number": ("numpy", put(4, "0.5")),
    "NumPy's lacks a field": ("numpy", lambda state: state[:3]),
    "NumPy's no list": ("numpy", lambda _: {"bit_generator": "MT19937"}),
    "Python's version": ("python", put(0, 2)),
    "Python's position beyond": ("python", in_tensor(1, put(624, 625))),
    "Python's position before": ("python", in_tensor(1, put(624, -1))),
    "Python's words too large": ("python", in_tensor(1, put(0, 2**40))),
    "Python's words short": ("python", in_tensor(1, lambda words: words[:600])),
    "Python's normal number": ("python", put(2, "0.5")),
    "torch's position beyond": ("torch", torch_state(624, 1, 624)),
    "torch's position askew": ("torch", torch_state(5, 1, 621)),
    "torch's position far beyond": ("torch", torch_state(5, 1, 2**40)),
    "torch's rest negative": ("torch", torch_state(-5, 1, 3)),
    "torch's never seeded": ("torch", torch_state(1, 0, 0)),
    "torch's flag": ("torch", put(5052, 7)),
    "torch's short": ("torch", lambda state: state[:100]),
    "torch's long": ("torch", lambda state: state.repeat(2)),
    "torch's fractions": ("torch", lambda state: state.double()),
    "torch's missing": ("torch", lambda _: None),
}


@pytest.mark.parametrize("kind", RANDOM_STATES)
def test_a_state_at_which_no_generator_can_stand_is_refused(folder: pathlib.Path, kind: str) -> None:
    """Of the stream outside of runs, and of the one inside."""
    run = Run(folder)
    field, change = RANDOM_STATES[kind]
    for stream in ("outside", "inside"):

        def states(found: dict[str, Any], stream: str = stream) -> None:
            streams = found["mirrored.streams"][stream]
            streams[field] = change(streams[field])

        forge(folder, states, stream)
        refused(run, "mirrored.streams cannot load its state: ", stream)


@pytest.mark.parametrize("stream", ["outside", "inside"])
def test_a_random_state_that_is_none_at_all_is_refused(folder: pathlib.Path, stream: str) -> None:
    run = Run(folder)
    forge(folder, lambda found: found["mirrored.streams"].update({stream: 5}))
    refused(run, "mirrored.streams cannot load its state: ")


# -- all or nothing ------------------------------------------------------------------------------------------


def in_state(*path: Any, value: Any) -> Callable[[dict[str, Any]], Any]:
    """Set what lies at the end of a path."""

    def change(states: dict[str, Any]) -> None:
        found: Any = states
        for step in path[:-1]:
            found = found[step]
        found[path[-1]] = value

    return change


GROUP = ("optimizer", "param_groups", 0)
CRAFTED: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "state of no parameter": ("optimizer: .* parameter 99", in_state("optimizer", "state", 99, value={})),
    "state of a parameter -1": ("optimizer: .* parameter -1", in_state("optimizer", "state", -1, value={})),
    "state that is none": ("optimizer: it is not saved as an optimizer", in_state("optimizer", "state", 0, value=5)),
    "numbers twice": ("optimizer: its parameters are not numbered", in_state(*GROUP, "params", value=[0, 0, 1, 1])),
    "numbers beyond": ("optimizer: its parameters are not numbered", in_state(*GROUP, "params", value=[9, 8, 7, 6])),
    "numbers that are lists": ("optimizer: its parameters", in_state(*GROUP, "params", value=[[], [], [], []])),
    "moment of another shape": ("parameter 1", in_state("optimizer", "state", 1, "exp_avg", value=torch.ones(9))),
    "an array that torch cannot copy": (
        "optimizer cannot load its state",
        in_state("optimizer", "state", 3, "more", value=np.ones(2)),
    ),
    "versions that are none": ("model: its versions in the", in_state("model", "mirrored.versions", value=[1])),
    "a version that is none": ("model: its versions in the", in_state("model", "mirrored.versions", "0", value=7)),
    "no epoch": ("data cannot load its state", in_state("data", "epoch", value=None)),
    "a step of -3": ("data cannot load its state", in_state("data", "step", value=-3)),
    "examples that never were": (
        "data cannot load its state",
        lambda states: states["data"].update(step=1, data={**states["data"]["data"], "global_batch_size": -2}),
    ),
    "a seed of -3": ("mirrored.strategy cannot load its state", in_state("mirrored.strategy", "seed", value=-3)),
    "no schedule": ("schedule: it is saved as a int, not as a schedule", in_state("schedule", value=5)),
    "a list for progress": ("progress: it is a dict here", in_state("progress", value=[])),
}


@pytest.mark.parametrize("kind", CRAFTED)
def test_a_crafted_state_changes_nothing(folder: pathlib.Path, kind: str) -> None:
    run = Run(folder)
    words, states = CRAFTED[kind]
    forge(folder, states)
    refused(run, words)


@pytest.mark.parametrize(
    "strides", [[-1, 1, 1, 1], [5, 5, 5, 5], [10**18] * 4, ["a"] * 4, [8, 1, 4], 7, None, [10**30] * 4, [8.0, 1, 4, 2]]
)
def test_crafted_strides_change_nothing(folder: pathlib.Path, strides: Any) -> None:
    run = Run(folder)
    forge(folder, lambda states: None)
    changed = []

    def change(manifest: dict[str, Any]) -> None:
        for name, unusual in manifest["tensors"].items():
            if name.startswith("optimizer/") and "strides" in unusual:
                unusual["strides"] = strides
                changed.append(name)

    forge_manifest(folder / "forged", change)
    assert changed
    refused(run, "nothing was changed: optimizer: ")


class Late(nn.Module):
    """Takes its parameters, then finds something wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros(()), persistent=False)
        self.kept = {"calls": 0}
        self.refuses = False

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state
        self.count += 1
        if self.refuses:
            raise RuntimeError("never mind")


def test_a_model_that_fails_halfway_is_as_it_was(folder: pathlib.Path) -> None:
    late = Late()
    run = Run(folder, late=late)
    forge(folder, lambda states: None)
    late.weight.detach().fill_(5)
    late.kept, late.refuses = {"calls": 3}, True
    before, weight = run.standing(), late.weight
    with pytest.raises(mirrored.CheckpointError, match="late cannot load its state: RuntimeError.*never mind"):
        run.manager.restore("forged")
    late.refuses = False
    assert run.standing() == before
    assert late.weight is weight
    assert late.kept == {"calls": 3}
    assert late.count == 0


def test_weights_that_fail_halfway_leave_the_model_as_it_was(folder: pathlib.Path) -> None:
    strategy, late = mirrored.OneDeviceStrategy(), Late()
    mirrored.CheckpointManager(strategy, folder, {"model": late}).save("honest", wait=True)
    late.weight.detach().fill_(5)
    forge(folder, in_state("model", "_extra_state", value=torch.ones(3)))
    assert mirrored.load_weights(late, folder / "forged").loaded == {"weight": "weight"}
    assert late.weight.tolist() == [1, 1]

    def refuse(state: Any, prefix: str, *rest: Any) -> None:
        nn.Module._load_from_state_dict(late, state, prefix, *rest)
        raise RuntimeError("never mind")

    late._load_from_state_dict = refuse  # type: ignore[method-assign]
    late.weight.detach().fill_(5)
    with pytest.raises(mirrored.CheckpointError, match="the model is as it was: never mind"):
        mirrored.load_weights(late, folder / "forged")
    assert late.weight.tolist() == [5, 5]


def test_a_lazy_parameter_that_was_given_a_shape_is_lazy_again(folder: pathlib.Path) -> None:
    shaped, lazy, late = nn.Linear(3, 2), nn.LazyLinear(2), Late()
    manager_of(folder, {"model": shaped, "late": late}).save("honest", wait=True)
    late.refuses = True
    manager = manager_of(folder, {"model": lazy, "late": late})
    with pytest.raises(mirrored.CheckpointError, match="never mind"):
        manager.restore("honest")
    assert is_lazy(lazy.weight)
    late.refuses = False
    manager.restore("honest")
    assert torch.equal(lazy.weight, shaped.weight)


def _one_tower_fails(folder: str, shard: bool) -> Any:
    strategy = mirrored.MirroredStrategy(seed=0, shard_optimizer=shard)
    with strategy.scope():
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    late, progress = Late(), {"x": 1}
    objects = {"model": model, "optimizer": optimizer, "late": late, "progress": progress}
    manager = mirrored.CheckpointManager(strategy, folder, objects)

    def step() -> None:
        optimizer.zero_grad()
        strategy.run(lambda: model(torch.ones(1, 2)).sum().backward())
        optimizer.step()

    step()
    manager.save("honest", wait=True)
    step()
    progress["x"] = 2
    late.refuses = not strategy.is_chief
    before = [model.weight.tolist(), str(optimizer.state_dict()), torch.get_rng_state().tolist()]
    with pytest.raises(mirrored.CheckpointError, match="tower 1: late cannot load its state") as caught:
        manager.restore("honest")
    assert [model.weight.tolist(), str(optimizer.state_dict()), torch.get_rng_state().tolist()] == before
    step()
    strategy.check_mirrored()
    return str(caught.value), progress, model.weight.tolist()


@pytest.mark.parametrize("shard", [False, True])
def test_what_one_tower_cannot_take_changes_nothing_on_all(folder: pathlib.Path, shard: bool) -> None:
    first, second = mirrored.launch(_one_tower_fails, (str(folder), shard), devices=["cpu:0", "cpu:1"])
    assert first == second
    assert first[1] == {"x": 2}


# -- only state ----------------------------------------------------------------------------------------------


class Placed(nn.Module):
    """Has a device, as models of many libraries do, and no metric's state."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.secret = "kept"


def counted(path: str, updates: Any = 1, **state: Any) -> Callable[[dict[str, Any]], Any]:
    return in_state("more", "mirrored.metrics", value={path: {"state": state, "updates": updates}})


NOT_COUNTED: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "an attribute of a model": ("'placed' is a metric in the checkpoint, but", counted("placed", secret=torch.ones(1))),
    "an attribute of the whole": ("'' is a metric in the checkpoint, but", counted("", training=torch.ones(1))),
    "a method of a metric": ("the metric 'mean' has no state 'update'", counted("mean", update=torch.ones(1))),
    "the states of a metric": ("the metric 'mean' has no state '_defaults'", counted("mean", _defaults=[])),
    "a metric that is not here": (
        "'other' is a metric in the checkpoint",
        counted("other", mean_value=torch.ones(1)),
    ),
    "a text for a number": ("'mean_value' .* is saved as a str", counted("mean", mean_value="x")),
    "a text for updates": ("saved after 'x' updates", counted("mean", "x", mean_value=torch.ones(()))),
    "updates below none": ("saved after -1 updates", counted("mean", -1, mean_value=torch.ones(()))),
    "no state": ("that is not a dict", in_state("more", "mirrored.metrics", value={"mean": {"updates": 1}})),
    "no dict of metrics": ("that is not a dict", in_state("more", "mirrored.metrics", value=[1])),
}


@pytest.mark.parametrize("kind", NOT_COUNTED)
def test_a_checkpoint_sets_nothing_of_a_metric_but_its_states(folder: pathlib.Path, kind: str) -> None:
    from torchmetrics import MeanMetric

    more = nn.ModuleDict({"placed": Placed(), "mean": MeanMetric()})
    more["mean"].update(torch.tensor([2.0, 4.0]))
    run = Run(folder, more=more)
    words, states = NOT_COUNTED[kind]
    forge(folder, states)
    update = more["mean"].update
    refused(run, f"more: .*{words}")
    assert more["placed"].secret == "kept"
    assert more["mean"].update is update
    assert float(more["mean"].compute()) == 3.0


@pytest.mark.parametrize("attribute", ["step", "get_lr", "optimizer", "state_dict"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_checkpoint_sets_nothing_of_a_schedule_but_its_state(
    folder: pathlib.Path, attribute: str, nested: bool
) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    inner = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for _ in range(2)]
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, inner, [2])
    run = Run(folder, more=schedule)
    place = ("more", "_schedulers", 1, attribute) if nested else ("more", attribute)
    forge(folder, in_state(*place, value=3))
    refused(run, f"more: it has no state '{attribute}'")
    forge(folder, in_state("more", "_schedulers", value=[{}]))
    refused(run, "more: it is made of 2 schedules here")


def test_a_schedule_of_another_version_is_taken(folder: pathlib.Path) -> None:
    run = Run(folder)
    forge(folder, in_state("schedule", "verbose", value=False))
    assert run.manager.restore("forged").step == 1
