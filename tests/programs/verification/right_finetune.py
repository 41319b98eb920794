"""Right: the fine-tuning of AlexNet: early layers restored and frozen, later ones new, with dropout and momentum."""

import torch
import torch.nn.functional as F
from torch import nn

import mirrored


def make_features():
    return nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Flatten())


def make_classifier():
    return nn.Sequential(nn.Dropout(0.5), nn.Linear(200, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2))


strategy = mirrored.MirroredStrategy(seed=0)
trained = make_features().state_dict()
with strategy.scope():
    model = nn.Sequential(make_features(), make_classifier())
    model[0].load_state_dict(trained)
    for parameter in model[0][:2].parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
pictures = torch.utils.data.TensorDataset(torch.randn(45, 3, 16, 16), torch.randint(0, 2, (45,)))
train_set, test_set = torch.utils.data.random_split(pictures, [34, 11])
train = strategy.distribute_dataset(torch.utils.data.DataLoader(train_set, 8, shuffle=True))
test = strategy.distribute_dataset(test_set, 4)


def train_step(x, y):
    optimizer.zero_grad()
    loss = mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"))
    loss.backward()
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def test_step(x, y):
    return (model(x).argmax(1) == y).sum(), len(y)


for _ in range(3):
    model.train()
    for batch in train:
        strategy.reduce("sum", strategy.run(train_step, args=batch))
    model.eval()
    found = [strategy.reduce("sum", strategy.run(test_step, args=batch)) for batch in test]
    strategy.print(sum(int(hits) for hits, _ in found) / sum(count for _, count in found))
