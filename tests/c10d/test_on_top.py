"""What stands on the c10d backend: DDP, FSDP, torchmetrics and distributed checkpoints."""

from __future__ import annotations

import pathlib

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.c10d.ranks import ranks
from tests.support.jobs import ROOT, assert_close, make_data, make_mlp, parameters_of
from tests.support.programs import run_program


class WithEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(7, 5, sparse=True, dtype=torch.float32)
        self.mlp = make_mlp(torch.float32)
        self.unused = nn.Linear(2, 2)
        with torch.no_grad():
            self.rows.weight.copy_(torch.arange(35.0).view(7, 5) / 35)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.rows((x.sum(1).abs() * 10).long() % 7))


def take_steps(model: nn.Module, share: int, first: int) -> None:
    """Train on so many examples of each batch of 16, from its ``first`` one on."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, classes = make_data(dtype=torch.float32)
    for start in range(first, 64, 16):
        own = slice(start, start + share)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[own]), classes[own]).backward()
        optimizer.step()


def train() -> list[Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(WithEmbedding(), find_unused_parameters=True, bucket_cap_mb=0.0001)
    take_steps(model, 8, 8 * dist.get_rank())
    return parameters_of(model)


def test_ddp_gives_the_numbers_of_gloo() -> None:
    ours, others = ranks(train)
    gloo, _ = ranks(train, backend="gloo")
    assert_close(ours, others, 0.0)
    assert_close(ours, gloo, 1e-6)
    assert not torch.equal(ours[1], parameters_of(make_mlp(torch.float32))[0])


def metrics_and_checkpoint(folder: str) -> float:
    import torch.distributed.checkpoint as dcp  # takes a second, which only this test needs

    torchmetrics = pytest.importorskip("torchmetrics")
    rank = dist.get_rank()
    metric = torchmetrics.MeanMetric()
    metric.update(torch.arange(3.0 + rank))  # 0 1 2, 0 1 2 3
    seen = torchmetrics.CatMetric()
    seen.update(torch.full((1 + rank,), float(rank)))
    assert sorted(seen.compute().tolist()) == [0.0, 1.0, 1.0]
    state = {"weight": torch.full((4,), 3.0), "mine": {f"rank{rank}": torch.tensor([10.0 + rank])}, "step": 7}
    dcp.save(state, checkpoint_id=folder)
    found = {"weight": torch.zeros(4), "mine": {f"rank{rank}": torch.zeros(1)}, "step": 0}
    dcp.load(found, checkpoint_id=folder)
    assert found["weight"].tolist() == [3.0] * 4
    assert found["mine"][f"rank{rank}"].item() == 10 + rank
    assert found["step"] == 7
    return float(metric.compute())


def test_torchmetrics_and_checkpoints(tmp_path: pathlib.Path) -> None:
    assert ranks(metrics_and_checkpoint, str(tmp_path / "checkpoint")) == [pytest.approx(9 / 7)] * 2


def sharded() -> list[Tensor]:
    from torch.distributed.device_mesh import init_device_mesh  # these take a second, which only this test needs
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = fully_shard(make_mlp(torch.float32), mesh=mesh)
    take_steps(model, 8, 8 * dist.get_rank())
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def test_sharded_training_gives_the_numbers_of_one_process() -> None:
    ours, others = ranks(sharded)
    assert_close(ours, others, 0.0)
    model = make_mlp(torch.float32)
    take_steps(model, 16, 0)
    assert_close(ours, parameters_of(model), 1e-6)


@pytest.mark.skipif(torch.__version__ < (2, 14), reason="torch finds backends of packages since 2.14")
def test_the_backend_is_found_by_its_name() -> None:
    """In programs that never import ours; two ranks have one sum in any order, so the bits are Gloo's."""
    digests = []
    for backend in ("gloo", "towers_shm"):
        program = str(ROOT / "tests" / "programs" / "ddp_by_name.py")
        done = run_program(["-m", "torch.distributed.run", "--nproc-per-node=2", program, backend], code=0)
        digests.append(done.stdout)
    assert digests[0] == digests[1] != ""
