"""Gradients that are not averaged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from towers.collectives.communicator import Communicator
from towers.gradients.averager import GradientAverager, Hooks
from towers.system.autograd_hooks import GradientHook
from towers.system.named import Named


class LocalGradients(GradientAverager):
    """An averager without parameters: it averages nothing, and only records backward passes.

    It runs no collectives, so it does not need its own channel.

    Attributes:
        trained: whether a backward outside ``no_sync`` occurred since the owner set this to False.
    """

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self.trained = False
        self._notices: list[GradientHook] = []

    def _notice(self) -> None:
        self._channel.health.train()
        self.trained = self.trained or self._hooks is not Hooks.ACCUMULATE

    def add(self, parameters: Sequence[Named]) -> None:
        tensors = [named.tensor for named in parameters]
        trainable = [p for p in tensors if p.is_floating_point() or p.is_complex()]
        self._notices += [GradientHook(p, lambda parameter: self._notice()) for p in trainable]

    def contribute_nothing(self) -> None:
        self._notice()

    def break_off_backward(self, error: BaseException) -> None:
        self.trained = False

    def averaged_since(self, number: int, parameters: Iterable[Tensor]) -> bool:
        return True

    def note_averaged(self, parameters: Iterable[Tensor], *, replaced: bool) -> None:
        self._notice()
