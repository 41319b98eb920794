"""Code that torch.compile does not compile.

After a graph break, a compiled function runs the following code uncompiled, ``backward()`` for example, and every
Python function called within it is compiled in turn. This would include ``mirrored``'s hooks. They count, keep tensors
over steps, and communicate with other processes, which no graph can contain.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterator, Sequence

from towers.system.torch_private import COMPILER, skip_in_compiler


class Untraced:
    """Packages whose functions torch.compile neither compiles nor includes in a graph.

    torch loads its compiler when it is first used, which takes a second. This class does not load it.

    Args:
        packages: their names.
        traced: full names of modules in them that graphs may contain. Packages that a script imports may add theirs.
    """

    def __init__(self, packages: Sequence[str], traced: set[str]) -> None:
        self._packages = packages
        self.traced = traced
        self._told = False

    def tell_compiler(self) -> None:
        """Registers the packages with the compiler. It must be called after code may have been compiled."""
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


untraced = Untraced(
    ["towers", "mirrored"],
    traced={  # parts of a model's step
        "towers.batch_norm",
        "mirrored.attached.batch_norm",
        "mirrored.context",
        "mirrored.losses",
        "mirrored.empty_shares",
    },
)
