"""What a strategy asks of whatever reduces its gradients; :mod:`towers.gradients.averager` averages them in buckets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from towers.gradients.slots import Slot
from towers.system.named import Named


class GradientReducer(Protocol):
    """Reduces the gradients of parameters over the towers, in every backward."""

    # -- parameters --------------------------------------------------------------------------------------

    def add(self, parameters: Sequence[Named]) -> None:
        """Reduce the gradients of these too. All towers add the same, in the same order.

        Raises:
            TowersError: the last backward ended in an exception, so towers may be out of step.
        """

    def refresh(self) -> None:
        """Take notice of parameters that were converted or moved since the last step.

        Raises:
            TowersError: the last backward ended in an exception, so towers may be out of step.
        """

    def slot_of(self, parameter: Tensor) -> Slot | None:
        """A parameter's slot, if its gradients are reduced: a place in a bucket, or a sparse one."""

    # -- one backward ------------------------------------------------------------------------------------

    def contribute_nothing(self) -> None:
        """Take part in a backward of the other towers without one of this tower's own.

        Raises:
            TowersError: the last backward ended in an exception, so towers may be out of step.
        """

    @property
    def in_backward(self) -> bool:
        """Whether autograd is running, or has begun a backward whose gradients are not reduced yet."""

    def check_paired(self) -> None:
        """See that towers are in step: the last backward came to its end, and was the same one on all of them.

        Raises:
            TowersError: it ended in an exception.
            DisagreementError: on all towers, when it was not the same one.
        """

    def break_off_backward(self, error: BaseException) -> None:
        """If a backward is open, tell the towers that wait for its gradients that the script's step has ended so."""

    # -- gradients that are reduced otherwise, or not ----------------------------------------------------

    def accumulating(self) -> AbstractContextManager[None]:
        """Inside, gradients accumulate on this tower alone; the next backward outside averages them too."""

    def unsynced(self) -> dict[int, str]:
        """Names, by ``id``, of parameters whose gradient has contributions that were not averaged."""

    # -- what has been averaged --------------------------------------------------------------------------

    @property
    def averaged(self) -> int:
        """How many averages have begun: one a backward, also if it failed, and those of :meth:`note_averaged`."""

    def averaged_since(self, number: int, parameters: Iterable[Tensor]) -> bool:
        """Whether gradients of any of these were averaged after average ``number`` (see :attr:`averaged`)."""

    def note_averaged(self, parameters: Iterable[Tensor], *, replaced: bool) -> None:
        """Take note that the gradients of these were averaged by other means.

        Args:
            replaced: whether the parameters hold the averages, and so nothing that is this tower's own any more.
        """
