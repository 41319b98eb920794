"""What the fork server of :mod:`towers.launching.launch` loads, once for all towers.

Torch's compiler, too, which the first optimizer of a process would load. Without looking for garbage:
[Note: no garbage while loading] of :mod:`towers.launching.fork_server`.
"""

import gc

gc.disable()
try:
    from towers.launching import launch  # noqa: F401
    from towers.system.torch_private import load_compiler

    load_compiler()
finally:  # multiprocessing goes on without what cannot be imported
    gc.enable()
