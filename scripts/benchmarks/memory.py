"""Memory of a CPU tower: ours, ours with the optimizer shared out, and DDP's, against a bare loop in as many processes.

The proportional set size of a process (what it shares counts in parts) after some steps, gradients included; the mean
over the towers. "÷ gradients" is what comes on top of the bare loop, in sizes of all gradients.
"""

from __future__ import annotations

import gc
import pathlib
import re
import statistics
from collections.abc import Sequence

import command
import models
import steps
import torch
import torch.distributed as dist

import mirrored

KINDS = ("bare", "ours", "sharded", "DDP")

_STEPS = 5


def _measure(kind: str, case: str) -> tuple[float, float]:
    """(proportional set size, size of all gradients) in bytes, with all towers at the same place."""
    work = steps.Work(case, mirrored.MirroredStrategy(shard_optimizer=kind == "sharded"))
    step = {"bare": work.bare, "ours": work.ours, "sharded": work.ours, "DDP": work.ddp}[kind]()
    for _ in range(_STEPS):
        step()
    gc.collect()
    dist.barrier()
    text = pathlib.Path("/proc/self/smaps_rollup").read_text()
    dist.barrier()
    match = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    assert match is not None
    with torch.device("meta"):
        gradients = sum(p.nbytes for p in models.make(case).parameters())
    return 1024.0 * int(match[1]), float(gradients)


def main(arguments: Sequence[str]) -> None:
    chosen = "mlp-64,resnet-64,transformer-16"
    options = command.parser("memory", __doc__, turns=3, cases=models.CASES, chosen=chosen).parse_args(arguments)
    print(f"torch {torch.version.__version__}; {options.towers} towers; MB per tower, medians of {options.turns} runs")
    head = "".join(f"{kind:>9}" for kind in KINDS) + "".join(f"{f'{kind} ÷ gradients':>21}" for kind in KINDS[1:])
    print(f"{'':<16}{'gradients':>10}{head}")
    for case in options.cases:
        sizes: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(options.turns):
            for kind in KINDS:
                results = mirrored.launch(_measure, (kind, case), devices=command.cpus(options.towers))
                sizes[kind].append(statistics.mean(size for size, _ in results))
        gradients = results[0][1]
        medians = {kind: statistics.median(sizes[kind]) for kind in KINDS}
        cells = "".join(f"{size / 1e6:>9.1f}" for size in medians.values())
        cells += "".join(f"{(medians[kind] - medians['bare']) / gradients:>21.2f}" for kind in KINDS[1:])
        print(f"{case:<16}{gradients / 1e6:>10.1f}{cells}", flush=True)
