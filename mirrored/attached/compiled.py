"""Splits the graphs of compiled models, so that gradients are averaged while the backward pass runs.

The backward of a compiled graph is one node of autograd: all its gradients arrive when it is done. The compiler splits
a graph at the boundaries of gradient buckets if a DDP module runs the model. A run of a strategy has the same effect.
``torch._dynamo.config.optimize_ddp = False`` disables it, as for DDP. Graphs are not split where gradients are averaged
after the backward pass anyway: in shared memory, and with virtual towers or local steps.
"""

from __future__ import annotations

from typing import Any

from mirrored.events import Events
from towers.system.torch_private import SMALLEST_SPLIT, GraphSplit, exchange_graph_split


def split_graphs(events: Events, bucket_bytes: int) -> None:
    """Makes the compiler split the graphs that it compiles in runs into parts of about ``bucket_bytes``."""
    split = GraphSplit(max(bucket_bytes, SMALLEST_SPLIT))
    outer: list[Any] = []  # of nested runs

    def end(*_: object) -> None:
        if outer:  # otherwise, the run was interrupted before it started
            exchange_graph_split(outer.pop())

    events.begin_run.append(lambda fn: outer.append(exchange_graph_split(split)))
    events.end_run.append(end)
    events.failed.append(end)
