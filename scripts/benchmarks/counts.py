"""What one training step makes a device do, counted by torch's profiler: kernels, copies, collectives, host waits.

Two ranks share one GPU, which NCCL takes for two hosts; so counts are right, and times mean nothing. Under torchrun,
each rank has a GPU of its own. ``mirrored`` is compared with DDP, with FSDP2 (``fully_shard``, whose parameters stay
gathered), with DDP and ``ZeroRedundancyOptimizer``, and with a bare loop. Counts are those of one step on rank 0:

- kernels: without those of NCCL; copies and fills (memcpy, memset) have their own columns
- events, stream_waits: recorded, and awaited by a stream
- collectives between devices, and host_collectives (Gloo)
- sent_mb: the megabytes that a tower sends in a ring of many towers, in which an all-reduce sends its bytes twice
- waits: calls of CUDA in which the host waits for the device
- early: share of those megabytes that were started before the host had queued the last gradient's computation
- memory_mb: the peak in a step, of parameters, gradients, the optimizer's state and all else

Below, "host" is the time from the start of a step until the host has queued it. The variants take turns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import command
import models
import plain
import step as step_benchmark
import steps
import torch
from plain import Step
from steps import Work
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mirrored

FOLDER = "COUNTS_FOLDER"
"""Variable with a folder for checkpoints."""
WARM_UP = 12  # DDP waits for timers of its own in its first ten steps
IN_TURNS = ("bare", "ours", "DDP")
BYTES = {"Float": 4, "BFloat16": 2, "Half": 2, "Double": 8, "Int": 4, "Long": 8, "Byte": 1, "Char": 1, "Bool": 1}
"""Of an element, by the profiler's name of the dtype."""
_WIRE = {"all-reduce": 2, "allreduce": 2}
"""How often a collective sends its bytes, if not once: by its name on the simulated device, and in the profiler."""


@dataclasses.dataclass(frozen=True)
class Counts:
    """Of one step."""

    kernels: int
    copies: int
    fills: int
    events: int
    stream_waits: int
    collectives: int
    host_collectives: int
    sent_mb: float
    waits: int
    early: float | None
    memory_mb: float = 0.0


def _synchronised_ddp(work: Work) -> Step:
    model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(work.model()), gradient_as_bucket_view=True)
    return plain.step(model, model.parameters(), work.x, work.y, work.make_optimizer)


def _autocast(model: nn.Module) -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            output: torch.Tensor = model(x)
        return output.float()

    return forward


def _compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager")


def _called_ddp(work: Work, forward_of: Callable[[nn.Module], Any]) -> Step:
    model = DistributedDataParallel(work.model(), gradient_as_bucket_view=True)
    return plain.step(forward_of(model), model.parameters(), work.x, work.y, work.make_optimizer)


