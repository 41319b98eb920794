"""Gradients that stay each tower's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from towers.gradients.reducer import GradientReducer
from towers.gradients.slots import Slot
from towers.health.status import Health
from towers.system.autograd_hooks import GradientHook
from towers.system.named import Named
from towers.system.torch_private import current_graph_task_id


class LocalGradients(GradientReducer):
    """Averages nothing, and takes notice of backwards.

    Attributes:
        trained: whether there was a backward, outside of ``no_sync``, since the owner has set this to False.
    """

    def __init__(self, health: Health) -> None:
        self.trained = False
        self._health = health
        self._accumulates = False
        self._hooks: list[GradientHook] = []

    def _arrive(self) -> None:
        self._health.train()
        self.trained = self.trained or not self._accumulates

    def add(self, parameters: Sequence[Named]) -> None:
        tensors = [named.tensor for named in parameters]
        trainable = [p for p in tensors if p.is_floating_point() or p.is_complex()]
        self._hooks += [GradientHook(p, lambda parameter: self._arrive()) for p in trainable]

    def refresh(self) -> None:
        pass

    def slot_of(self, parameter: Tensor) -> Slot | None:
        return None

    def contribute_nothing(self) -> None:
        self._arrive()

    @property
    def in_backward(self) -> bool:
        return current_graph_task_id() != -1

    def check_paired(self) -> None:
        pass

    def break_off_backward(self, error: BaseException) -> None:
        self.trained = False

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    def unsynced(self) -> dict[int, str]:
        return {}

    @property
    def averaged(self) -> int:
        return 0

    def averaged_since(self, number: int, parameters: Iterable[Tensor]) -> bool:
        return True

    def note_averaged(self, parameters: Iterable[Tensor], *, replaced: bool) -> None:
        self._arrive()
