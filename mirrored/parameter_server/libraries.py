"""Models and optimizers of other libraries, such as Keras, which are not pickled, called or stepped as torch's are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer


class ServedOptimizer(Optimizer):
    """A torch optimizer that steps for an optimizer of another library.

    Attributes:
        own: on workers: the library's optimizer, which functions use.
    """

    own: Any

    def update_settings(self) -> None:
        """Sets the settings of the groups on the chief. They are sent with the next call."""

    def note_steps(self, steps: int) -> None:
        """Receives the number of steps of the servers, on a worker, after a pull."""

    def take_parts(self, owners: Sequence[int], parts: Sequence[Tensor]) -> None:
        """Receives a server's parts, each with the place of its parameter among all of them."""


class Library(Protocol):
    """The functions of another library that the strategy needs, on the chief, the workers and the servers."""

    def reduce(self, obj: Any) -> Any:
        """Returns how to pickle an object, as ``__reduce__`` does, or NotImplemented for objects of others."""

    def optimizer_of(self, obj: Any) -> ServedOptimizer | None:
        """Returns the torch optimizer that steps for an object, or None if there is none."""

    def written_by_forward(self, model: nn.Module) -> Iterable[Tensor]:
        """Returns the parameters of a model that a forward writes to."""

    def watch(self, layers: Iterable[nn.Module], refresh: Callable[[], None]) -> None:
        """Makes each call of these layers that runs no hooks of torch call ``refresh``, a bound method, first."""


libraries: list[Library] = []
"""A library adds itself when it is imported. On workers and servers, the pickles of its objects import it."""
