"""Memory of a CPU tower: ours and DDP's against a bare loop in as many processes.

The proportional set size of a process (what it shares counts in parts) after some steps, gradients included; the mean
over the towers. "÷ gradients" is what comes on top of the bare loop, in sizes of all gradients.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import pathlib
import re
import statistics
from collections.abc import Sequence

import figure
import models
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mirrored

_STEPS = 5


def _measure(kind: str, case: str) -> tuple[float, float]:
    """(proportional set size, size of all gradients) in bytes, with all towers at the same place."""
    strategy = mirrored.MirroredStrategy()
    torch.manual_seed(0)
    size = models.CASES[case] // strategy.num_replicas_in_sync
    x, y = models.batch(case, size, seed=strategy.topology.index)
    with strategy.scope() if kind == "ours" else contextlib.nullcontext():
        model = models.make(case)
    if kind == "DDP":
        wrapped: torch.nn.Module = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        output = wrapped(x) if kind == "DDP" else model(x)
        models.per_example_loss(output, y).mean().backward()
        optimizer.step()

    for _ in range(_STEPS):
        if kind == "ours":
            strategy.run(step)
        else:
            step()
    gc.collect()
    dist.barrier()
    text = pathlib.Path("/proc/self/smaps_rollup").read_text()
    dist.barrier()
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return 1024.0 * int(found[1]), float(sum(p.nbytes for p in model.parameters()))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench memory", description=__doc__)
    parser.add_argument("--cases", default="mlp-64,resnet-64,transformer-16", help="comma-separated")
    parser.add_argument("--towers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    figure.add_option(parser)
    options = parser.parse_args(arguments)
    bars = []
    devices = [f"cpu:{i}" for i in range(options.towers)]
    print(f"torch {torch.__version__}; {options.towers} towers; MB per tower, medians of {options.turns} runs")
    print(f"{'':<16}{'gradients':>10}{'bare':>9}{'ours':>9}{'DDP':>9}{'ours ÷ gradients':>19}{'DDP ÷ gradients':>17}")
    for case in options.cases.split(","):
        found: dict[str, list[float]] = {"bare": [], "ours": [], "DDP": []}
        gradients = 1.0
        for _ in range(options.turns):
            for kind, sizes in found.items():
                results = mirrored.launch(_measure, (kind, case), devices=devices)
                sizes.append(statistics.mean(size for size, _ in results))
                gradients = results[0][1]
        bare, ours, ddp = (statistics.median(found[kind]) for kind in ("bare", "ours", "DDP"))
        print(
            f"{case:<16}{gradients / 1e6:>10.1f}{bare / 1e6:>9.1f}{ours / 1e6:>9.1f}{ddp / 1e6:>9.1f}"
            f"{(ours - bare) / gradients:>19.2f}{(ddp - bare) / gradients:>17.2f}",
            flush=True,
        )
        for kind in ("ours", "DDP"):
            extra = [(size - alone) / gradients for size, alone in zip(found[kind], found["bare"], strict=True)]
            bars.append(figure.bar(case, kind, extra))
    title = f"Memory on top of a bare loop ÷ gradients, {options.towers} towers"
    figure.draw(options.png, title, bars, axis="extra ÷ gradients")
