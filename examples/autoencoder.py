"""Train a convolutional autoencoder that removes noise, on patches of scikit-learn's two photographs.

The dataset draws the patches and their noise. Random numbers of a dataset belong to (seed, epoch, index), so an example
has the same noise on any number of towers. Noise that the training step draws would be another on every tower.

    python examples/autoencoder.py                           every GPU of the machine, else one CPU tower
    python examples/autoencoder.py --devices cpu:0,cpu:1     two CPU towers

It writes learning curves and reconstructions of held-out patches to --output. It can be ended at any time, and the same
command resumes from its newest checkpoint there.
"""

from __future__ import annotations

import argparse
import math
import pathlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

import mirrored

SIDE, NOISE = 48, 0.15
"""Of a patch, in pixels; and the standard deviation of the noise, where black is 0 and white is 1."""


def load_photographs() -> Tensor:
    """A temple and a flower, from 0 to 1: shape (2, 3, 427, 640)."""
    from sklearn.datasets import load_sample_images

    images = [torch.from_numpy(image.copy()) for image in load_sample_images().images]
    return torch.stack(images).permute(0, 3, 1, 2) / 255


class Patches(Dataset[tuple[Tensor, Tensor]]):
    """Patches with noise and without, (3, SIDE, SIDE) both, from random places of images (3, height, width)."""

    def __init__(self, images: Sequence[Tensor], length: int) -> None:
        self.images, self.length = images, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index % len(self.images)]
        top, left = (int(torch.randint(size - SIDE + 1, ())) for size in image.shape[1:])
        patch = image[:, top : top + SIDE, left : left + SIDE]
        return patch + NOISE * torch.randn(patch.shape), patch


class Autoencoder(nn.Sequential):
    """Images (n, 3, height, width) to half as many numbers, and back; height and width are multiples of 4."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 48, 4, stride=2, padding=1),
            nn.LeakyReLU(0.1),
            nn.Conv2d(48, 96, 4, stride=2, padding=1),
            nn.LeakyReLU(0.1),
            nn.Conv2d(96, 24, 3, padding=1),  # (n, 24, height / 4, width / 4)
            nn.Conv2d(24, 96, 3, padding=1),
            nn.LeakyReLU(0.1),
            nn.ConvTranspose2d(96, 48, 4, stride=2, padding=1),
            nn.LeakyReLU(0.1),
            nn.ConvTranspose2d(48, 3, 4, stride=2, padding=1),
        )

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images - 0.5) + 0.5  # grey is zero


def decibels(squared_error: float) -> float:
    """The peak signal-to-noise ratio of patches with this mean squared error: 10 dB more is a tenth of the error."""
    return -10 * math.log10(squared_error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=lambda text: text.split(","), help="one per tower, such as cpu:0,cpu:1")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=16, help="of all towers together")
    parser.add_argument("--patches", type=int, default=2000, help="of an epoch, which are others in each")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("results/autoencoder"))
    arguments = parser.parse_args()
    strategy = mirrored.MirroredStrategy(arguments.devices, seed=0)

    photographs = load_photographs()
    train_set = Patches([*photographs[..., :240], *photographs[..., 320:]], arguments.patches)
    train = strategy.distribute_dataset(train_set, arguments.batch_size, shuffle=True)
    held_out = Patches(list(photographs[..., 240:320]), 250)  # half of the temple's front, and of the flower
    # Drawn once, for all epochs. Outside of run all towers draw the same.
    test_set = TensorDataset(*default_collate([held_out[index] for index in range(len(held_out))]))
    test = strategy.distribute_dataset(test_set, arguments.batch_size)

    with strategy.scope():
        model = Autoencoder()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=arguments.epochs * len(train))

    def train_step(noisy: Tensor, patches: Tensor) -> Tensor:
        optimizer.zero_grad()
        errors = (model(noisy) - patches).square().mean((1, 2, 3))  # of each example
        loss = mirrored.compute_average_loss(errors)
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.detach()

    @torch.no_grad()
    def test_step(noisy: Tensor, patches: Tensor) -> Tensor:
        return (model(noisy) - patches).square().mean((1, 2, 3)).sum()

    def evaluate() -> float:
        """The signal-to-noise ratio of held-out reconstructions, in decibels."""
        errors = [strategy.reduce("sum", strategy.run(test_step, args=batch)) for batch in test]
        return decibels(float(sum(errors)) / len(test_set))

    losses: list[float] = []  # of the steps
    history: list[tuple[int, float]] = []  # steps, and decibels
    objects = {"model": model, "optimizer": optimizer, "schedule": schedule, "train": train}
    checkpoints = mirrored.CheckpointManager(
        strategy, arguments.output / "checkpoints", {**objects, "losses": losses, "history": history}, every_steps=100
    )
    with checkpoints.resume():
        for epoch in train.epochs(arguments.epochs):
            for batch in train:
                losses.append(float(strategy.reduce("sum", strategy.run(train_step, args=batch))))
                checkpoints.step()
            history.append((len(losses), evaluate()))
            strategy.print(f"epoch {epoch + 1}: {history[-1][1]:.2f} dB")

    before = decibels(float((test_set.tensors[0] - test_set.tensors[1]).square().mean()))
    if strategy.is_chief:
        save_picture(arguments.output / "autoencoder.png", model, test_set, losses, history, before)
    strategy.print(f"noise of {before:.2f} dB becomes {history[-1][1]:.3f} dB in {len(test_set)} held-out patches")


@torch.no_grad()
def save_picture(
    path: pathlib.Path,
    model: nn.Module,
    test_set: TensorDataset,
    losses: list[float],
    history: list[tuple[int, float]],
    before: float,
) -> None:
    """A PNG with learning curves, and rows of held-out patches, with noise, and as they come out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    noisy, patches = (tensor[:6] for tensor in test_set.tensors)
    rows = patches, noisy, model(noisy.to(next(model.parameters()).device)).cpu()
    sheet = torch.stack(rows).clamp(0, 1).permute(0, 3, 1, 4, 2).reshape(3 * SIDE, 6 * SIDE, 3)

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), width_ratios=(2, 4), layout="constrained")
    left.plot([decibels(loss) for loss in losses], color="lightgray", label="training, each step")
    left.plot(*zip(*history, strict=True), label="held out")
    left.axhline(before, color="tab:red", linestyle="--", label="the noise")
    left.set(xlabel="step", ylabel="signal to noise, dB")
    left.legend(loc="lower right")
    right.imshow(sheet, interpolation="nearest")
    right.set_xticks([])
    right.set_yticks([SIDE * (row + 0.5) for row in range(3)], ["held out", "with noise", "reconstruction"])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
