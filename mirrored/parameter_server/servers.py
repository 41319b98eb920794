"""The servers as the chief and the workers call them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from mirrored.parameter_server.errors import ServerLostError
from mirrored.parameter_server.layout import PlacedVariable

LOST = RayActorError, OutOfMemoryError
"""What Ray raises where an actor has ended."""


def cause_of(error: Exception) -> str:
    """Which process an actor was, or that Ray has ended it to save memory."""
    if isinstance(error, OutOfMemoryError):
        return f"out of memory: {str(error).partition(chr(10))[0]}"
    return ", ".join(re.findall(r"\b(?:pid|ip): \S+", str(error))) or str(error)


class Servers:
    """Calls methods of servers by their index, from 0.

    Args:
        actors: one for each index.

    Attributes:
        variables: what is on them.
    """

    def __init__(self, actors: Sequence[Any]) -> None:
        self.actors = actors
        self.variables: Sequence[PlacedVariable] = ()

    def send(self, method: str, arguments: Mapping[int, Any]) -> dict[int, Any]:
        """Call a method of each server that there is an argument or a tuple of them for.

        Returns:
            What :meth:`receive` takes, at once.
        """
        tuples = {index: given if isinstance(given, tuple) else (given,) for index, given in arguments.items()}
        return {index: getattr(self.actors[index], method).remote(*given) for index, given in tuples.items()}

    def receive(self, sent: Mapping[int, Any]) -> dict[int, Any]:
        """Wait for the answers.

        Raises:
            ServerLostError: one has ended.
        """
        return {index: self._receive(index, answer) for index, answer in sent.items()}

    def ask(self, method: str, arguments: Mapping[int, Any]) -> dict[int, Any]:
        """:meth:`send`, and wait for the answers.

        Raises:
            ServerLostError: one has ended.
        """
        return self.receive(self.send(method, arguments))

    def ask_all(self, method: str, *arguments: Any) -> dict[int, Any]:
        """Call a method of all servers with the same arguments, and wait for the answers.

        Raises:
            ServerLostError: one has ended.
        """
        return self.ask(method, dict.fromkeys(range(len(self.actors)), arguments))

    def _receive(self, index: int, answer: Any) -> Any:
        try:
            return ray.get(answer)
        except RayTaskError as error:
            raise error.cause from error  # what the method has raised
        except LOST as error:
            raise ServerLostError(
                f"parameter server {index} ({cause_of(error)}) has ended, and with it {self._on(index)}. Start "
                "again by the same command, which goes on from the newest checkpoint; if nobody has killed it, see to "
                "its memory"
            ) from None

    def _on(self, index: int) -> str:
        parts = [(v.name, part) for v in self.variables for part in v.parts if part.server == index]
        names = [f"rows {part.start} to {part.end - 1} of {name}" if part.end else name for name, part in parts]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "no variables"
