"""Checks that start real towers, which average a bucket as in training."""

from __future__ import annotations

import logging
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence

import torch

import mirrored
from mirrored.doctor.findings import Finding, ok, problem, warning
from towers.system import devices
from towers.system.timeouts import clock

_CPU_SECONDS, _GPU_SECONDS = 25.0, 40.0
_SMALL, _LARGE = 2**10, 2**23  # float32 numbers: 4 KB and 32 MB
_ROUNDS = 5


def check_cpu_towers(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks a job of two towers through shared memory. If it fails, reports the reason and tries Gloo."""
    subject, cpus, wrong = "CPU towers", ("cpu:0", "cpu:1"), "please report it, with all of this output"
    try:
        try:
            yield _run(subject, cpus, "shared_memory", _CPU_SECONDS, wrong)
        except mirrored.TowerFailedError as error:
            yield _run(subject, cpus, "gloo", _CPU_SECONDS, wrong)
            yield warning(
                subject,
                f"they cannot share memory and use Gloo, which is slower: {_reason(error)}",
                "towers need memfd_create, and to open each other's /proc/<process>/fd: one user, one container, no "
                "sandbox that hides processes from each other",
            )
    except (mirrored.TowerFailedError, OSError) as error:
        yield problem(
            subject,
            f"two towers cannot work together on this machine: {_reason(error)}",
            "fix the other problems and warnings first, and see that programs reach each other at 127.0.0.1, where "
            "towers rendezvous (ip link set lo up; a firewall)",
        )


def check_gpu_towers(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks a job of one tower per GPU through NCCL, if there are two or more GPUs."""
    subject, count = "GPU towers", devices.count_of("cuda")
    if count < 2:
        return
    wrong = (
        "set NCCL_ALGO, NCCL_PROTO and NCCL_P2P_DISABLE=1, one by one, to find the broken part; have the GPUs tested"
    )
    try:
        yield _run(subject, [f"cuda:{number}" for number in range(count)], "nccl", _GPU_SECONDS, wrong)
    except mirrored.TowerFailedError as error:
        yield problem(
            subject,
            f"{count} towers cannot work together: {_reason(error)}",
            "run NCCL_DEBUG=WARN mirrored doctor to see NCCL's reason; if GPUs fail only together, "
            "NCCL_P2P_DISABLE=1 shows whether peer-to-peer access is the cause; /dev/shm must have free space",
        )


def _run(subject: str, devices: Sequence[str], implementation: str, seconds: float, wrong: str) -> Finding:
    """Starts one tower per device, and averages.

    Args:
        wrong: the fix if the averages are wrong.

    Raises:
        TowerFailedError: see :func:`mirrored.launch`.
    """
    rank = os.environ.pop("RANK", None)  # it marks this process as a tower, which may not start towers
    try:
        results = mirrored.launch(_average, (implementation, seconds), devices=devices, timeout=seconds)
    finally:
        if rank is not None:
            os.environ["RANK"] = rank
    backend, medians, _ = results[0]
    small, large = (f"{median * 1e3:.3g} ms" for median in medians)
    what = f"{len(devices)} towers, {backend}: averaging 4 KB takes {small}, 32 MB {large}"
    if all(correct for _, _, correct in results):
        return ok(subject, what)
    return problem(subject, f"{what}, and the averages are wrong", wrong)


def _reason(error: Exception) -> str:
    """Returns why a job failed, in one line."""
    cause = error.__cause__ or error
    text = str(error) if isinstance(cause, mirrored.TowerFailedError) else f"{type(cause).__name__}: {cause}"
    return " ".join(text.split())[:400]


def _average(implementation: str, seconds: float) -> tuple[str, list[float], bool]:
    """Averages buckets on each tower.

    Returns:
        The backend, the seconds for averaging 4 KB and 32 MB, and whether the averages were correct.
    """
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
            started = clock.monotonic()
            communicator.submit_average(bucket).wait()
            _synchronize(communicator.device)
            times.append(clock.monotonic() - started)
        medians.append(statistics.median(times[1:]))
        correct &= bool((bucket == (communicator.size + 1) / 2).all())
    return communicator.backend, medians, correct


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
