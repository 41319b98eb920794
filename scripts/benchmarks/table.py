"""A step on a large table with sparse Adam: central storage against MirroredStrategy, where every tower has a table.

Each tower looks up bags of eight rows; which rows are used is as uneven as words are (Zipf). "MB of the table" is what
the towers hold of table and state together: their proportional set size, less that of a step with a small table.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import command
import memory
import numpy as np
import steps
import torch
from plain import Step
from torch import nn

import mirrored

KINDS: dict[str, type[mirrored.MirroredStrategy]] = {
    "mirrored": mirrored.MirroredStrategy,
    "central": mirrored.CentralStorageStrategy,
}
"""Name and strategy."""


def _step(kind: str, rows: int, share: int) -> Step:
    """A step of this tower on ``share`` examples."""
    strategy = KINDS[kind]()
    with strategy.scope():
        table = nn.EmbeddingBag(rows, 64, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=1e-3)
    words = np.random.default_rng(strategy.topology.index).zipf(1.3, (share, 8)) % rows
    bags = torch.from_numpy(words)

    def train_step() -> None:
        optimizer.zero_grad()
        mirrored.compute_average_loss(table(bags).square().sum(1), global_batch_size=share * 2).backward()
        optimizer.step()

    return lambda: strategy.run(train_step)


def _times(rows: int, share: int, turns: int, seconds: float) -> steps.Times:
    mirrored.MirroredStrategy()
    return steps.alternate({kind: _step(kind, rows, share) for kind in KINDS}, turns, seconds)


def _size(kind: str, rows: int, share: int) -> float:
    step = _step(kind, rows, share)
    for _ in range(3):
        step()
    return memory.proportional_set_size()


def main(arguments: Sequence[str]) -> None:
    parser = command.parser("table", __doc__, turns=9, seconds=0.5)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--share", type=int, default=2048, help="examples of a tower")
    options = parser.parse_args(arguments)
    devices = command.cpus(options.towers)
    steps.print_head(f"{options.rows} rows × 64, sparse Adam; medians of {options.turns} alternations")
    times = mirrored.launch(_times, (options.rows, options.share, options.turns, options.seconds), devices=devices)[0]
    steps.print_row("central storage ÷ MirroredStrategy", times["central"], times["mirrored"])
    for kind in KINDS:
        large, small = (
            statistics.fsum(mirrored.launch(_size, (kind, rows, options.share), devices=devices))
            for rows in (options.rows, 1000)
        )
        once = options.rows * 64 * 12 / 1e6
        print(f"{kind}: {(large - small) / 1e6:.0f} MB of the table and its state, which are {once:.0f} MB")