class _HalfUsed(nn.Module):
    """A model with a layer that no step uses."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.unused = model, nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.model(x)
        return output


class _WithUnused(Work):
    """A case whose model has a layer that no step uses."""

    def make(self) -> nn.Module:
        return _HalfUsed(super().make())


def _accumulating(work: Work) -> Step:
    """Two backwards, of which the second one averages."""
    model, optimizer = work.scoped(work.strategy)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        for context in (work.strategy.no_sync(), contextlib.nullcontext()):
            with context:
                per_example = models.per_example_loss(model(x), y)
                mirrored.compute_average_loss(per_example, global_batch_size=work.batch).backward()
        optimizer.step()

    return lambda: work.strategy.run(train_step, args=(work.x, work.y))


def _accumulating_ddp(work: Work) -> Step:
    model = DistributedDataParallel(work.model(), gradient_as_bucket_view=True)
    optimizer = work.make_optimizer(model.parameters())

    def train_step() -> None:
        optimizer.zero_grad()
        for context in (model.no_sync(), contextlib.nullcontext()):
            with context:
                models.per_example_loss(model(work.x), work.y).mean().backward()
        optimizer.step()

    return train_step


def _reducing(work: Work) -> Step:
    """A step whose loss is reduced over the towers."""
    step = work.ours()
    return lambda: work.strategy.reduce("sum", step())


def _saving(work: Work) -> Step:
    """A checkpoint."""
    model, optimizer = work.scoped(work.strategy)
    objects = {"model": model, "optimizer": optimizer}
    manager = mirrored.CheckpointManager(work.strategy, os.environ[FOLDER], objects)

    def train_step() -> None:
        model(work.x).sum().backward()
        optimizer.step()

    work.strategy.run(train_step)
    return manager.save


VARIANTS: dict[str, Callable[[Work], Step]] = {
    "bare": lambda work: work.bare(),
    "ours": lambda work: work.ours(),
    "DDP": lambda work: work.ddp(),
    "sharded": lambda work: work.ours(steps.strategy("auto", shard_optimizer=True)),
    "fully-sharded": lambda work: work.ours(shards={"reshard_after_forward": False}),
    "FSDP2": lambda work: work.fsdp(reshard_after_forward=False),
    "ZeRO": lambda work: work.ddp(lambda parameters: step_benchmark.zero(work.make_optimizer, parameters)),
    "ours-sync-bn": lambda work: work.ours(sync_batch_norm=True),
    "DDP-sync-bn": _synchronised_ddp,
    "bare-compiled": lambda work: work.bare(_compiled),
    "ours-compiled": lambda work: work.ours(forward_of=_compiled),
    "DDP-compiled": lambda work: _called_ddp(work, _compiled),
}
MORE: dict[str, Callable[[Work], Step]] = {
    "bare-bf16": lambda work: work.bare(_autocast),
    "ours-bf16": lambda work: work.ours(forward_of=_autocast),
    "DDP-bf16": lambda work: _called_ddp(work, _autocast),
    "ours-no-sync": _accumulating,
    "DDP-no-sync": _accumulating_ddp,
    "ours-unused": lambda work: _WithUnused(work.case, work.strategy).ours(),
    "DDP-unused": lambda work: _WithUnused(work.case, work.strategy).ddp(find_unused_parameters=True),
    "central": lambda work: work.ours(steps.strategy("auto", mirrored.CentralStorageStrategy)),
    "ours-reduce": _reducing,
    "save": _saving,
}
VARIANTS |= MORE
"""``MORE`` are measured only if they are named."""


def _record(step: Step) -> list[dict[str, Any]]:
    """What the profiler records of one step, in Chrome's format."""
    with torch.profiler.profile() as profile:
        step()
        steps.finish()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def count(events: Sequence[dict[str, Any]]) -> Counts:
    """The counts of a record."""

    def of(*kinds: str) -> list[dict[str, Any]]:
        return [event for event in events if event.get("cat") in kinds]

    calls = [event["name"] for event in of("cuda_runtime", "cuda_driver")]
    operations = of("cpu_op")
    nodes = [event for event in operations if event["name"].startswith("autograd::engine")]
    end = max((e["ts"] + e["dur"] for e in nodes if "AccumulateGrad" not in e["name"]), default=0.0)
    megabytes = {"all": 0.0, "early": 0.0}
    for event in operations:
        args = event.get("args", {})
        if event["name"] == "record_param_comms" and args.get("Collective name") not in (None, "", "wait", "barrier"):
            elements = max(int(args.get("In msg nelems", 0)), int(args.get("Out msg nelems", 0)))
            size = elements * BYTES.get(str(args.get("dtype")), 4) / 1e6 * _WIRE.get(args["Collective name"], 1)
            megabytes["all"] += size
            megabytes["early"] += size if event["ts"] < end else 0
    host = [e["name"] for e in of("user_annotation") if e["name"].startswith("gloo:") and e["name"] != "gloo:barrier"]
    c10d = [e["name"] for e in operations if e["name"].startswith("c10d::") and e["name"] != "c10d::barrier"]
    return Counts(
        kernels=sum("nccl" not in event["name"] for event in of("kernel")),
        copies=len(of("gpu_memcpy")),
        fills=len(of("gpu_memset")),
        events=sum("EventRecord" in name for name in calls),
        stream_waits=sum("StreamWaitEvent" in name for name in calls),
        collectives=len(c10d) - len(host),
        host_collectives=len(host),
        sent_mb=round(megabytes["all"], 3),
        waits=sum("Synchronize" in name for name in calls),
        early=round(megabytes["early"] / megabytes["all"], 3) if megabytes["all"] else None,
    )


def count_simulated(records: Sequence[tuple[str, str, int, int]], events: Sequence[dict[str, Any]]) -> Counts:
    """The counts of a simulated device's record; the profiler's has the collectives of hosts only."""

    def of(kind: str) -> int:
        return sum(record[0] == kind for record in records)

    nodes = [at for at, (kind, name, *_) in enumerate(records) if kind == "node" and "AccumulateGrad" not in name]
    sent = [
        (_WIRE.get(name, 1) * size / 1e6, at < max(nodes, default=0))
        for at, (kind, name, size, _) in enumerate(records)
        if kind == "collective"
    ]
    total = sum(size for size, _ in sent)
    gloo = count(events).host_collectives
    return Counts(
        kernels=of("kernel"),
        copies=of("copy"),
        fills=0,
        events=of("event"),
        stream_waits=of("stream wait"),
        collectives=len(sent),
        host_collectives=gloo - len(sent),
        sent_mb=round(total, 3),
        waits=of("wait"),
        early=round(sum(size for size, early in sent if early) / total, 3) if total else None,
    )


