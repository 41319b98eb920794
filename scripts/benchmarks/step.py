"""Time of a training step: ours against DDP on Gloo, and one tower against a bare loop.

The towers of the first comparison are CPU towers; the one tower of the second is a GPU where there is one.
All variants live in the same processes and take turns in blocks of steps, so that each ratio compares
neighbours in time; medians over the turns are printed. "Bare loop ÷ its twin" compares two equal loops: what it
differs from 1 is the noise of the machine. Times are in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import models
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mirrored

Step = Callable[[], None]
Times = dict[str, list[float]]


def _ours(strategy: mirrored.Strategy, case: str, x: torch.Tensor, y: torch.Tensor) -> Step:
    with strategy.scope():
        model = models.make(case)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        per_example = models.per_example_loss(model(x), y)
        loss = mirrored.compute_average_loss(per_example, global_batch_size=models.CASES[case])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return lambda: strategy.run(train_step, args=(x, y))


def _plain(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
    """An ordinary loop; with ``model`` wrapped in DDP it is DDP's."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train_step() -> None:
        optimizer.zero_grad()
        models.per_example_loss(model(x), y).mean().backward()
        optimizer.step()

    return train_step


def _finish(together: bool) -> None:
    """Let everything end that was started: the other towers' steps, and a GPU's work."""
    if together:
        dist.barrier()
    elif torch.cuda.is_available():
        torch.cuda.synchronize()


def _alternate(steps: dict[str, Step], turns: int, seconds: float, together: bool) -> Times:
    """Seconds per step of every variant, one number a turn."""
    for step in steps.values():
        for _ in range(3):
            step()
    _finish(together)
    started = time.perf_counter()
    for step in steps.values():
        step()
    _finish(together)
    block = max(1, round(seconds * len(steps) / (time.perf_counter() - started)))
    if together:
        agreed = torch.tensor(block)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        block = int(agreed)
    times: Times = {name: [] for name in steps}
    order = list(steps.items())
    for _ in range(turns):
        order.reverse()  # neither variant is always the first
        for name, step in order:
            _finish(together)
            started = time.perf_counter()
            for _ in range(block):
                step()
            _finish(together)
            times[name].append((time.perf_counter() - started) / block)
    return times


def _two_towers(case: str, turns: int, seconds: float, implementation: str) -> Times:
    options = mirrored.CommunicationOptions(implementation=implementation)
    strategy = mirrored.MirroredStrategy(communication=options)
    torch.manual_seed(0)
    towers = strategy.num_replicas_in_sync
    x, y = models.batch(case, models.CASES[case] // towers, seed=strategy.topology.index)
    steps = {
        "ours": _ours(strategy, case, x, y),
        "DDP": _plain(DistributedDataParallel(models.make(case), gradient_as_bucket_view=True), x, y),
        "bound": _plain(models.make(case), x, y),
    }
    return _alternate(steps, turns, seconds, together=True)


def _one_tower(case: str, turns: int, seconds: float) -> Times:
    strategy = mirrored.MirroredStrategy()
    torch.manual_seed(0)
    x, y = (tensor.to(strategy.device) for tensor in models.batch(case, models.CASES[case], seed=0))
    bare, twin = (_plain(models.make(case).to(strategy.device), x, y) for _ in range(2))
    steps = {"ours": _ours(strategy, case, x, y), "bare": bare, "twin": twin}
    return _alternate(steps, turns, seconds, together=False)


def _row(label: str, times: Times, base: str, name: str = "ours") -> str:
    ratios = [a / b for a, b in zip(times[name], times[base], strict=True)]
    ours, other = (statistics.median(times[which]) * 1e3 for which in (name, base))
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return (
        f"{label:<34}{ours:>9.2f}{other:>9.2f}{statistics.median(ratios):>9.3f}{quartiles[0]:>9.3f}{quartiles[2]:>8.3f}"
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench step", description=__doc__)
    parser.add_argument("--cases", default=",".join(models.CASES), help="comma-separated: " + ", ".join(models.CASES))
    parser.add_argument("--towers", type=int, default=2, help="1 leaves the first comparison out")
    parser.add_argument("--implementation", default="auto", help="of the first comparison's towers: auto, gloo, …")
    parser.add_argument("--turns", type=int, default=9, help="alternations")
    parser.add_argument("--seconds", type=float, default=0.7, help="length of one variant's turn")
    options = parser.parse_args(arguments)
    print(f"torch {torch.__version__}; SGD with momentum; medians of {options.turns} alternations")
    print(f"{'':<34}{'ours ms':>9}{'other':>9}{'ratio':>9}{'25 %':>9}{'75 %':>8}")
    names = [f"cpu:{i}" for i in range(options.towers)]
    for case in options.cases.split(","):
        timing = (case, options.turns, options.seconds)
        if options.towers > 1:
            times = mirrored.launch(_two_towers, (*timing, options.implementation), devices=names)[0]
            print(_row(f"{case}: {options.towers} towers ÷ DDP on Gloo", times, "DDP"))
            print(_row(f"{case}: ÷ no communication", times, "bound"), flush=True)
        times = mirrored.launch(_one_tower, timing, towers=1)[0]
        print(_row(f"{case}: one tower ÷ bare loop", times, "bare"))
        print(_row(f"{case}: bare loop ÷ its twin", times, "twin", "bare"), flush=True)
