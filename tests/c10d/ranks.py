"""Ranks of a process group of the backend, run in processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

import towers.backend  # noqa: F401  (registers it in every rank)
from tests.support.jobs import launch


def ranks(fn: Callable[..., Any], *args: Any, count: int = 2, backend: str = "towers_shm") -> Any:
    """``fn(*args)`` on ``count`` ranks of a default group; the results in order."""
    return launch(_in_group, fn, args, backend, count=count)


def _in_group(fn: Callable[..., Any], args: tuple[Any, ...], backend: str) -> Any:
    dist.init_process_group(backend)
    result = fn(*args)
    dist.destroy_process_group()
    return result
