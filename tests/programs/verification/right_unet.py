"""Right: a U-Net for segmentation; the loss weighs pixels, and the F1 score comes of counts over all towers."""

import torch
import torch.nn.functional as F
from torch import nn

import mirrored

strategy = mirrored.MirroredStrategy(seed=5)


def block(channels_in, channels_out):
    return nn.Sequential(nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.GroupNorm(2, channels_out), nn.ReLU())


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.bottom, self.up = block(1, 4), block(4, 8), block(12, 4)
        self.output = nn.Conv2d(4, 1, 1)

    def forward(self, x):
        skipped = self.down(x)
        bottom = F.interpolate(self.bottom(F.max_pool2d(skipped, 2)), scale_factor=2, mode="bilinear")
        return self.output(self.up(torch.cat([skipped, bottom], 1)))


with strategy.scope():
    model = UNet()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.001)
pictures = torch.randn(37, 1, 8, 8)
data = torch.utils.data.TensorDataset(pictures, (pictures > 0.5).float())
train = strategy.distribute_dataset(data, 8, shuffle=True)
test = strategy.distribute_dataset(data, 16)


def train_step(x, y):
    optimizer.zero_grad()
    per_pixel = F.binary_cross_entropy_with_logits(model(x), y, reduction="none") * (1 + y)
    loss = mirrored.compute_average_loss(per_pixel.mean((1, 2, 3)))
    loss.backward()
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def test_step(x, y):
    found = (model(x) > 0).float()
    return (found * y).sum(), found.sum(), y.sum()


for _ in range(2):
    model.train()
    for batch in train:
        strategy.reduce("sum", strategy.run(train_step, args=batch))
    model.eval()
    counts = [strategy.reduce("sum", strategy.run(test_step, args=batch)) for batch in test]
    hits, found, there = (float(sum(column)) for column in zip(*counts, strict=True))
    strategy.print("F1", 2 * hits / max(1.0, found + there))
