"""Options of communication, and errors for arguments that have other names in TensorFlow."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

DEFAULT_BUCKET_BYTES = 25 * 2**20
GLOO_BUCKET_BYTES = 4 * 2**20  # smaller buckets are sent earlier during backward, and cost Gloo little

_IMPLEMENTATIONS = ("auto", "nccl", "gloo", "shared_memory", "host")
_ALGORITHMS = (None, "ring", "auto")
_WIRE_DTYPES = ("same", "bfloat16")

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Compression:
    """Base class of lossy compressions of gradients, such as :class:`towers.gradients.powersgd.PowerSGD`."""


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """Options of a strategy's communication. They must be the same on all towers.

    Attributes:
        implementation: the library that averages. "auto" uses NCCL (or torch's collectives for that kind of device)
            between accelerators, shared memory between CPU towers of one host, and Gloo across hosts and for hosts
            without shared memory. "nccl", "gloo" and "shared_memory" name one. "host" averages the gradients of
            accelerators in the hosts' memory; "auto" does so if torch has no collectives for the kind of device, or
            if towers share a device.
        algorithm: "ring" selects NCCL's ring all-reduce, "auto" leaves the choice to NCCL's tuner. None: the ring on
            one host, NCCL's choice across hosts, where the ring's latency grows with the number of towers.
            ``NCCL_ALGO`` in the environment takes precedence. Gloo always uses its ring.
        wire_dtype: "same", or "bfloat16" to send float32 gradients between devices or hosts as bfloat16, in half the
            bytes, with 8 bits of precision. Gradients that CPU towers average in shared memory, and sparse gradients,
            keep their precision. With ``virtual_towers``, "bfloat16" is a ValueError.
        compression: a lossy compression of gradients, such as :class:`mirrored.PowerSGD`.
        bucket_bytes: the approximate size of gradient buckets in bytes. None: 25 MiB, or 4 MiB with Gloo.
        timeout_seconds: the deadline of a collective.
        startup_timeout_seconds: the time for which towers and workers wait for each other at the start.
        rejoin_timeout_seconds: the same at a restart after a failure.
        step_timeout_seconds: the deadline of one ``strategy.run`` call on several towers. A tower that takes longer
            reports its position and ends, and so do the other towers. ``math.inf``: no limit.

    Raises:
        ValueError: an unknown name, or a number that is not positive.
        TypeError: ``compression`` is not a :class:`Compression`.
    """

    implementation: str = "auto"
    algorithm: str | None = None
    wire_dtype: str = "same"
    compression: Compression | None = None
    bucket_bytes: int | None = None
    timeout_seconds: float = 600.0
    startup_timeout_seconds: float = 300.0
    rejoin_timeout_seconds: float = 300.0
    step_timeout_seconds: float = 3600.0

    def __post_init__(self) -> None:
        for field, value, choices in (
            ("implementation", self.implementation, _IMPLEMENTATIONS),
            ("algorithm", self.algorithm, _ALGORITHMS),
            ("wire_dtype", self.wire_dtype, _WIRE_DTYPES),
        ):
            if value not in choices:
                raise ValueError(f"{field} is {value!r}, but must be one of {', '.join(map(str, choices))}")
        if not isinstance(self.compression, Compression | None):
            raise TypeError(f"compression is {self.compression!r}, but has to be mirrored.PowerSGD(…) or None")
        for field, kind, finite in (
            ("bucket_bytes", int, True),
            ("timeout_seconds", float, True),
            ("startup_timeout_seconds", float, True),
            ("rejoin_timeout_seconds", float, True),
            ("step_timeout_seconds", float, False),
        ):
            value = getattr(self, field)
            if field == "bucket_bytes" and value is None:
                continue
            number = isinstance(value, (int, kind)) and not isinstance(value, bool)
            if not number or not 0 < value <= math.inf or (finite and value == math.inf):
                raise ValueError(
                    f"{field} is {value!r}, but must be a positive {'whole ' if kind is int else ''}number"
                    f"{'' if finite else ' (math.inf: no limit)'}"
                )


def instead_of(**ours: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorates a public function with advice for arguments that TensorFlow has and the function lacks.

    Such an argument by name, or one positional argument too many, is a TypeError that contains the advice. The
    function's signature does not change.

    Args:
        ours: the advice for each argument of TensorFlow.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        places = [name for name, p in inspect.signature(function).parameters.items() if p.kind in kinds]
        most, foreign = len(places), frozenset(ours)

        @functools.wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if len(args) > most or not foreign.isdisjoint(kwargs):
                raise TypeError(_advice(function, places, ours, len(args), kwargs))
            return function(*args, **kwargs)

        return checked

    return decorate


def _advice(
    function: Callable[..., Any], places: list[str], ours: dict[str, str], count: int, kwargs: dict[str, Any]
) -> str:
    name = function.__qualname__.removesuffix(".__init__")
    named = [foreign for foreign in ours if foreign in kwargs]
    if named:
        return "; ".join(f"{name}() has no argument {foreign}: {ours[foreign]}" for foreign in named)
    without_self = [place for place in places if place != "self"]
    instead = "; ".join(f"for TensorFlow's {foreign}: {advice}" for foreign, advice in ours.items())
    return (
        f"{name}() takes {len(without_self)} positional argument{'s' if len(without_self) != 1 else ''} "
        f"({', '.join(without_self)}), but was given {count - len(places) + len(without_self)}; {instead}"
    )


_initialise = CommunicationOptions.__init__
CommunicationOptions.__init__ = instead_of(bytes_per_pack="bucket_bytes=")(_initialise)  # type: ignore[method-assign]
