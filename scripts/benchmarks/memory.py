"""Memory of a CPU tower: ours, ours with the optimizer shared out, and DDP's, against a bare loop in as many processes.

The proportional set size of a process (what it shares counts in parts) after some steps, gradients included; the mean
over the towers. "÷ gradients" is what comes on top of the bare loop, in sizes of all gradients.
"""

from __future__ import annotations

import argparse
import gc
import pathlib
import re
import statistics
from collections.abc import Sequence

import figure
import models
import plain
import ratios
import steps
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mirrored

KINDS = ("bare", "ours", "sharded", "DDP")

_STEPS = 5


def _measure(kind: str, case: str) -> tuple[float, float]:
    """(proportional set size, size of all gradients) in bytes, with all towers at the same place."""
    strategy = mirrored.MirroredStrategy(shard_optimizer=kind == "sharded")
    torch.manual_seed(0)
    batch = models.CASES[case]
    x, y = models.batch(case, batch // strategy.num_replicas_in_sync, seed=strategy.topology.index)
    if kind in ("ours", "sharded"):
        step = steps.ours(strategy, case, x, y, batch)
    elif kind == "DDP":
        step = plain.step(DistributedDataParallel(models.make(case), gradient_as_bucket_view=True), x, y)
    else:
        step = plain.step(models.make(case), x, y)
    for _ in range(_STEPS):
        step()
    gc.collect()
    dist.barrier()
    text = pathlib.Path("/proc/self/smaps_rollup").read_text()
    dist.barrier()
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    with torch.device("meta"):
        gradients = sum(p.nbytes for p in models.make(case).parameters())
    return 1024.0 * int(found[1]), float(gradients)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench memory", description=__doc__)
    parser.add_argument("--cases", default="mlp-64,resnet-64,transformer-16", help="comma-separated")
    parser.add_argument("--towers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    figure.add_option(parser)
    options = parser.parse_args(arguments)
    bars = []
    devices = [f"cpu:{i}" for i in range(options.towers)]
    print(f"torch {torch.version.__version__}; {options.towers} towers; MB per tower, medians of {options.turns} runs")
    head = "".join(f"{kind:>9}" for kind in KINDS) + "".join(f"{f'{kind} ÷ gradients':>21}" for kind in KINDS[1:])
    print(f"{'':<16}{'gradients':>10}{head}")
    for case in options.cases.split(","):
        found: dict[str, list[float]] = {kind: [] for kind in KINDS}
        gradients = 1.0
        for _ in range(options.turns):
            for kind, sizes in found.items():
                results = mirrored.launch(_measure, (kind, case), devices=devices)
                sizes.append(statistics.mean(size for size, _ in results))
                gradients = results[0][1]
        medians = {kind: statistics.median(sizes) for kind, sizes in found.items()}
        cells = "".join(f"{size / 1e6:>9.1f}" for size in medians.values())
        cells += "".join(f"{(medians[kind] - medians['bare']) / gradients:>21.2f}" for kind in KINDS[1:])
        print(f"{case:<16}{gradients / 1e6:>10.1f}{cells}", flush=True)
        for kind in KINDS[1:]:
            extra = [(size - alone) / gradients for size, alone in zip(found[kind], found["bare"], strict=True)]
            bars.append(figure.Bar(case, kind, ratios.spread(extra)))
    title = f"Memory on top of a bare loop ÷ gradients, {options.towers} towers"
    figure.draw(options.png, title, bars, axis="extra ÷ gradients")
