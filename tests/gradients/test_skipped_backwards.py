"""Backwards that belong to different steps are never averaged together: the difference is an error on all towers."""

from __future__ import annotations

import pathlib
import queue
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mirrored
from tests.support.jobs import WAYS, all_raise, assert_close, make_data, make_mlp, parameters_of, seeded, towers
from tests.support.programs import run_program
from tests.support.steps import local_share

RUNS = 20
SKIPS = {5: 0, 15: 1}
"""In which runs a tower leaves out a backward, and which tower: the numbers of backwards balance in the end."""

UNCHECKED = {"mirror_check_interval": None}


def _train(strategy: mirrored.Strategy, losses: int, how: str) -> None:
    """``losses`` backwards a run; in two runs a tower leaves out the first ("left out") or accumulates it ("no_sync").

    "once more": tower 0 makes the fifth run twice.
    """
    with strategy.scope():
        model = make_mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y, reduction="none")

    def step(run: int, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        for number in range(losses):
            skipped = number == 0 and SKIPS.get(run) == strategy.topology.index
            if skipped and how == "no_sync":
                with strategy.no_sync():
                    mirrored.compute_average_loss(loss_fn(x, y)).backward()
                optimizer.zero_grad()
            elif skipped and how == "left out":
                continue
            elif strategy.virtual_towers is not None:
                strategy.backward(loss_fn, x, y)
            else:
                mirrored.compute_average_loss(loss_fn(x, y)).backward()
        if optimizer.param_groups[0]["params"][0].grad is not None:
            optimizer.step()

    data = strategy.distribute_dataset(torch.utils.data.TensorDataset(*make_data(8 * RUNS)), 8)
    for run, batch in enumerate(data, start=1):
        strategy.run(step, args=(run, *batch))
        if how == "once more" and run == 5 and strategy.is_chief:
            strategy.run(step, args=(run, *batch))  # for which the other tower has the next batch


@pytest.mark.parametrize("setting", WAYS)
@pytest.mark.parametrize(("losses", "how"), [(1, "no_sync"), (2, "left out")])
def test_a_backward_that_one_tower_leaves_out_is_an_error_in_that_step(setting: str, losses: int, how: str) -> None:
    advice = r'strategy\.reduce\("max"'  # how towers decide together
    settings = {**WAYS[setting], **UNCHECKED}
    for text in all_raise(mirrored.DisagreementError, advice, _train, losses, how, settings=settings):
        if setting == "sharded" and losses == 2:  # found in step 5 on both, where the optimizer's step begins
            assert "tower 0 steps SGD" in text
            assert "tower 1 uses the averaged gradients" in text
        elif setting == "virtual towers":
            call = f"strategy.backward() number {5 * losses} of 4 virtual towers"
            assert f"tower 1 {call} with batch 4 of epoch 0" in text
            assert f"tower 0 {call} with batch 5 of epoch 0" in text
        else:
            loop = "(loop 1 over distributed data)"
            assert f"backward() number 1 of step 6 with batch 5 of epoch 0 {loop} on tower 0" in text
            assert f"backward() number {losses} of step 5 with batch 4 of epoch 0 {loop} on tower 1" in text


@pytest.mark.parametrize("setting", WAYS)
def test_a_run_that_one_tower_makes_once_more_is_an_error_in_that_step(setting: str) -> None:
    settings = {**WAYS[setting], **UNCHECKED}
    for text in all_raise(mirrored.DisagreementError, "batch 4 of epoch 0", _train, 1, "once more", settings=settings):
        assert "batch 5 of epoch 0" in text


def _several_loops(strategy: mirrored.Strategy) -> int:
    """Batches in hand that are not those of the step: a thread takes them ahead, or a tower trains on earlier ones."""
    model = strategy.mirror(make_mlp())

    def step(x: Tensor, y: Tensor) -> None:
        mirrored.compute_average_loss(nn.functional.cross_entropy(model(x), y, reduction="none")).backward()

    dataset = torch.utils.data.TensorDataset(*make_data(24))
    train, other = (strategy.distribute_dataset(dataset, size) for size in (8, 4))
    earlier = []
    for batch, own in zip(train, other, strict=False):  # the loop over the second is left early
        strategy.run(step, args=batch)
        strategy.run(step, args=own)
        earlier.append(batch)
        strategy.run(step, args=earlier[strategy.topology.index % len(earlier)])
    for batch in earlier[strategy.topology.index :] + earlier[: strategy.topology.index]:
        strategy.run(step, args=batch)

    taken: queue.Queue[Any] = queue.Queue()
    ahead = threading.Thread(target=lambda: [taken.put(batch) for batch in train])
    ahead.start()
    if strategy.topology.index == 0:
        ahead.join()  # this tower is at the last batch before its first step, the others are where they are
    for _ in range(len(train)):
        strategy.run(step, args=taken.get())
    ahead.join()
    return strategy.health.run


@pytest.mark.parametrize("setting", ["shared memory", "gloo"])
def test_a_tower_may_have_other_batches_at_hand(setting: str) -> None:
    assert towers(_several_loops, settings=WAYS[setting]) == [15, 15]


def _one_more(strategy: mirrored.Strategy) -> None:
    model = strategy.mirror(make_mlp())
    x, _ = make_data(4)

    def step() -> None:
        for _ in range(2 if strategy.topology.index == 2 and strategy.health.step == 3 else 1):
            model(x).sum().backward()

    for _ in range(6):
        strategy.run(step)


def test_one_backward_more_of_one_of_three_towers_is_an_error_on_all() -> None:
    words = r"backward\(\) number 2 of step 3 on tower 2"
    text, *_ = all_raise(mirrored.DisagreementError, words, _one_more, count=3, same=True)
    assert "backward() number 1 of step 4 on towers 0 and 1" in text


KEPT = [[0, 1, 2, 3], [0, 2], [1], [0, 1, 3], [3, 2], [0, 1, 2, 3]]


def _layer_drop(strategy: mirrored.Strategy, reentrant: bool) -> list[Tensor]:
    """Checkpointed layers, of which some are left out at random (LayerDrop)."""
    layers = seeded(lambda: nn.ModuleList(nn.Linear(5, 5, dtype=torch.float64) for _ in range(4)))
    optimizer = torch.optim.SGD(strategy.mirror(layers).parameters(), lr=0.1)
    x, _ = make_data(12)
    own = local_share(strategy, x)[0].clone().requires_grad_()

    def step(kept: list[int]) -> None:
        optimizer.zero_grad()
        x = own
        for index in kept:
            x = checkpoint(layers[index], torch.tanh(x), use_reentrant=reentrant)
        mirrored.compute_average_loss(x.square().sum(1), global_batch_size=12).backward()
        optimizer.step()

    for run in range(len(KEPT)):
        # Each tower leaves out other layers, and another number of them.
        strategy.run(step, args=(KEPT[(run + strategy.topology.index) % len(KEPT)],))
    return parameters_of(layers)


@pytest.mark.parametrize("setting", ["shared memory", "gloo"])
def test_reentrant_checkpoints_of_a_random_depth_are_one_backward(setting: str) -> None:
    nested, plain = (towers(_layer_drop, reentrant, count=3, settings=WAYS[setting]) for reentrant in (True, False))
    for parameters in nested:
        assert_close(parameters, plain[0], 1e-12)


BETWEEN_GPUS = """
import sys, torch, mirrored
from towers.collectives import communicator
from towers.gradients.flags import Comparison

communicator.FEW = int(sys.argv[2])
strategy = mirrored.MirroredStrategy(seed=0, mirror_check_interval=1000)
with strategy.scope():
    model = torch.nn.Linear(4, 2)
averager = strategy.engine.averager
averager._cycle._comparison = Comparison(averager._channel)  # as between GPUs
steps, slow = int(sys.argv[1]), strategy.topology.index == 1


def step(trains):
    if trains:
        model(torch.ones(1, 4)).sum().backward()


for number in range(steps + slow):
    strategy.run(step, args=(not (slow and number == 12),))
    print(number, flush=True)
"""


@pytest.mark.extended
@pytest.mark.parametrize("few", [2, 1], ids=["gathered", "added up"])
@pytest.mark.parametrize(
    ("steps", "told"),
    [
        (16, "different backwards were averaged in the last steps: tower 0 differs from tower 1. Some tower"),
        (26, "backward() number 1 of step 13 on tower 0, backward() number 1 of step 13, in call 14 of"),
    ],
)
def test_between_gpus_a_backward_that_one_tower_leaves_out_is_an_error_later(
    steps: int, told: str, few: int, tmp_path: pathlib.Path
) -> None:
    """At the latest when the towers end."""
    (tmp_path / "train.py").write_text(BETWEEN_GPUS)
    words = ["-m", "mirrored", "run", "--devices", "cpu:0,cpu:1", "train.py", str(steps), str(few)]
    result = run_program(words, cwd=str(tmp_path), code=1)
    assert "DisagreementError" in result.stderr
    assert told in result.stderr
    assert "\n22\n" not in result.stdout  # backwards 12 to 19 are compared together, when the 22nd starts at the latest
