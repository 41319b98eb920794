"""Timing collectives in turns."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from towers.collectives.communicator import Communicator


def alternate(
    comm: Communicator, variants: dict[str, Callable[[], object]], turns: int, seconds: float
) -> dict[str, list[float]]:
    """Seconds of every variant, one number a turn; all towers call it.

    Args:
        variants: by name, what is timed.
        seconds: length of one variant's turn, about.
    """
    blocks = {}
    for name, run in variants.items():
        for _ in range(3):
            run()
        comm.barrier()
        started = time.perf_counter()
        run()
        comm.barrier()
        guess = torch.tensor(max(1.0, seconds / (time.perf_counter() - started)))
        comm.all_reduce(guess, "min")
        blocks[name] = int(guess)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(turns):
        for name, run in variants.items():
            comm.barrier()
            started = time.perf_counter()
            for _ in range(blocks[name]):
                run()
            times[name].append((time.perf_counter() - started) / blocks[name])
    return times
