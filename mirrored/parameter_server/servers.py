"""Calls of servers by the chief and the workers, results of calls of any actor, lost actors, and what is pickled.

[Note: what a function refers to] A scheduled function is pickled with all objects that it refers to. A pickled model
would be a copy, whose updates would be lost. So modules, variables and optimizers of the scope, per-worker data and the
strategy are sent as references, which the worker resolves to its own objects. All other objects are copied.

[Note: pickles] The pickles are read by the job's own actors, from Ray's channels, which require the job's secret
(:mod:`mirrored.parameter_server.nodes`).
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.cloudpickle import CloudPickler
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from mirrored.parameter_server.layout import Part, PlacedVariable
from mirrored.parameter_server.libraries import libraries
from towers.errors import PeerLostError

Reference = tuple[Any, ...]
"""A kind, such as "module", and the object's position."""


_COLOURS = "\x1b\\[\\d+m"  # ANSI colours in Ray's tracebacks


class ServerLostError(PeerLostError):
    """Reports that a server has ended, together with its part of the variables. Restart from the newest checkpoint."""


class ActorLostError(Exception):
    """Reports that an actor has ended. The message names the process, or that Ray ended it to save memory."""


def result_of(answer: Any, raiser: str) -> Any:
    """Waits for the result of an actor's method, and returns it.

    Args:
        raiser: the method's name in a traceback.

    Raises:
        BaseException: the exception that the method raised, with its remote traceback as the cause. An exception that
            cannot be pickled, or not be read here, is a RayError with its printed traceback.
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
    raise raised from trace  # outside of the except block, whose error would keep all its frames alive


class Servers:
    """Calls methods of servers by their index, from 0.

    Args:
        actors: one for each index.

    Attributes:
        variables: the variables on the servers.
    """

    def __init__(self, actors: Sequence[Any]) -> None:
        self.actors = actors
        self.variables: list[PlacedVariable] = []

    def send(self, method: str, by_part: dict[Part, Any], *arguments: Any, to_all: bool = False) -> dict[int, Any]:
        """Calls a method of servers, each with the values of its own parts and the same other arguments.

        Args:
            to_all: whether servers without any of the parts are called, too.

        Returns:
            The argument for :meth:`receive`, without waiting.
        """
        own = {index: type(by_part)() for index in range(len(self.actors) if to_all else 0)}
        for part, value in by_part.items():
            own.setdefault(part.server, type(by_part)())[part] = value
        return {index: getattr(self.actors[index], method).remote(parts, *arguments) for index, parts in own.items()}

    def receive(self, sent: Mapping[int, Any]) -> dict[int, Any]:
        """Waits for the answers and returns them.

        Raises:
            ServerLostError: a server has ended.
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
        """Calls :meth:`send`, and waits for the answers.

        Raises:
            ServerLostError: a server has ended.
        """
        return self.receive(self.send(method, by_part, *arguments, to_all=to_all))

    def ask_all(self, method: str, *arguments: Any) -> dict[int, Any]:
        """Calls a method of all servers with the same arguments, and waits for the answers.

        Raises:
            ServerLostError: a server has ended.
        """
        return self.receive({i: getattr(actor, method).remote(*arguments) for i, actor in enumerate(self.actors)})

    def _on(self, index: int) -> str:
        parts = [(v.name, part) for v in self.variables for part in v.parts if part.server == index]
        names = [f"rows {part.start} to {part.end - 1} of {name}" if part.end else name for name, part in parts]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "no variables"


class _Pickler(CloudPickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        for library in libraries:
            if (reduced := library.reduce(obj)) is not NotImplemented:
                return reduced
        return super().reducer_override(obj)


def pickle_by_reference(value: Any, reference_of: Callable[[Any], Reference | None] = lambda obj: None) -> bytes:
    """Pickles a value.

    Args:
        reference_of: returns the reference that is sent instead of an object, or None to pickle the object itself.

    Raises:
        TypeError: a part of the value cannot be pickled.
    """
    pickler: Any = _Pickler(file := io.BytesIO())
    pickler.persistent_id = reference_of
    try:
        pickler.dump(value)
    except (pickle.PicklingError, AttributeError, RecursionError) as error:
        raise TypeError(str(error)) from error
    return file.getvalue()


def unpickle(data: bytes, resolve: Callable[[Reference], Any] = lambda reference: None) -> Any:
    """Reads a result of :func:`pickle_by_reference`.

    Args:
        resolve: returns the object of a reference.
    """
    unpickler: Any = pickle.Unpickler(io.BytesIO(data))
    unpickler.persistent_load = resolve
    return unpickler.load()
