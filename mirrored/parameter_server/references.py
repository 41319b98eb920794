"""Functions, models and optimizers on their way to other processes: what the scope has made is sent as a reference.

[Note: what a function refers to] A scheduled function is pickled with all that it refers to. A model would be a copy
there, whose updates nobody sees. So modules, variables and optimizers of the scope, per-worker data and the strategy
are named, and become the worker's own. All else is a copy.

[Note: pickles] These are read by the job's own actors, from Ray's channels, to which a job has a secret
(:mod:`mirrored.parameter_server.nodes`).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

from ray.cloudpickle import CloudPickler

Reference = tuple[Any, ...]
"""A kind, such as "module", and where it is found."""


def dump(value: Any, reference_of: Callable[[Any], Reference | None] = lambda obj: None) -> bytes:
    """Pickle a value.

    Args:
        reference_of: the reference that is sent in place of an object; None: the object itself is.

    Raises:
        TypeError: something in it cannot be pickled.
    """
    pickler: Any = CloudPickler(file := io.BytesIO())
    pickler.persistent_id = reference_of
    try:
        pickler.dump(value)
    except (pickle.PicklingError, AttributeError, RecursionError) as error:
        raise TypeError(str(error)) from error
    return file.getvalue()


def load(data: bytes, resolve: Callable[[Reference], Any] = lambda reference: None) -> Any:
    """Read what :func:`dump` has written.

    Args:
        resolve: gives the object that a reference names.
    """
    unpickler: Any = pickle.Unpickler(io.BytesIO(data))
    unpickler.persistent_load = resolve
    return unpickler.load()
