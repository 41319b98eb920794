"""Options of a strategy's training."""

from __future__ import annotations

import dataclasses
from typing import Protocol

MIRROR_CHECK_INTERVAL = 250
"""The default of ``mirror_check_interval``: the largest number of runs between two mirror checks."""

_ACTIONS = ("ignore", "warn", "raise")


class LocalSteps(Protocol):
    """The option ``synchronize``: towers step independently and synchronise periodically (:mod:`mirrored.local`)."""

    @property
    def every(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class TrainingOptions:
    """The arguments of :class:`mirrored.MirroredStrategy` with these names, and whether the storage is central.

    Raises:
        ValueError: an option has an invalid value.
    """

    shard_optimizer: bool = False
    virtual_towers: int | None = None
    mirror_check_interval: int | None = MIRROR_CHECK_INTERVAL
    nonfinite_gradients: str = "ignore"
    synchronize: LocalSteps | None = None
    central: bool = False

    def __post_init__(self) -> None:
        interval, action = self.mirror_check_interval, self.nonfinite_gradients
        if interval is not None and (isinstance(interval, bool) or not isinstance(interval, int) or interval < 1):
            raise ValueError(f"mirror_check_interval is {interval!r}, but must be None or a whole number of runs > 0")
        if action not in _ACTIONS:
            raise ValueError(f"nonfinite_gradients is {action!r}, but must be one of {', '.join(_ACTIONS)}")
