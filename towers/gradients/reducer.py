"""The interface between a strategy and what keeps the gradients of its towers equal.

:mod:`towers.gradients.averager` averages in buckets, ``LocalGradients`` of :mod:`mirrored.local` not at all.
``tests/gradients/test_reducer_of_torch.py`` puts the reducer of torch's ``DistributedDataParallel`` behind it. Virtual
towers and sharded optimizer steps need :class:`towers.gradients.averager.GradientAverager` itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from towers.system.tensors import Named


class GradientReducer(Protocol):
    """Reduces the gradients of parameters over the towers, in every backward."""

    # -- parameters --------------------------------------------------------------------------------------

    def add(self, parameters: Sequence[Named]) -> None:
        """Reduces the gradients of these parameters, too. All towers add the same parameters, in the same order.

        Raises:
            TowersError: the last backward ended in an exception, so towers may be out of step.
        """

    def refresh(self) -> None:
        """Adapts to parameters that were converted or moved since the last step.

        Raises:
            TowersError: the last backward ended in an exception, so towers may be out of step.
        """

    def expect_other_collectives(self) -> None:
        """Prepares for backwards that contain collectives of this strategy's layers, on another communicator."""

    def reduces_densely(self, parameter: Tensor) -> bool:
        """Returns whether the gradient of this parameter is reduced as a dense one, whatever layout it has."""

    # -- one backward ------------------------------------------------------------------------------------

    def contribute_nothing(self) -> None:
        """Takes part in a backward of the other towers without a contribution of this tower.

        Raises:
            TowersError: the last backward ended in an exception, so towers may be out of step.
        """

    @property
    def in_backward(self) -> bool:
        """Whether autograd is running, or has started a backward whose gradients are not reduced yet."""

    def check_paired(self) -> None:
        """Checks that towers are in step: the last backward has finished, and was the same one on all towers.

        Raises:
            TowersError: it ended in an exception.
            DisagreementError: on all towers, if it was not the same one.
        """

    def digest_of_backwards(self) -> int:
        """Returns a number that is the same on all towers if they were in the same backwards."""

    def break_off_backward(self, error: BaseException) -> None:
        """Reports the failure of the script's step to towers that wait for gradients of an open backward, if any."""

    # -- gradients that are reduced otherwise, or not ----------------------------------------------------

    def accumulating(self) -> AbstractContextManager[None]:
        """Accumulates gradients on this tower only, inside the context. The next backward outside averages them."""

    def unsynced(self) -> dict[int, str]:
        """Returns the names, by ``id``, of parameters whose gradient has contributions that were not averaged."""

    # -- finished averages -------------------------------------------------------------------------------

    @property
    def averaged(self) -> int:
        """The number of averages that have started.

        Every backward counts once, even if it failed, and so does :meth:`note_averaged`.
        """

    def averaged_since(self, number: int, parameters: Iterable[Tensor]) -> bool:
        """Returns whether any of these gradients were averaged after average ``number`` (see :attr:`averaged`)."""

    def note_averaged(self, parameters: Iterable[Tensor], *, replaced: bool) -> None:
        """Records that the gradients of these parameters were averaged by other means.

        Args:
            replaced: whether the parameters hold the averages, and so no contribution of this tower alone any more.
        """
