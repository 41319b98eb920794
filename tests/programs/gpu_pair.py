"""One of two NCCL ranks on one GPU: function only, never speed. Prints JSON."""

import json
import os

import torch
import torch.nn.functional as F
from torch import nn

import mirrored

strategy = mirrored.MirroredStrategy(seed=0)
found: dict[str, object] = {"backend": strategy.communicator.backend, "towers": strategy.num_replicas_in_sync}

generator = torch.Generator().manual_seed(1)
inputs, labels = torch.randn(66, 5, generator=generator), torch.randint(0, 3, (66,), generator=generator)


def train(strategy: mirrored.Strategy, compiled: bool = False, autocast: bool = False) -> list[float]:
    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 3))
        unused = nn.Linear(3, 3)
    called = torch.compile(model) if compiled else model
    optimizer = torch.optim.SGD([*model.parameters(), *unused.parameters()], lr=0.1, momentum=0.9)
    data = strategy.distribute_dataset(torch.utils.data.TensorDataset(inputs, labels), 32, shuffle=True)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        assert x.device == y.device == strategy.device
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            logits = called(x)
        if strategy.topology.is_chief and strategy.num_replicas_in_sync > 1:
            logits = logits + 0 * unused(logits.float())  # a parameter that one tower alone uses
        mirrored.compute_average_loss(F.cross_entropy(logits.float(), y, reduction="none")).backward()
        optimizer.step()

    for _ in range(3):
        for batch in data:
            strategy.run(step, args=batch)
    return [float(p.detach().double().sum()) for p in model.parameters()]


found["trained"] = train(strategy)
found["compiled"] = train(strategy, compiled=True)
found["sharded"] = train(mirrored.MirroredStrategy(seed=0, shard_optimizer=True))
found["autocast"] = train(strategy, autocast=True)
if "ALONE" in os.environ:
    found["single"] = train(mirrored.OneDeviceStrategy("cuda:0", seed=0))
print(json.dumps(found), flush=True)
