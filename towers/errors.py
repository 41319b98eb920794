"""The errors between towers."""

from __future__ import annotations


class TowersError(RuntimeError):
    """Base class of all errors between towers."""


class CannotStartError(TowersError):
    """The job has several towers, but this process cannot be restarted as several.

    Raised in notebooks, test runners, installed programs and interactive sessions.
    """


class StartupError(TowersError):
    """Some towers or workers did not join before the start-up deadline."""


class PortInUseError(StartupError, OSError):
    """Another program uses the address at which the other workers expect the chief. No other port is tried."""


class HandshakeError(TowersError):
    """The towers do not belong to the same job. All towers raise this error with the same message.

    A process that uses the index of another tower, or belongs to another job, raises it alone.
    """


class DisagreementError(TowersError, ValueError):
    """Towers called the same collective with different operations, shapes, dtypes or structures."""


class DeadlockError(DisagreementError):
    """Towers wait for each other in different collectives, because some have skipped a call."""


class ArgumentError(TowersError, ValueError):
    """A collective was called with tensors or an operation that it does not support."""


class PeerLostError(TowersError):
    """Another tower ended while this one waited for it. The cause is the error of that tower."""


class CollectiveTimeoutError(TowersError):
    """A tower waited for other towers in a collective until the deadline (``timeout_seconds``)."""


class StepTimeoutError(TowersError):
    """One call of ``strategy.run`` took longer than ``step_timeout_seconds``. Its tower has ended."""


DECIDE_TOGETHER = (
    "If one tower has a reason to skip a call (a loss that is not finite, an empty share), all towers must "
    'decide together before it: bad = strategy.reduce("max", int(bad))'
)
"""Advice for scripts whose towers do not make the same calls."""


def collective_timeout(
    tower: int, seconds: float, awaited: str = "the other towers", status: str = "", peers: str = "", stacks: str = ""
) -> CollectiveTimeoutError:
    """Returns the error of a tower that has waited for some seconds in a collective.

    Args:
        awaited: the name of the towers that it waits for.
        status: the tower's position, from a :class:`towers.health.status.Status`.
        peers: the positions of the other towers, as part of a sentence.
        stacks: the stacks of the other towers.
    """
    return CollectiveTimeoutError(
        f"tower {tower} waited {seconds:.0f} s for {awaited} in a collective{status and f' ({status})'}"
        f"{peers and f'; {peers}'}. Every tower must make the same calls in the same order (run, reduce, gather, the "
        "next batch, backward): look for one under `if strategy.is_chief:`, for a loop that one tower leaves early, "
        "and for a tower that is much slower (CommunicationOptions.timeout_seconds)"
        f"{stacks and chr(10)}{stacks}"
    )


def out_of_step(tower: int, cause: BaseException) -> TowersError:
    """Returns the error of a tower in every collective after one that raised ``cause``."""
    kind = PeerLostError if isinstance(cause, PeerLostError) else TowersError
    return kind(
        f"tower {tower} is out of step with the others since a collective ended in an exception ({in_words(cause)}): "
        "nothing further can be done together; restart from the last checkpoint"
    )


def in_words(error: BaseException) -> str:
    """Returns the type of an error and, for an error between towers, the first line of its message.

    Another message ("CUDA out of memory") would look like a tower's own error on the others.
    """
    kind = type(error).__name__
    return f"{kind}: {str(error).partition(chr(10))[0]}" if isinstance(error, TowersError) else kind


class MirrorError(TowersError):
    """The towers' models differ in names, shapes, dtypes, order or values."""


class NonFiniteGradientError(TowersError):
    """A gradient of one tower is NaN or infinite. All towers raise this error, with one message, after averaging."""


class ForkedError(TowersError):
    """The process was forked after its tower started. The copy is not a tower."""


class TowerFailedError(TowersError):
    """A tower of a :func:`towers.launch` job failed.

    Attributes:
        tower: index of the tower that failed first.
        failures: a :class:`towers.Failure` (tower, exception or None, traceback) for every tower that failed, in order
            of time.
    """

    def __init__(self, message: str, tower: int, failures: tuple[object, ...] = ()) -> None:
        super().__init__(message)
        self.tower = tower
        self.failures = failures
