"""The strategies of TensorFlow's table, by the name that a script is started with, and what its batches are.

A step has 64 examples. With parameter servers, it is the mean of two workers' gradients of 32 examples each.
"""

from __future__ import annotations

from typing import Any

import mirrored

PARAMETER_SERVERS = "ParameterServerStrategy"


def strategy_of(name: str) -> Any:
    if name in ("MirroredStrategy", "CentralStorageStrategy"):
        return getattr(mirrored, name)(["cpu:0", "cpu:1"])
    if name == PARAMETER_SERVERS:
        return mirrored.ParameterServerStrategy(workers=2, servers=2, replicas_to_aggregate=2, seed=0)
    return getattr(mirrored, name)()


def batches_per_step(name: str) -> int:
    return 2 if name == PARAMETER_SERVERS else 1
