"""The module that the fork server of :mod:`towers.launching.starting.launch` loads, once for all towers.

It also loads torch's compiler, which the first optimizer of a process would load. Garbage collection is disabled during
this: [Note: no garbage while loading] of :mod:`towers.launching.starting.fork_server`.
"""

from __future__ import annotations

import gc

gc.disable()
try:
    from towers.launching.starting import launch  # noqa: F401
    from towers.system.torch_private import load_compiler

    load_compiler()
finally:  # multiprocessing continues without a module that cannot be imported
    gc.enable()
