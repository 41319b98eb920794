"""The operations of ``reduce`` and ``all_reduce``."""

from __future__ import annotations

import enum

from towers.collectives.values import OPERATIONS


class ReduceOp(enum.Enum):
    """The operations that combine the values of several towers."""

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    PROD = "prod"


_ALIASES = {"avg": "mean", "product": "prod"}


def operation_name(op: object) -> str:
    """Returns the name of an operation given as a string in any case, as :class:`ReduceOp`, or as torch's or TF's own.

    Raises:
        ValueError: there is no such operation.
        TypeError: the argument is not an operation.
    """
    if not isinstance(getattr(op, "name", op), str):
        raise TypeError(
            f'the operation is a {type(op).__name__}, but must be a string and the first argument: reduce("sum", value)'
        )
    name = str(getattr(op, "name", op)).lower()
    name = _ALIASES.get(name, name)
    if name not in OPERATIONS:
        raise ValueError(f"unknown operation {op!r}; use one of {', '.join(OPERATIONS)}")
    return name
