"""What can go wrong between towers, as types a caller can catch."""

from __future__ import annotations


class TowersError(RuntimeError):
    """Base of everything that goes wrong between towers."""


class CannotStartError(TowersError):
    """More than one tower is wanted, but this process cannot be run again as several.

    Raised in notebooks, test runners, installed programs and interactive sessions.
    """


class StartupError(TowersError):
    """The towers, or the workers that hold them, did not all come before the start-up deadline."""


class PortInUseError(StartupError, OSError):
    """The address where the others expect the chief is taken. It is never moved silently."""


class HandshakeError(TowersError):
    """The towers do not belong together, and all raise this with one text.

    A process that takes another's index, or comes from another job, raises it alone.
    """


class DisagreementError(TowersError, ValueError):
    """Towers called one collective with different operations, shapes, dtypes or structures."""


class DeadlockError(DisagreementError):
    """Towers wait for each other in different collectives: some have left out a call that others have made."""


class ArgumentError(TowersError, ValueError):
    """A collective was called with tensors or an operation that it cannot take."""


class PeerLostError(TowersError):
    """Another tower has ended while this one waited for it: a consequence of whatever ended that one."""


class CollectiveTimeoutError(TowersError):
    """A tower waited for others in a collective until the deadline."""


class StepTimeoutError(TowersError):
    """A single step took longer than the deadline of steps; the tower that it happened to has ended."""


DECIDE_TOGETHER = (
    "If one tower has a reason to skip a call (a loss that is not finite, an empty share), all towers must "
    'decide together before it: bad = strategy.reduce("max", int(bad))'
)
"""Advice for scripts whose towers do not make the same calls."""


def collective_timeout(
    tower: int, seconds: float, awaited: str = "the other towers", status: str = "", peers: str = "", stacks: str = ""
) -> CollectiveTimeoutError:
    """The error of ``tower``, which has waited ``seconds`` in a collective.

    Args:
        awaited: the name of what it waits for.
        status: what it does, as a :class:`towers.health.status.Status` says it.
        peers: what the others do, as part of a sentence.
        stacks: the others' stacks.
    """
    return CollectiveTimeoutError(
        f"tower {tower} waited {seconds:.0f} s for {awaited} in a collective{status and f' ({status})'}"
        f"{peers and f'; {peers}'}. Every tower must make the same calls in the same order (run, reduce, gather, the "
        "next batch, backward): look for one under `if strategy.is_chief:`, for a loop that one tower leaves early, "
        "and for a tower that is much slower (CommunicationOptions.timeout_seconds)"
        f"{stacks and chr(10)}{stacks}"
    )


def out_of_step(tower: int, cause: BaseException) -> TowersError:
    """The error of ``tower`` in every collective after one that ended in ``cause``."""
    kind = PeerLostError if isinstance(cause, PeerLostError) else TowersError
    return kind(
        f"tower {tower} is out of step with the others since a collective ended in an exception ({in_words(cause)}): "
        "nothing further can be done together; restart from the last checkpoint"
    )


def in_words(error: BaseException) -> str:
    """The type of an error, and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


class MirrorError(TowersError):
    """The towers' models are not mirror images: names, shapes, dtypes, order or values differ."""


class NonFiniteGradientError(TowersError):
    """A tower contributed a gradient that is NaN or infinite; raised on all towers with one text, after averaging."""


class ForkedError(TowersError):
    """The process was forked after its tower started; the copy has no place among the towers."""


class TowerFailedError(TowersError):
    """A tower of a :func:`towers.launching.launch` job failed.

    Attributes:
        tower: index of the tower that failed first.
        failures: for every tower that failed, in order of time, its
            :class:`towers.launching.launch.Failure` (tower, exception or None, traceback text).
    """

    def __init__(self, message: str, tower: int, failures: tuple[object, ...] = ()) -> None:
        super().__init__(message)
        self.tower = tower
        self.failures = failures
