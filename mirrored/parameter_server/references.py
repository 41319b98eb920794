"""Pickles functions, models and optimizers for other processes. Objects of the scope are sent as references.

[Note: what a function refers to] A scheduled function is pickled with all objects that it refers to. A pickled model
would be a copy, whose updates would be lost. So modules, variables and optimizers of the scope, per-worker data and the
strategy are sent as references, which the worker resolves to its own objects. All other objects are copied.

[Note: pickles] The pickles are read by the job's own actors, from Ray's channels, which require the job's secret
(:mod:`mirrored.parameter_server.nodes`).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

from ray.cloudpickle import CloudPickler

Reference = tuple[Any, ...]
"""A kind, such as "module", and the object's position."""


def dump(value: Any, reference_of: Callable[[Any], Reference | None] = lambda obj: None) -> bytes:
    """Pickles a value.

    Args:
        reference_of: returns the reference that is sent instead of an object, or None to pickle the object itself.

    Raises:
        TypeError: a part of the value cannot be pickled.
    """
    pickler: Any = CloudPickler(file := io.BytesIO())
    pickler.persistent_id = reference_of
    try:
        pickler.dump(value)
    except (pickle.PicklingError, AttributeError, RecursionError) as error:
        raise TypeError(str(error)) from error
    return file.getvalue()


def load(data: bytes, resolve: Callable[[Reference], Any] = lambda reference: None) -> Any:
    """Reads a result of :func:`dump`.

    Args:
        resolve: returns the object of a reference.
    """
    unpickler: Any = pickle.Unpickler(io.BytesIO(data))
    unpickler.persistent_load = resolve
    return unpickler.load()