def _measure(case: str, variant: str, sim: Any) -> tuple[Counts, list[Any]]:
    """What is counted of a variant, and what was recorded of it."""
    torch.compiler.reset()  # compiled functions keep the model of the variant before
    gc.collect()
    before = _memory(sim)[0]
    step = VARIANTS[variant](Work(case, steps.strategy("auto")))
    for _ in range(WARM_UP if sim is None else 4):  # DDP has no timers on the simulated device
        step()
    steps.finish()
    (torch.cuda.reset_peak_memory_stats if sim is None else sim.reset_peak_memory)()
    step()
    steps.finish()
    peak = _memory(sim)[1] - before
    if sim is None:
        events = _record(step)
        counts = count(events)
    else:
        records: list[Any] = []
        events = _record(lambda: (sim.record(), step(), records.extend(sim.recorded())))
        counts = count_simulated(records, events)
        events = records
    return dataclasses.replace(counts, memory_mb=round(peak / 1e6, 1)), events


def _memory(sim: Any) -> tuple[int, int]:
    """Bytes of the device's memory that tensors have now, and have had at most."""
    return sim.memory() if sim is not None else (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())


def _host_times(case: str, turns: int) -> dict[str, float]:
    """Median milliseconds until the host has queued a step."""
    variants = {name: VARIANTS[name](Work(case, steps.strategy("auto"))) for name in IN_TURNS}
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for step in variants.values():
        for _ in range(WARM_UP):
            step()
    for _ in range(turns):
        for name, step in variants.items():
            steps.finish()
            started = time.perf_counter()
            step()
            taken[name].append((time.perf_counter() - started) * 1e3)
    return {name: statistics.median(times) for name, times in taken.items()}


def _table(case: str, counts: dict[str, Any], gradients_mb: float) -> None:
    names = [field.name for field in dataclasses.fields(Counts)]
    print(f"\n| {case}; gradients {gradients_mb:.1f} MB | " + " | ".join(names) + " |")
    print("|---|" + "---|" * len(names))
    for variant, found in counts.items():
        cells = [found] if isinstance(found, str) else [str(getattr(found, name)) for name in names]
        print(f"| {variant} | " + " | ".join(cells) + " |", flush=True)


def _inside(options: Any) -> None:
    """On every rank."""
    sim = None
    if options.simulated:
        from tests import simulated_device
        from tests.simulated_device import collectives
        from tests.support import batch_norm_kernels

        sim = simulated_device.load()
        collectives.register()
        batch_norm_kernels.use()
    strategy = mirrored.MirroredStrategy()
    _record(lambda: None)  # the first use of the profiler takes seconds
    waits = count(_record(lambda: None)).waits
    if strategy.is_chief:
        backend, ranks = strategy.communicator.backend, strategy.num_replicas_in_sync
        print(f"torch {torch.version.__version__}; {ranks} ranks, {backend}")
    for case in options.cases:
        counts: dict[str, Any] = {}
        gradients = sum(p.numel() for p in models.make(case).parameters()) * 4 / 1e6
        for variant in options.variants:
            if variant.endswith("bn") and not case.startswith("resnet"):
                continue
            try:
                found, events = _measure(case, variant, sim)
                counts[variant] = found if sim else dataclasses.replace(found, waits=found.waits - waits)
            except Exception as error:  # the others are still worth knowing
                counts[variant] = f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"
                events = []
            if options.traces and strategy.is_chief:
                path = pathlib.Path(options.traces, f"{case}-{variant}.json")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(events))
        times = _host_times(case, options.turns) if options.turns else {}
        if strategy.is_chief:
            _table(case, counts, gradients)
            print("host: " + ", ".join(f"{name} {value:.3f} ms" for name, value in times.items()), flush=True)


def main(arguments: Sequence[str]) -> None:
    chosen = "mlp-64,resnet-64,transformer-16"
    parser = command.parser("counts", __doc__, turns=30, towers=None, cases=models.CASES, chosen=chosen)
    usual = [name for name in VARIANTS if name not in MORE]
    parser.add_argument("--variants", type=command.names, default=usual, help="all; or of " + ", ".join(VARIANTS))
    parser.add_argument("--simulated", action="store_true", help="on the simulated device of the tests")
    parser.add_argument("--traces", help="a folder for the profiler's records")
    options = parser.parse_args(arguments)
    if options.variants == ["all"]:
        options.variants = list(VARIANTS)
    if "RANK" in os.environ:
        _inside(options)
        return
    sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
    from tests.gpu.pairs import start_pair

    words = [str(pathlib.Path(__file__).parent), "counts", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        first, second = start_pair(words, 900, 20, shown=True, one_host=options.simulated)
    if first.code or second.code:
        print(first.err[-3000:], second.err[-3000:], file=sys.stderr)
        sys.exit(1)
