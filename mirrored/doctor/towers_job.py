"""A real job of a few towers, which average a bucket as a training does."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import statistics
import time
from collections.abc import Iterator, Sequence

import torch

import mirrored
from mirrored.cluster import torchrun

_FEW, _MANY = 2**10, 2**23  # float32 numbers: 4 KB and 32 MB
_ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Seen:
    """What the towers of such a job saw.

    Attributes:
        backend: what the towers communicated by.
        seconds: what tower 0 took for an average of 4 KB, and of 32 MB.
        right: whether the averages were, on all towers.
    """

    backend: str
    seconds: tuple[float, float]
    right: bool


def run(devices: Sequence[str], implementation: str, seconds: float) -> Seen:
    """Start one tower per device, and let them average.

    Raises:
        TowerFailedError: as of :func:`mirrored.launch`.
    """
    with _without_launcher():
        seen: list[Seen] = mirrored.launch(_average, (implementation, seconds), devices=devices, timeout=seconds)
    return dataclasses.replace(seen[0], right=all(tower.right for tower in seen))


def reason(error: mirrored.TowerFailedError) -> str:
    """Why a job failed, in one line."""
    cause = error.__cause__
    text = f"{type(cause).__name__}: {cause}" if cause is not None else str(error)
    return " ".join(text.split())[:400]


@contextlib.contextmanager
def _without_launcher() -> Iterator[None]:
    """Inside, this process is no tower of anybody's, so that it may have some."""
    names = (*torchrun.REQUIRED, "TOWERS_DEVICES")
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def _average(implementation: str, seconds: float) -> Seen:
    logging.getLogger("mirrored").setLevel(logging.WARNING)
    options = mirrored.CommunicationOptions(
        implementation=implementation, timeout_seconds=seconds, startup_timeout_seconds=seconds
    )
    communicator = mirrored.MirroredStrategy(communication=options).communicator
    took, right = [], True
    for key, numel in enumerate((_FEW, _MANY)):
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
        took.append(statistics.median(times[1:]))
        right &= bool((bucket == (communicator.size + 1) / 2).all())
    return Seen(communicator.backend, (took[0], took[1]), right)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
