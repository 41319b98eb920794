"""Options of communication, and errors for the arguments that TensorFlow gives other names."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

DEFAULT_BUCKET_BYTES = 25 * 2**20
GLOO_BUCKET_BYTES = 4 * 2**20  # smaller ones cross a network earlier beside backward, and cost Gloo little

_IMPLEMENTATIONS = ("auto", "nccl", "gloo", "shared_memory", "host")
_ALGORITHMS = ("ring", "auto")
_WIRE_DTYPES = ("same", "bfloat16")

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Compression:
    """A way to send gradients in fewer bytes, which changes them: :class:`towers.gradients.powersgd.PowerSGD`."""


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """Options of a strategy's communication; they must be the same on all towers.

    Attributes:
        implementation: "auto" (between accelerators NCCL or what torch has for their kind; between CPU towers shared
            memory inside each host, Gloo across hosts and where memory cannot be shared), "nccl", "gloo",
            "shared_memory", or "host": towers on accelerators average in the hosts' memory, as CPU towers would; "auto"
            does so where torch has no collectives for the kind of device, or towers share one.
        algorithm: "ring" pins NCCL's ring all-reduce, "auto" leaves the choice to NCCL's tuner; a value of
            ``NCCL_ALGO`` in the environment wins. Gloo always uses its ring.
        wire_dtype: "same", or "bfloat16" to send float32 gradients so between devices or hosts: half the bytes, 8 bits
            of precision. What CPU towers average in shared memory is not sent and keeps its precision, and so do sparse
            gradients. With ``virtual_towers``, which promise bits, it is a ValueError.
        compression: how gradients are averaged in fewer bytes, approximately: :class:`mirrored.PowerSGD`.
        bucket_bytes: gradients travel in buckets of about this many bytes; None: 25 MiB, through Gloo 4 MiB.
        timeout_seconds: how long a collective may take before it is an error.
        startup_timeout_seconds: how long towers and workers wait for each other at the start.
        rejoin_timeout_seconds: the same when they are started again after a failure.
        step_timeout_seconds: how long one ``strategy.run`` may take with several towers; a tower that takes longer says
            what it is doing and ends, and so do the others. ``math.inf``: no limit.

    Raises:
        ValueError: an unknown name, or a number that is not positive.
        TypeError: ``compression`` is no way of compressing.
    """

    implementation: str = "auto"
    algorithm: str = "ring"
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
                raise ValueError(f"{field} is {value!r}, but must be one of {', '.join(choices)}")
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
    """For a public function: arguments of TensorFlow's that it does not have, and what to write in their place.

    Such an argument by name, or one positional argument too many, is a TypeError that says so; the function's signature
    stays what it is.
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
