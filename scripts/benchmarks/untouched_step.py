"""Steps without mirrored in programs without mirrored, as a script has them that never heard of it.

In the processes of our towers DDP and the bare loop find freed memory kept (``towers/system/machine.py``), which makes
both faster than they are by themselves. This program is one tower of theirs.
"""

from __future__ import annotations

import gc
import pathlib
import sys

import models
import plain
import torch
import torch.distributed as dist
from beside import Program, serve
from torch.nn.parallel import DistributedDataParallel

KINDS = ("DDP", "bound")


def program(kind: str, case: str, optimizer: str, meeting: str, index: int, size: int) -> Program:
    """One tower of them.

    Args:
        kind: one of :data:`KINDS`.
        meeting: a file, not there yet, by which all towers find each other.
    """
    place = pathlib.Path(meeting).with_suffix(f".{kind}")
    return Program(__file__, kind, case, optimizer, place, index, size, torch.get_num_threads())


def main() -> None:
    kind, case, optimizer, meeting, *numbers = sys.argv[1:]
    index, size, threads = map(int, numbers)
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=index, world_size=size)
    model = models.make(case)
    forward = DistributedDataParallel(model, gradient_as_bucket_view=True) if kind == "DDP" else model
    x, y = models.batch(case, models.CASES[case] // size, seed=index)
    step = plain.step(forward, model.parameters(), x, y, plain.OPTIMIZERS[optimizer])
    gc.freeze()  # as in launched towers
    serve(step)


if __name__ == "__main__":
    main()
