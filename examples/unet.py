"""Train a small U-Net to find handwriting: digits are written over patches of photographs, in ink of any colour.

The score is F1 over the pixels of all held-out pictures. Towers count, the counts are added up, and F1 is computed from
their sums. So the same weights have the same F1 on any number of towers, also where the last batch is incomplete.

    python examples/unet.py                           every GPU of the machine, else one CPU tower
    python examples/unet.py --devices cpu:0,cpu:1     two CPU towers

It writes F1 over the epochs, and held-out pictures with the ink that was found, to --output. It can be ended at any
time, and the same command resumes from its newest checkpoint there.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

import mirrored

SIDE = 48
"""Of a picture, in pixels. A digit has 32."""


def load_digits() -> Tensor:
    """Scikit-learn's digits as ink, from 0 for none to 1: shape (1797, 32, 32)."""
    from sklearn.datasets import load_digits

    images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16
    return F.interpolate(images, scale_factor=4, mode="bicubic").clamp(0, 1).squeeze(1)


def load_photographs() -> Tensor:
    """A temple and a flower, from 0 to 1: shape (2, 3, 427, 640)."""
    from sklearn.datasets import load_sample_images

    images = [torch.from_numpy(image.copy()) for image in load_sample_images().images]
    return torch.stack(images).permute(0, 3, 1, 2) / 255


class Writing(Dataset[tuple[Tensor, Tensor]]):
    """Pictures (3, SIDE, SIDE) of a digit that is written over a photograph, and masks (1, SIDE, SIDE) of its ink.

    The part of the photograph, the place of the digit and its colour are random: others in each epoch, and the same on
    any number of towers.
    """

    def __init__(self, digits: Tensor, images: Sequence[Tensor]) -> None:
        self.digits, self.images = digits, images

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, digit = self.images[index % len(self.images)], self.digits[index]
        top, left = (int(torch.randint(size - SIDE + 1, ())) for size in image.shape[1:])
        down, right = torch.randint(SIDE - 32 + 1, (2,)).tolist()
        ink = F.pad(digit, (right, SIDE - 32 - right, down, SIDE - 32 - down)).unsqueeze(0)
        picture = torch.lerp(image[:, top : top + SIDE, left : left + SIDE], torch.rand(3, 1, 1), ink)
        return picture, ink > 0.5


