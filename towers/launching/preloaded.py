"""What the fork server of :mod:`towers.launching.launch` loads, once for all towers.

Torch's compiler, too, which the first optimizer of a process would load. Without looking for garbage:
[Note: no garbage while loading] of :mod:`towers.launching.fork_server`.
"""

import gc

gc.disable()

from towers.launching import launch  # noqa: E402, F401
from towers.system.torch_private import load_compiler  # noqa: E402

load_compiler()
gc.enable()
