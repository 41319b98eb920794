"""Memory of a CPU tower: ours, the sharded optimizer's, central storage's, DDP's and FSDP2's, against a bare loop's.

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
import plain
import steps
import torch
import torch.distributed as dist

import mirrored

KINDS = ("bare", "ours", "sharded", "central", "fully-sharded", "DDP", "FSDP2")

_STEPS = 5


def _measure(kind: str, case: str, optimizer: str) -> tuple[float, float]:
    """(proportional set size, size of all gradients) in bytes, with all towers at the same place."""
    sharding = {"shard_optimizer": True} if kind == "sharded" else {}
    strategy = (mirrored.CentralStorageStrategy if kind == "central" else mirrored.MirroredStrategy)(**sharding)
    work = steps.Work(case, strategy, optimizer)
    makers = {"bare": work.bare, "DDP": work.ddp, "FSDP2": work.fsdp, "fully-sharded": work.fully_sharded}
    step = makers.get(kind, work.ours)()
    for _ in range(_STEPS):
        step()
    with torch.device("meta"):
        gradients = sum(p.nbytes for p in models.make(case).parameters())
    return proportional_set_size(), float(gradients)


def proportional_set_size() -> float:
    """Bytes of this tower, with all towers at the same place; what several share counts in parts."""
    gc.collect()
    dist.barrier()
    text = pathlib.Path("/proc/self/smaps_rollup").read_text()
    dist.barrier()
    match = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    assert match is not None
    return 1024.0 * int(match[1])


def main(arguments: Sequence[str]) -> None:
    chosen = "mlp-64,resnet-64,transformer-16"
    parser = command.parser("memory", __doc__, turns=3, cases=models.CASES, chosen=chosen)
    parser.add_argument("--optimizer", default="sgd", choices=plain.OPTIMIZERS, help="of all kinds")
    options = parser.parse_args(arguments)
    what = f"{options.optimizer}; {options.towers} towers; MB per tower, medians of {options.turns} runs"
    print(f"torch {torch.version.__version__}; {what}")
    head = "".join(f"{kind:>14}" for kind in KINDS) + "".join(f"{f'{kind} ÷ gradients':>21}" for kind in KINDS[1:])
    print(f"{'':<16}{'gradients':>10}{head}")
    for case in options.cases:
        sizes: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(options.turns):
            for kind in KINDS:
                how = (kind, case, options.optimizer)
                results = mirrored.launch(_measure, how, devices=command.cpus(options.towers))
                sizes[kind].append(statistics.mean(size for size, _ in results))
        gradients = results[0][1]
        medians = {kind: statistics.median(sizes[kind]) for kind in KINDS}
        cells = "".join(f"{size / 1e6:>14.1f}" for size in medians.values())
        cells += "".join(f"{(medians[kind] - medians['bare']) / gradients:>21.2f}" for kind in KINDS[1:])
        print(f"{case:<16}{gradients / 1e6:>10.1f}{cells}", flush=True)
