"""The strategies of TensorFlow's table, by the name that a script is started with."""

from __future__ import annotations

from typing import Any

import mirrored


def strategy_of(name: str) -> Any:
    if name in ("MirroredStrategy", "CentralStorageStrategy"):
        return getattr(mirrored, name)(["cpu:0", "cpu:1"])
    if name == "ParameterServerStrategy":
        return mirrored.ParameterServerStrategy(seed=0)
    return getattr(mirrored, name)()
