"""Code that torch.compile leaves alone.

After a graph break, a compiled function calls what follows as it is, ``backward()`` for example, and every Python
function that is called within it is compiled in turn. Our hooks would be: they count, keep tensors over steps, and talk
to other processes, none of which a graph can hold.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterator, Sequence

from towers.system.torch_private import COMPILER, skip_in_compiler


class Untraced:
    """Packages whose functions torch.compile neither compiles nor takes into a graph.

    torch loads its compiler when it is first used, which takes a second; nothing is loaded here.

    Args:
        packages: their names.
        traced: full names of modules in them that graphs may hold; packages that a script imports may add theirs.
    """

    def __init__(self, packages: Sequence[str], traced: set[str]) -> None:
        self._packages = packages
        self.traced = traced
        self._told = False

    def tell_compiler(self) -> None:
        """To be called when something may have been compiled since the last time."""
        if self._told or COMPILER not in sys.modules:
            return
        skip_in_compiler([file for name in self._packages for file in self._files(name, sys.modules[name].__path__[0])])
        self._told = True

    def _files(self, package: str, folder: str) -> Iterator[str]:
        for module in pkgutil.iter_modules([folder]):
            name, path = f"{package}.{module.name}", f"{folder}/{module.name}"
            if any(traced.startswith(f"{name}.") for traced in self.traced):
                yield from self._files(name, path)
            elif name not in self.traced:
                yield f"{path}/" if module.ispkg else f"{path}.py"
