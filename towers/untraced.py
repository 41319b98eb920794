"""Code that torch.compile leaves alone.

After a graph break, a compiled function calls what follows as it is, ``backward()`` for example, and every Python
function that is called within it is compiled in turn. Our hooks would be: they count, keep tensors over steps, and talk
to other processes, none of which a graph can hold.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


class Untraced:
    """Modules and packages whose functions torch.compile neither compiles nor takes into a graph.

    torch loads its compiler when it is first used, which takes a second; nothing is loaded here.

    Args:
        names: of modules, or of packages with all in them.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._told = False

    def tell_compiler(self) -> None:
        """To be called when something may have been compiled since the last time."""
        if not self._told and "torch._dynamo" in sys.modules:
            from torch._dynamo import trace_rules

            for name in self._names:
                trace_rules.add(name)
            self._told = True