def convolutions(inputs: int, outputs: int) -> nn.Module:
    """Two of them. Group norm takes the statistics of each example by itself, so it does not matter who has which."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.GroupNorm(4, outputs), nn.LeakyReLU(0.1)
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Pictures (n, 3, side, side) to logits of ink, (n, 1, side, side), over three resolutions (Ronneberger, 2015)."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.fine, self.middle = convolutions(3, width), convolutions(width, 2 * width)
        self.coarse = convolutions(2 * width, 4 * width)
        self.to_middle = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.join_middle = convolutions(4 * width, 2 * width)
        self.to_fine = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join_fine = convolutions(2 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, pictures: Tensor) -> Tensor:
        fine = self.fine(pictures)
        middle = self.middle(F.max_pool2d(fine, 2))
        coarse = self.coarse(F.max_pool2d(middle, 2))
        middle = self.join_middle(torch.cat([self.to_middle(coarse), middle], 1))
        return self.head(self.join_fine(torch.cat([self.to_fine(middle), fine], 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=lambda text: text.split(","), help="one per tower, such as cpu:0,cpu:1")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16, help="of all towers together")
    parser.add_argument("--digits", type=int, default=1797, help="how many are used; every fifth is held out")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("results/unet"))
    arguments = parser.parse_args()
    strategy = mirrored.MirroredStrategy(arguments.devices, seed=0)

    digits, photographs = load_digits()[: arguments.digits], load_photographs()
    is_held_out = torch.arange(len(digits)) % 5 == 0
    train_set = Writing(digits[~is_held_out], [*photographs[..., :240], *photographs[..., 320:]])
    train = strategy.distribute_dataset(train_set, arguments.batch_size, shuffle=True)
    held_out = Writing(digits[is_held_out], list(photographs[..., 240:320]))
    # Drawn once, for all epochs. Outside of run all towers draw the same.
    test_set = TensorDataset(*default_collate([held_out[index] for index in range(len(held_out))]))
    test = strategy.distribute_dataset(test_set, arguments.batch_size)

    with strategy.scope():
        model = UNet()
        optimizer = torch.optim.AdamW(model.parameters(), 4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=arguments.epochs * len(train))

    def train_step(pictures: Tensor, masks: Tensor) -> Tensor:
        optimizer.zero_grad()
        costs = F.binary_cross_entropy_with_logits(model(pictures), masks.float(), reduction="none")
        loss = mirrored.compute_average_loss(costs.mean((1, 2, 3)))  # one number for each example
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.detach()

    @torch.no_grad()
    def test_step(pictures: Tensor, masks: Tensor) -> Tensor:
        """Pixels of this tower's share: true positives, false positives, false negatives."""
        found = model(pictures) > 0
        return torch.stack([(found & masks).sum(), (found & ~masks).sum(), (~found & masks).sum()])

    def evaluate() -> list[int]:
        """Pixels of all held-out pictures: true positives, false positives, false negatives."""
        return sum(strategy.reduce("sum", strategy.run(test_step, args=batch)) for batch in test).tolist()

    history: list[float] = []
    objects = {"model": model, "optimizer": optimizer, "schedule": schedule, "train": train, "history": history}
    checkpoints = mirrored.CheckpointManager(strategy, arguments.output / "checkpoints", objects, every_steps=100)
    with checkpoints.resume():
        for epoch in train.epochs(arguments.epochs):
            for batch in train:
                strategy.run(train_step, args=batch)
                checkpoints.step()
            history.append(f1(*evaluate()))
            strategy.print(f"epoch {epoch + 1}: F1 {history[-1]:.4f}")

    right, wrong, missed = evaluate()
    if strategy.is_chief:
        save_picture(arguments.output / "unet.png", model, test_set, history)
    strategy.print(
        f"F1 {f1(right, wrong, missed):.6f} on {len(test_set)} held-out pictures: "
        f"{right} pixels of ink are found, {missed} missed, and {wrong} others taken for ink"
    )


def f1(right: int, wrong: int, missed: int) -> float:
    """The harmonic mean of precision and recall.

    Counts of shares add up, but F1 of shares does not: in a mean of the towers' F1 a share with little ink would count
    as much as one with a lot, and a tower whose share is empty has none. So counts are added up first.
    """
    return 2 * right / max(1, 2 * right + wrong + missed)


@torch.no_grad()
def save_picture(path: pathlib.Path, model: nn.Module, test_set: TensorDataset, history: list[float]) -> None:
    """A PNG with F1 over the epochs, and rows of held-out pictures, masks, and the ink that was found."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    pictures, masks = (tensor[:: max(1, len(tensor) // 8)][:8] for tensor in test_set.tensors)
    found = model(pictures.to(next(model.parameters()).device)).cpu() > 0
    white, orange, blue = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.5, 0.0], [0.2, 0.5, 1.0]]).view(3, 1, 3, 1, 1)
    marked = white * (found & masks) + orange * (found & ~masks) + blue * (~found & masks)
    rows = pictures, masks.float().expand(-1, 3, -1, -1), marked
    sheet = torch.stack(rows).permute(0, 3, 1, 4, 2).reshape(3 * SIDE, len(pictures) * SIDE, 3)

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.2), width_ratios=(2, 5), layout="constrained")
    left.plot(range(1, len(history) + 1), history, marker="o")
    left.set(xlabel="epoch", ylabel="F1 of held-out pictures")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.imshow(sheet, interpolation="nearest")
    right.set_xticks([])
    right.set_yticks(
        [SIDE * (row + 0.5) for row in range(3)], ["picture", "ink", "found\n(orange: wrong,\nblue: missed)"]
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
