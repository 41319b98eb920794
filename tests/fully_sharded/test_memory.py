"""Models that are larger than the memory of a tower."""

from __future__ import annotations

import pathlib

import pytest

from tests.support.programs import run_program
from towers.health.failure import TOO_LARGE

pytestmark = pytest.mark.extended

PROGRAM = """
import re, resource, sys
import torch
from torch import nn
import mirrored

WIDTH, LAYERS, SHARDS = 1024, 32, sys.argv[1] == "shard"
TOTAL = 16 * LAYERS * (WIDTH * WIDTH + WIDTH)  # bytes of parameters, gradients and the two moments of Adam: 537 million
strategy = mirrored.MirroredStrategy(seed=0)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))

def train(layers):
    with strategy.scope(), torch.device("meta" if SHARDS else "cpu"):
        model = nn.Sequential(*(Layer() for _ in range(layers)))
    if SHARDS:
        strategy.shard(model, [Layer])
    optimizer = torch.optim.Adam(model.parameters(), 1e-6)

    def step(x):
        optimizer.zero_grad()
        batch = 2 * strategy.num_replicas_in_sync
        loss = mirrored.compute_average_loss(model(x).square().mean(1), global_batch_size=batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return [float(strategy.reduce("sum", strategy.run(step, args=(torch.ones(2, WIDTH),)))) for _ in range(3)]

train(1)  # libraries now have their own memory and threads
used = 1024 * int(re.search(r"VmData:\\s+(\\d+) kB", open("/proc/self/status").read())[1])  # as RLIMIT_DATA counts it
resource.setrlimit(resource.RLIMIT_DATA, (used + TOTAL // 4, resource.RLIM_INFINITY))
losses = train(LAYERS)
strategy.print("trained", losses[-1] < losses[0])
"""


@pytest.fixture
def program(tmp_path: pathlib.Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def test_a_model_of_four_times_the_limit_trains_if_it_is_sharded(program: str) -> None:
    result = run_program(["-m", "mirrored", "run", "--towers", "8", program, "shard"], code=0)
    assert result.stdout == "trained True\n"


def test_the_same_model_does_not_fit_if_it_is_mirrored(program: str) -> None:
    result = run_program(["-m", "mirrored", "run", "--towers", "2", program, "mirror"], code=1)
    assert "can't allocate memory" in result.stderr or "MemoryError" in result.stderr
    assert TOO_LARGE in result.stderr
    assert "docs/advanced/fully-sharded.md" in TOO_LARGE
