"""The time that the host takes for each gradient of a backward, beyond a backward alone: ``mirrored`` against DDP.

The process group has one rank, so no rank waits for another. The parameters are small, so a GPU waits for the host.
Variants take turns. The first decile of each counts, because other programs on the machine only add time.

If there is a GPU, everything runs on the GPU. Otherwise, tensors are in the CPU's memory, but ``mirrored`` handles them
as on an accelerator: it follows streams (there is one), and compares towers over the hosts. DDP's copy of a gradient
then takes 1 µs. The start of a kernel on a GPU takes several times as long.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import command
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from towers.collectives.communicator import Communicator
from towers.collectives.process_group import ProcessGroupCommunicator
from towers.gradients import buckets
from towers.gradients.averager import GradientAverager
from towers.gradients.buckets import StreamOrder
from towers.gradients.cycle import Cycle
from towers.gradients.flags import Comparison
from towers.system.tensors import Named

Step = Callable[[], None]
WARM_UP = 20


class Product(nn.Module):
    """A product of small parameters."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.factors = nn.ParameterList([torch.ones(16) for _ in range(parameters)])

    def forward(self, x: Tensor) -> Tensor:
        for factor in self.factors:
            x = x * factor
        return x


def _plain(model: nn.Module, device: torch.device) -> Step:
    x, parameters = torch.ones(16, device=device), list(model.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        model(x).sum().backward()

    return step


def _averaged(model: nn.Module, device: torch.device) -> Step:
    """A step whose gradients ``mirrored`` averages, with what a strategy calls in a run."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    channel = ProcessGroupCommunicator(dist.new_group(backend=backend), device, backend, timedelta(minutes=1))
    channel.bucket_bytes = Communicator.bucket_bytes
    averager = GradientAverager(channel)
    averager.add([Named(name, p, "parameter", True) for name, p in model.named_parameters()])
    step, health = _plain(model, device), channel.health

    def run() -> None:
        averager.refresh()
        health.begin_run(False)
        step()
        health.end_run()
        averager.check_paired()

    return run


def _treat_cpus_as_accelerators() -> None:
    buckets.address_of_current_stream = lambda kind: {0: 0}.__getitem__  # as fast as CUDA's
    buckets.current_stream_of = lambda index: None
    make_bucket, make_cycle = buckets.Bucket.__init__, Cycle.__init__

    def bucket_with_streams(self, *args) -> None:
        make_bucket(self, *args)
        self.streams = StreamOrder(torch.device("cuda", 0))

    def cycle_with_comparison(self, channel, *args) -> None:
        make_cycle(self, channel, *args)
        self._comparison = Comparison(channel)

    buckets.Bucket.__init__, Cycle.__init__ = bucket_with_streams, cycle_with_comparison


def _microseconds(parameters: int, device: torch.device, turns: int) -> dict[str, float]:
    """A step of each variant."""
    bare, ddp, ours = (Product(parameters).to(device) for _ in range(3))
    steps = {
        "bare": _plain(bare, device),
        "DDP": _plain(DistributedDataParallel(ddp, gradient_as_bucket_view=True), device),
        "ours": _averaged(ours, device),
    }
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(WARM_UP + turns):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            if turn >= WARM_UP:
                taken[name].append((time.perf_counter() - started) * 1e6)
            if device.type != "cpu":
                torch.accelerator.synchronize()
    return {name: statistics.quantiles(times, n=10)[0] for name, times in taken.items()}


def main(arguments: Sequence[str]) -> None:
    parser = command.parser("gradients", __doc__, turns=300, towers=None)
    parser.add_argument("--parameters", type=command.names, default="10,100,400", help="numbers of parameters")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        _treat_cpus_as_accelerators()
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", f"file://{file.name}", world_size=1, rank=0
        )
        print("| parameters | bare loop, µs | DDP, µs more | ours, µs more | ours ÷ DDP |\n|---|---|---|---|---|")
        more: dict[int, tuple[float, float]] = {}
        for count in map(int, options.parameters):
            taken = _microseconds(count, device, options.turns)
            ddp, ours = more[count] = taken["DDP"] - taken["bare"], taken["ours"] - taken["bare"]
            print(f"| {count} | {taken['bare']:.0f} | {ddp:.0f} | {ours:.0f} | {ours / ddp:.3f} |", flush=True)
        few, many = min(more), max(more)
        if few < many:
            per = [(more[many][i] - more[few][i]) / (many - few) for i in range(2)]
            print(f"\nfor each further parameter: DDP {per[0]:.2f} µs, ours {per[1]:.2f} µs ({per[1] / per[0]:.3f})")
        dist.destroy_process_group()
