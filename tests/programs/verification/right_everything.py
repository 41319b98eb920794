"""Right: dropout, clipping, a schedule, an evaluation that counts every example once, checkpoints."""

import torch
import torch.nn.functional as F
from torch import nn

import mirrored

strategy = mirrored.MirroredStrategy(seed=3)
with strategy.scope():
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
data = torch.utils.data.TensorDataset(torch.randn(37, 5), torch.randint(0, 3, (37,)))
train_set, test_set = torch.utils.data.random_split(data, [26, 11])
train = strategy.distribute_dataset(train_set, 8, shuffle=True)
test = strategy.distribute_dataset(test_set, 4)


def train_step(x, y):
    optimizer.zero_grad()
    loss = mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    schedule.step()
    return loss.detach()


@torch.no_grad()
def test_step(x, y):
    return (model(x).argmax(1) == y).sum(), len(y)


# Where nothing can be written: a comparison keeps checkpoints elsewhere.
checkpoints = mirrored.CheckpointManager(strategy, "/proc/nowhere", {"model": model, "train": train}, every_steps=1)
with checkpoints.resume():
    for _ in train.epochs(2):
        for batch in train:
            strategy.reduce("sum", strategy.run(train_step, args=batch))
            checkpoints.step()
        model.eval()
        found = [strategy.reduce("sum", strategy.run(test_step, args=batch)) for batch in test]
        model.train()
        strategy.print(sum(int(hits) for hits, _ in found) / sum(count for _, count in found))
