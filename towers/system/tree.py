"""Nested structures: dicts, lists, tuples and named tuples, with any other values as leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor


def map_leaves(fn: Callable[[Any], Any], tree: Any, leaf: type | tuple[()] = ()) -> Any:
    """Returns the same structure with every leaf replaced by ``fn(leaf)``. None is a leaf.

    Mappings keep their type if its constructor accepts a dict, and otherwise become dicts. Named tuples keep their
    type.

    Args:
        leaf: a type whose instances are leaves, too.
    """
    if isinstance(tree, leaf) or not isinstance(tree, (Mapping, list, tuple)):
        return fn(tree)
    return with_entries(tree, [map_leaves(fn, entry, leaf) for entry in entries(tree)])


def entries(tree: Mapping[Any, Any] | list[Any] | tuple[Any, ...]) -> Iterable[Any]:
    """Returns the first level of a structure: a mapping's values, or a list's entries."""
    return tree if isinstance(tree, (list, tuple)) else tree.values()


def with_entries(tree: Mapping[Any, Any] | Sequence[Any], replaced: Sequence[Any]) -> Any:
    """Returns a structure like :func:`map_leaves`, with other entries in its first level."""
    kind: Any = type(tree)
    if not isinstance(tree, Mapping):
        return kind(*replaced) if hasattr(tree, "_fields") else kind(replaced)
    mapped = dict(zip(tree, replaced, strict=True))
    if kind is dict:
        return mapped
    try:
        return kind(mapped)
    except TypeError:  # a mapping with its own constructor (defaultdict)
        return mapped


def leaves(tree: Any) -> Iterator[Any]:
    """Yields every leaf, depth first, mappings in their own order."""
    if not isinstance(tree, (list, tuple, Mapping)):
        yield tree
        return
    for value in entries(tree):
        if isinstance(value, Tensor):  # most leaves are; the question for Mapping, and a generator, take longer
            yield value
        else:
            yield from leaves(value)


def structure(tree: Any) -> str:
    """Returns a text that is equal for two trees exactly when their structures (and mapping keys) are equal."""
    if isinstance(tree, Mapping):
        return "{" + ",".join(f"{key!r}:{structure(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, (list, tuple)):
        first, last = "[]" if isinstance(tree, list) else "()"
        return first + ",".join(structure(value) for value in tree) + last
    return "*"
