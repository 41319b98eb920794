"""Started by the tests: processes that end in every way while their groups cannot be destroyed.

    shutdowns.py FOLDER STATEMENT …

Forks, to load torch once; each process ends after its STATEMENT. Prints their exit codes; FOLDER/0.out and 0.err hold
what the first one says.
"""

import atexit
import os
import sys
import threading
import time

import torch

from towers.collectives import process_group
from towers.collectives.communicator import Alone

folder, *statements = sys.argv[1:]
children = []
for number, statement in enumerate(statements):  # noqa: B007 the children use it
    children.append(os.fork())
    if children[-1] == 0:
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{number}.{name}", os.O_CREAT | os.O_WRONLY), stream)
        break
else:
    print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children), flush=True)
    os._exit(0)


class Group:
    def __del__(self) -> None:  # as NCCL's destructors, which wait for the others, too
        time.sleep(1000)


def starts_no_threads(self: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


group = Group()
process_group.leave_process_group = lambda: time.sleep(1000)
process_group.open_communicators.add(communicator := Alone(torch.device("cpu")))
process_group._LEAVING_SECONDS = 0.3
process_group.leave_at_exit(may_hang=True)
atexit.register(setattr, threading.Thread, "start", starts_no_threads)
print("last words")
exec(statement)
