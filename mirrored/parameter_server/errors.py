"""What ends a training with parameter servers, and answers of actors without Ray's words around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from towers.errors import PeerLostError


class ServerLostError(PeerLostError):
    """A server has ended, and its part of the variables with it: start again, from the newest checkpoint."""


def reach(answers: Sequence[Any]) -> list[Any]:
    """What servers have answered.

    Raises:
        ServerLostError: one has ended.
    """
    try:
        return list(ray.get(list(answers)))
    except RayTaskError as error:
        raise error.cause from None  # what the method has raised
    except RayActorError as error:
        raise ServerLostError(
            f"a parameter server has ended, and its part of the variables with it ({_first_line(error)}): start again "
            "by the same command, which goes on from the newest checkpoint"
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
