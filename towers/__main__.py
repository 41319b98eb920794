"""Runs the agent of several towers: ``python …/towers …``.

It is started through this folder's path, so that another ``towers`` in the current directory or the script's directory
cannot replace it.
"""

import gc
import pathlib
import sys

gc.disable()  # [Note: no garbage while loading] of towers/launching/starting/fork_server.py

_here = pathlib.Path(__file__).resolve().parent
if sys.path and pathlib.Path(sys.path[0]).resolve() == _here:
    sys.path.pop(0)  # this folder's modules may be imported only through the package
if str(_here.parent) not in sys.path:
    sys.path.append(str(_here.parent))

from towers.launching.starting.agent import main  # noqa: E402

main(sys.argv[1:])
