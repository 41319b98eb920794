"""Time of a training step: ours against DDP, and one tower against a bare loop.

``--variants`` names what is compared with DDP (on Gloo between CPU towers, on NCCL between GPUs) and with no
communication at all: "ours"; "sharded", ours with ``shard_optimizer=True``; "central", its CentralStorageStrategy (both
are compared with "sharded", too, where that is named); "fully-sharded", ours with ``strategy.shard``, which is also
compared with FSDP2 (torch's ``fully_shard`` alone, on the same backend as DDP); "ddp-shm", DDP on our own backend for
torch.distributed (CPUs); "zero", DDP with its ZeroRedundancyOptimizer; "tensorflow", its MirroredStrategy on logical
CPUs (of mlp; left out where it is not installed: the extra of that name). ``--untouched`` adds a second DDP and a
second bare loop, in processes of their own without mirrored, as a script has them that never heard of it (CPUs). All
other variants but TensorFlow live in the same processes. The towers of the first comparison are CPU towers unless
``--devices`` names others, and ``--towers 1`` leaves it out; the one tower of the second is a GPU where there is one.
All take turns in blocks of steps, so that each ratio compares neighbours in time; medians over the turns are printed.
"Bare loop ÷ its twin" compares two equal loops: what it differs from 1 is the noise of the machine. Times are in
milliseconds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import command
import figure
import models
import plain
import steps
import tensorflow_step
import torch
import torch.distributed as dist
import untouched_step
from plain import Step
from steps import Times
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

import mirrored

LABELS = {
    "ours": "ours",
    "central": "central storage",
    "sharded": "sharded",
    "ddp-shm": "DDP on our backend",
    "zero": "ZeRO",
    "fully-sharded": "fully sharded",
    "tensorflow": "TensorFlow",
}
"""What can be compared with DDP."""

BASES = {
    "DDP": "DDP",
    "bound": "no communication",
    "sharded": "sharded",
    "FSDP2": "FSDP2",
    "untouched DDP": "untouched DDP",
    "untouched bound": "untouched bare loop",
}
"""What they are compared with."""


def _two_towers(
    case: str,
    turns: int,
    seconds: float,
    implementation: str,
    optimizer: str,
    variants: Sequence[str],
    meeting: str | None,
) -> Times:
    work = steps.Work(case, steps.strategy(implementation), optimizer)
    chosen: dict[str, Step] = {}
    if "ours" in variants:
        chosen["ours"] = work.ours()
    if "sharded" in variants:
        chosen["sharded"] = work.ours(steps.strategy(implementation, shard_optimizer=True))
    if "central" in variants:
        chosen["central"] = work.ours(steps.strategy(implementation, mirrored.CentralStorageStrategy))
    if "ddp-shm" in variants:
        import towers.backend

        chosen["ddp-shm"] = work.ddp(process_group=dist.new_group(backend=towers.backend.NAME))
    if "zero" in variants:
        chosen["zero"] = work.ddp(lambda parameters: zero(work.make_optimizer, parameters))
    index, count = work.strategy.topology.index, work.strategy.num_replicas_in_sync
    if "tensorflow" in variants:
        chosen["tensorflow"] = lambda: None  # the other towers wait
        if work.strategy.is_chief:
            chosen["tensorflow"] = tensorflow_step.program(count, work.batch, optimizer)
    if "fully-sharded" in variants:
        chosen |= {"fully-sharded": work.fully_sharded(), "FSDP2": work.fsdp()}
    chosen |= {"DDP": work.ddp(), "bound": work.bare()}
    if meeting is not None:
        for kind in untouched_step.KINDS:
            chosen[f"untouched {kind}"] = untouched_step.program(kind, case, optimizer, meeting, index, count)
    return steps.alternate(chosen, turns, seconds)


def zero(make: plain.MakeOptimizer, parameters: Iterator[nn.Parameter]) -> Optimizer:
    """The optimizer that ``make`` makes, with its state in parts."""
    every = list(parameters)
    like = make([torch.zeros(1, requires_grad=True)])
    settings = {name: value for name, value in like.defaults.items() if name != "decoupled_weight_decay"}
    return ZeroRedundancyOptimizer(every, type(like), **settings)


def _one_tower(case: str, turns: int, seconds: float) -> Times:
    work = steps.Work(case, mirrored.MirroredStrategy())
    return steps.alternate({"bare": work.bare(), "twin": work.bare(), "ours": work.ours()}, turns, seconds)


def main(arguments: Sequence[str]) -> None:
    parser = command.parser("step", __doc__, turns=9, seconds=0.7, cases=models.CASES, implementation=True)
    parser.add_argument("--devices", type=command.names, help="of the towers, such as cuda:0,cuda:1; default: CPUs")
    parser.add_argument("--optimizer", default="sgd", choices=plain.OPTIMIZERS, help="of all variants")
    parser.add_argument("--variants", type=command.names, default="ours", help="comma-separated: " + ", ".join(LABELS))
    parser.add_argument("--untouched", action="store_true", help="also compare with processes without mirrored")
    parser.add_argument("--png", type=Path, metavar="PATH", help="also draw the ratios into this file")
    options = parser.parse_args(arguments)
    variants = options.variants
    if unknown := set(variants) - set(LABELS):
        parser.error(f"unknown variants: {', '.join(sorted(unknown))}")
    if "tensorflow" in variants and not tensorflow_step.installed():
        variants.remove("tensorflow")
        print("TensorFlow is not installed here and is left out (pip install -e '.[tensorflow]')")
    bars = []
    steps.print_head(f"{options.optimizer}; medians of {options.turns} alternations")
    devices = options.devices or command.cpus(options.towers)
    for case in options.cases:
        timing = (case, options.turns, options.seconds)
        if len(devices) > 1:
            compared = [v for v in variants if v != "tensorflow" or case.startswith("mlp")]
            with tempfile.TemporaryDirectory() as folder:
                meeting = f"{folder}/meeting" if options.untouched else None
                how = (options.implementation, options.optimizer, compared, meeting)
                times = mirrored.launch(_two_towers, (*timing, *how), devices=devices)[0]
            for variant in compared:
                known = set(BASES) - {variant, *(["FSDP2"] if variant != "fully-sharded" else [])}
                for base in filter(times.__contains__, known):
                    label = f"{LABELS[variant]} ÷ {BASES[base]}"
                    ratio = steps.print_row(f"{case}: {label}", times[variant], times[base])
                    bars.append(figure.Bar(case, label, ratio))
        if options.optimizer == "sgd" and variants == ["ours"]:
            times = mirrored.launch(_one_tower, timing, towers=1)[0]
            ratio = steps.print_row(f"{case}: one tower ÷ bare loop", times["ours"], times["bare"])
            steps.print_row(f"{case}: bare loop ÷ its twin", times["bare"], times["twin"])
            bars.append(figure.Bar(case, "one tower ÷ bare loop", ratio))
    if options.png is not None and bars:
        figure.draw(options.png, f"A training step, {len(devices)} towers, {options.optimizer}", bars)
