"""Starts real towers, which average a bucket as training does."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence

import torch

import mirrored
from mirrored.cluster import torchrun
from mirrored.doctor.findings import Finding, ok, problem, warning
from towers.system import devices

_CPU_TOWERS, _CPU_SECONDS = "CPU towers", 25.0
_GPU_TOWERS, _GPU_SECONDS = "GPU towers", 40.0
_SMALL, _LARGE = 2**10, 2**23  # float32 numbers: 4 KB and 32 MB
_ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class _JobResult:
    """Measurements of one job.

    Attributes:
        towers: how many there were.
        backend: of their communicator.
        seconds: of tower 0 for averaging 4 KB, and 32 MB.
        correct: whether the averages were, on all towers.
    """

    towers: int
    backend: str
    seconds: tuple[float, float]
    correct: bool

    def finding(self, subject: str, fix: str) -> Finding:
        small, large = (f"{seconds * 1e3:.3g} ms" for seconds in self.seconds)
        count = "two" if self.towers == 2 else str(self.towers)
        what = f"{count} towers, {self.backend}: averaging 4 KB takes {small}, 32 MB {large}"
        return ok(subject, what) if self.correct else problem(subject, f"{what}, and the averages are wrong", fix)


def check_cpu_towers(environ: Mapping[str, str]) -> Iterator[Finding]:
    """A job of two towers through shared memory; where that fails, one through Gloo, and the reason."""
    cpus = ("cpu:0", "cpu:1")
    why_not = ""
    try:
        try:
            result = _run(cpus, "shared_memory", _CPU_SECONDS)
        except mirrored.TowerFailedError as error:
            why_not = _reason(error)
            result = _run(cpus, "gloo", _CPU_SECONDS)
    except mirrored.TowerFailedError as error:
        yield problem(
            _CPU_TOWERS,
            f"two towers cannot work together on this machine: {_reason(error)}",
            "fix the other problems and warnings first, above all those of the network: they often cause this one",
        )
        return
    yield result.finding(_CPU_TOWERS, "please report it, with all of this output")
    if why_not:
        yield warning(
            _CPU_TOWERS,
            f"they cannot share memory and use Gloo, which is slower: {why_not}",
            "towers need memfd_create, and to open each other's /proc/<process>/fd: one user, one container, no "
            "sandbox that hides processes from each other",
        )


def check_gpu_towers(environ: Mapping[str, str]) -> Iterator[Finding]:
    """A job of one tower per GPU through NCCL, where there are two or more."""
    count = devices.count_of("cuda")
    if count < 2:
        return
    try:
        result = _run([f"cuda:{number}" for number in range(count)], "nccl", _GPU_SECONDS)
    except mirrored.TowerFailedError as error:
        yield problem(
            _GPU_TOWERS,
            f"{count} towers cannot work together: {_reason(error)}",
            "NCCL_DEBUG=WARN mirrored doctor lets NCCL say why; where GPUs only fail together, NCCL_P2P_DISABLE=1 "
            "tells whether reading each other's memory is the reason; /dev/shm must have free space",
        )
        return
    yield result.finding(
        _GPU_TOWERS,
        "NCCL_ALGO, NCCL_PROTO and NCCL_P2P_DISABLE=1, one by one, tell what is broken; have the GPUs tested",
    )


def _run(devices: Sequence[str], implementation: str, seconds: float) -> _JobResult:
    """Start one tower per device, and let them average.

    Raises:
        TowerFailedError: as of :func:`mirrored.launch`.
    """
    with _without_launcher():
        results: list[_JobResult] = mirrored.launch(
            _average, (implementation, seconds), devices=devices, timeout=seconds
        )
    return dataclasses.replace(results[0], correct=all(result.correct for result in results))


def _reason(error: mirrored.TowerFailedError) -> str:
    """Why a job failed, in one line."""
    cause = error.__cause__
    text = f"{type(cause).__name__}: {cause}" if cause is not None else str(error)
    return " ".join(text.split())[:400]


@contextlib.contextmanager
def _without_launcher() -> Iterator[None]:
    """Inside, no environment variable says that this process is a tower, so it may start towers."""
    names = (*torchrun.REQUIRED, "TOWERS_DEVICES")
    saved = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(saved)


def _average(implementation: str, seconds: float) -> _JobResult:
    """What each tower runs."""
    logging.getLogger("mirrored").setLevel(logging.WARNING)
    options = mirrored.CommunicationOptions(
        implementation=implementation, timeout_seconds=seconds, startup_timeout_seconds=seconds
    )
    communicator = mirrored.MirroredStrategy(communication=options).communicator
    medians, correct = [], True
    for key, numel in enumerate((_SMALL, _LARGE)):
        bucket = communicator.allocate(key, numel, torch.float32, communicator.device)
        times = []
        for _ in range(_ROUNDS):
            bucket.fill_((communicator.index + 1) * communicator.prescale)
            _synchronize(communicator.device)
            communicator.barrier()
            started = time.perf_counter()
            communicator.start_average(bucket).wait()
            _synchronize(communicator.device)
            times.append(time.perf_counter() - started)
        medians.append(statistics.median(times[1:]))
        correct &= bool((bucket == (communicator.size + 1) / 2).all())
    return _JobResult(communicator.size, communicator.backend, (medians[0], medians[1]), correct)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
