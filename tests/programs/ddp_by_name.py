"""Started by the tests: DDP on a backend by its name, in a program that imports nothing of ours."""

import hashlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group(sys.argv[1])
total = torch.full((3,), float(dist.get_rank() + 1))
dist.all_reduce(total)
assert total.tolist() == [3.0] * 3
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    optimizer.zero_grad()
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
    model(x).square().mean().backward()
    optimizer.step()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
assert "towers" not in sys.modules or sys.argv[1] == "towers_shm"
if dist.get_rank() == 0:
    print(digest, flush=True)
dist.barrier()
if sys.argv[1] == "gloo":
    os._exit(0)  # Gloo's threads abort every second process that ends otherwise (torch 2.14)
dist.destroy_process_group()
