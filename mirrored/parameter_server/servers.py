"""The servers as the chief and the workers call them, and what comes of a call of any actor."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from mirrored.parameter_server.errors import ServerLostError
from mirrored.parameter_server.layout import Part, PlacedVariable

_COLOURS = "\x1b\\[\\d+m"  # that Ray puts into tracebacks


class ActorLostError(Exception):
    """An actor has ended. The text is which process it was, or that Ray has ended it to save memory."""


def result_of(answer: Any, raiser: str) -> Any:
    """Wait for what an actor's method returns.

    Args:
        raiser: what a traceback calls the method.

    Raises:
        BaseException: what the method has raised, its traceback there being its cause. What cannot be pickled, or not
            be read here, is a RayError with all that was printed of it.
        ActorLostError: the actor has ended.
    """
    trace = None
    try:
        return ray.get(answer)
    except RayTaskError as error:
        raised: BaseException = error.cause
        if not isinstance(raised, ServerLostError):
            trace = RuntimeError(f"raised by {raiser}:\n{re.sub(_COLOURS, '', str(error))}")
    except OutOfMemoryError as error:
        raised = ActorLostError(f"out of memory: {str(error).partition(chr(10))[0]}")
    except RayActorError as error:
        raised = ActorLostError(", ".join(re.findall(r"\b(?:pid|ip): \S+", str(error))) or str(error))
    raise raised from trace  # where no other error is handled, which it would keep, with all frames below


class Servers:
    """Calls methods of servers by their index, from 0.

    Args:
        actors: one for each index.

    Attributes:
        variables: what is on them.
    """

    def __init__(self, actors: Sequence[Any]) -> None:
        self.actors = actors
        self.variables: list[PlacedVariable] = []

    def send(self, method: str, by_part: dict[Part, Any], *arguments: Any, to_all: bool = False) -> dict[int, Any]:
        """Call a method of servers, each with what is of its own parts, and with the same other arguments.

        Args:
            to_all: call servers that have none of the parts, too.

        Returns:
            What :meth:`receive` takes, at once.
        """
        own = {index: type(by_part)() for index in range(len(self.actors) if to_all else 0)}
        for part, value in by_part.items():
            own.setdefault(part.server, type(by_part)())[part] = value
        return {index: getattr(self.actors[index], method).remote(parts, *arguments) for index, parts in own.items()}

    def receive(self, sent: Mapping[int, Any]) -> dict[int, Any]:
        """Wait for the answers.

        Raises:
            ServerLostError: one has ended.
        """
        answers = {}
        for index, answer in sent.items():
            try:
                answers[index] = result_of(answer, f"parameter server {index}")
            except ActorLostError as error:
                raise ServerLostError(
                    f"parameter server {index} ({error}) has ended, and with it {self._on(index)}. Start the job "
                    "with the same command again: it resumes from the newest checkpoint. If the server was not "
                    "killed on purpose, check its memory"
                ) from None
        return answers

    def ask(self, method: str, by_part: dict[Part, Any], *arguments: Any, to_all: bool = False) -> dict[int, Any]:
        """:meth:`send`, and wait for the answers.

        Raises:
            ServerLostError: one has ended.
        """
        return self.receive(self.send(method, by_part, *arguments, to_all=to_all))

    def ask_all(self, method: str, *arguments: Any) -> dict[int, Any]:
        """Call a method of all servers with the same arguments, and wait for the answers.

        Raises:
            ServerLostError: one has ended.
        """
        return self.receive({i: getattr(actor, method).remote(*arguments) for i, actor in enumerate(self.actors)})

    def _on(self, index: int) -> str:
        parts = [(v.name, part) for v in self.variables for part in v.parts if part.server == index]
        names = [f"rows {part.start} to {part.end - 1} of {name}" if part.end else name for name, part in parts]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "no variables"
