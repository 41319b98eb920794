"""Code that torch.compile leaves alone.

After a graph break, a compiled function calls what follows as it is, ``backward()`` for example, and every Python
function that is called within it is compiled in turn. Our hooks would be: they count, keep tensors over steps, and talk
to other processes, none of which a graph can hold.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Collection, Sequence

from towers.errors import TowersError


class Untraced:
    """Packages whose functions torch.compile neither compiles nor takes into a graph.

    torch loads its compiler when it is first used, which takes a second; nothing is loaded here.

    Args:
        packages: their names.
        traced: names of modules in them that graphs may hold.
    """

    def __init__(self, packages: Sequence[str], traced: Collection[str]) -> None:
        self._packages = packages
        self._traced = traced
        self._told = False

    def tell_compiler(self) -> None:
        """To be called when something may have been compiled since the last time."""
        if self._told or "torch._dynamo" not in sys.modules:
            return
        from torch._dynamo import trace_rules

        for package in self._packages:
            for module in pkgutil.iter_modules(sys.modules[package].__path__):
                if module.name not in self._traced:
                    trace_rules.add(f"{package}.{module.name}")
        self._told = True


def refuse_compiled_autograd(tower: int) -> None:
    """See that a backward, which has begun, will tell when it is done.

    Args:
        tower: this one, for messages.

    Raises:
        TowersError: compiled autograd runs it, which calls hooks, but not what is queued for the end.
    """
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled_autograd is not None and compiled_autograd.in_compiled_autograd_region:
        raise TowersError(
            f"compiled autograd runs this backward() on tower {tower}, and does not say when it is done, so gradients "
            "cannot be averaged: leave torch._dynamo.config.compiled_autograd off. torch.compile(model) compiles the "
            "model's backward without it"
        )
