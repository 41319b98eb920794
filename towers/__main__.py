"""``python …/towers …`` is the agent that runs several towers.

It is started by this folder's path, so that neither the current directory nor the script's can put another
``towers`` in its way.
"""

import gc
import pathlib
import sys

gc.disable()  # [Note: no garbage while loading] of towers/launching/fork_server.py

_here = pathlib.Path(__file__).resolve().parent
if sys.path and pathlib.Path(sys.path[0]).resolve() == _here:
    sys.path.pop(0)  # this folder's modules are the package's only
if str(_here.parent) not in sys.path:
    sys.path.append(str(_here.parent))

from towers.launching.agent import main  # noqa: E402

main(sys.argv[1:])
