"""Time of a training step: ours against DDP, and one tower against a bare loop.

``--variants`` names what is compared with DDP (on Gloo between CPU towers, on NCCL between GPUs) and with no
communication at all: "ours"; "sharded", ours with ``shard_optimizer=True``; "ddp-shm", DDP on our own backend for
torch.distributed (CPUs); "zero", DDP with its ZeroRedundancyOptimizer; "tensorflow", its MirroredStrategy on logical
CPUs (of mlp; left out where it is not installed: the extra of that name). ``--untouched`` adds a second DDP and a
second bare loop, in processes of their own without mirrored, as a script has them that never heard of it (CPUs). All
other variants but TensorFlow live in the same processes. The towers of the first comparison are CPU towers unless
``--devices`` names others; the one tower of the second is a GPU where there is one. All take turns in blocks of steps,
so that each ratio compares neighbours in time; medians over the turns are printed. "Bare loop ÷ its twin" compares two
equal loops: what it differs from 1 is the noise of the machine. Times are in milliseconds.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import figure
import models
import plain
import ratios
import steps
import tensorflow_step
import torch
import torch.distributed as dist
import untouched_step
from steps import Times
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import mirrored

LABELS = {
    "ours": "ours",
    "sharded": "sharded",
    "ddp-shm": "DDP on our backend",
    "zero": "ZeRO",
    "tensorflow": "TensorFlow",
}
"""What can be compared with DDP."""

BASES = {
    "DDP": "DDP",
    "bound": "no communication",
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
    options = mirrored.CommunicationOptions(implementation=implementation)
    strategy = mirrored.MirroredStrategy(communication=options)
    torch.manual_seed(0)
    make, batch = plain.OPTIMIZERS[optimizer], models.CASES[case]
    share, device = batch // strategy.num_replicas_in_sync, strategy.device
    x, y = (tensor.to(device) for tensor in models.batch(case, share, seed=strategy.topology.index))

    def ddp(**kwargs: Any) -> nn.Module:
        return DistributedDataParallel(models.make(case).to(device), gradient_as_bucket_view=True, **kwargs)

    found: dict[str, plain.Step] = {}
    if "ours" in variants:
        found["ours"] = steps.ours(strategy, case, x, y, batch, make)
    if "sharded" in variants:
        sharding = mirrored.MirroredStrategy(communication=options, shard_optimizer=True)
        found["sharded"] = steps.ours(sharding, case, x, y, batch, make)
    if "ddp-shm" in variants:
        import towers.backend

        found["ddp-shm"] = plain.step(ddp(process_group=dist.new_group(backend=towers.backend.NAME)), x, y, make)
    if "zero" in variants:
        found["zero"] = plain.step(ddp(), x, y, lambda p: _zero(make, p))
    if "tensorflow" in variants:
        found["tensorflow"] = lambda: None  # the other towers wait
        if strategy.is_chief:
            found["tensorflow"] = tensorflow_step.program(strategy.num_replicas_in_sync, batch, optimizer)
    found["DDP"] = plain.step(ddp(), x, y, make)
    found["bound"] = plain.step(models.make(case).to(device), x, y, make)
    if meeting is not None:
        where = strategy.topology.index, strategy.num_replicas_in_sync
        for kind in untouched_step.KINDS:
            found[f"untouched {kind}"] = untouched_step.program(kind, case, optimizer, meeting, *where)
    return steps.alternate(found, turns, seconds, together=True)


def _zero(make: plain.MakeOptimizer, parameters: Iterator[nn.Parameter]) -> Optimizer:
    every = list(parameters)
    like = make([torch.zeros(1, requires_grad=True)])
    settings = {name: value for name, value in like.defaults.items() if name != "decoupled_weight_decay"}
    return ZeroRedundancyOptimizer(every, type(like), **settings)


def _one_tower(case: str, turns: int, seconds: float) -> Times:
    strategy = mirrored.MirroredStrategy()
    torch.manual_seed(0)
    x, y = (tensor.to(strategy.device) for tensor in models.batch(case, models.CASES[case], seed=0))
    bare, twin = (plain.step(models.make(case).to(strategy.device), x, y) for _ in range(2))
    variants = {"ours": steps.ours(strategy, case, x, y, models.CASES[case]), "bare": bare, "twin": twin}
    return steps.alternate(variants, turns, seconds, together=False)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench step", description=__doc__)
    parser.add_argument("--cases", default=",".join(models.CASES), help="comma-separated: " + ", ".join(models.CASES))
    parser.add_argument("--towers", type=int, default=2, help="on the CPU; 1 leaves the first comparison out")
    parser.add_argument("--devices", help="of the first comparison's towers, such as cuda:0,cuda:1; default: the CPU")
    parser.add_argument("--implementation", default="auto", help="of the first comparison's towers: auto, gloo, …")
    parser.add_argument("--optimizer", default="sgd", choices=plain.OPTIMIZERS, help="of all variants")
    parser.add_argument("--variants", default="ours", help="comma-separated: " + ", ".join(LABELS))
    parser.add_argument("--untouched", action="store_true", help="also compare with processes without mirrored")
    parser.add_argument("--turns", type=int, default=9, help="alternations")
    parser.add_argument("--seconds", type=float, default=0.7, help="length of one variant's turn")
    figure.add_option(parser)
    options = parser.parse_args(arguments)
    variants = options.variants.split(",")
    if unknown := set(variants) - set(LABELS):
        parser.error(f"unknown variants: {', '.join(sorted(unknown))}")
    if "tensorflow" in variants and not tensorflow_step.installed():
        variants.remove("tensorflow")
        print("TensorFlow is not installed here and is left out (pip install -e '.[tensorflow]')")
    bars = []
    print(f"torch {torch.version.__version__}; {options.optimizer}; medians of {options.turns} alternations")
    print(f"{'':<44}{'ms':>9}{'other':>9}{'ratio':>9}{'25 %':>9}{'75 %':>8}")
    names = options.devices.split(",") if options.devices else [f"cpu:{i}" for i in range(options.towers)]
    for case in options.cases.split(","):
        timing = (case, options.turns, options.seconds)
        if len(names) > 1:
            compared = [v for v in variants if v != "tensorflow" or case.startswith("mlp")]
            with tempfile.TemporaryDirectory() as folder:
                meeting = f"{folder}/meeting" if options.untouched else None
                arguments_ = (*timing, options.implementation, options.optimizer, compared, meeting)
                times = mirrored.launch(_two_towers, arguments_, devices=names)[0]
            for variant in compared:
                for base, what in BASES.items():
                    if base not in times:
                        continue
                    label = f"{LABELS[variant]} ÷ {what}"
                    print(steps.row(f"{case}: {label}", times[variant], times[base]), flush=True)
                    bars.append(figure.Bar(case, label, ratios.compare(times[variant], times[base])))
        if options.optimizer == "sgd" and variants == ["ours"]:
            times = mirrored.launch(_one_tower, timing, towers=1)[0]
            print(steps.row(f"{case}: one tower ÷ bare loop", times["ours"], times["bare"]))
            print(steps.row(f"{case}: bare loop ÷ its twin", times["bare"], times["twin"]), flush=True)
            bars.append(figure.Bar(case, "one tower ÷ bare loop", ratios.compare(times["ours"], times["bare"])))
    figure.draw(options.png, f"A training step, {len(names)} towers, {options.optimizer}", bars)
