"""Train a small ResNet on colour images of 32×32, as in CIFAR-10, with BatchNorm, random crops and flips.

The images are cut from three photographs that come with scikit-learn and matplotlib, and the classes are what is in
their middle: sky, roof, petals, a face, … Strips of each photograph are held out: no image of the test shares a pixel
with one that is trained on. Or the images are yours, in a folder with a subfolder for each class.

    python examples/photographs.py                           every GPU of the machine, else one CPU tower
    python examples/photographs.py --devices cpu:0,cpu:1     two CPU towers
    python examples/photographs.py --images FOLDER           with FOLDER/cat/1.png, FOLDER/dog/1.jpg, …

The learning rate goes down a staircase; a moving average of the weights is evaluated beside them. Curves and a sheet of
predictions go to --output. It can be ended at any time, and the same command resumes from its newest checkpoint there.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
from collections.abc import Iterator
from importlib.resources import files

import numpy
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset

import mirrored

CHINA, FLOWER = ("sklearn", "datasets/images/china.jpg"), ("sklearn", "datasets/images/flower.jpg")
HOPPER = ("matplotlib", "mpl-data/sample_data/grace_hopper.jpg")
PLACES = {  # of each class: the photograph, and the left, top, right and bottom of boxes in it
    "sky": (CHINA, [(0, 0, 90, 140), (330, 0, 640, 120), (330, 120, 540, 190)]),
    "lake": (CHINA, [(355, 240, 432, 310), (432, 240, 545, 275)]),
    "tree": (CHINA, [(0, 200, 40, 427), (0, 360, 290, 427), (340, 330, 560, 427), (575, 160, 640, 427)]),
    "roof": (CHINA, [(120, 75, 295, 125), (95, 165, 320, 183), (75, 253, 340, 280), (210, 360, 365, 390)]),
    "gallery": (CHINA, [(120, 135, 295, 155), (105, 195, 315, 230), (85, 295, 340, 330)]),
    "petals": (FLOWER, [(210, 120, 410, 330), (310, 395, 440, 427)]),
    "leaves": (FLOWER, [(0, 0, 150, 427), (465, 0, 640, 370)]),
    "flag": (HOPPER, [(0, 0, 140, 330)]),
    "face": (HOPPER, [(180, 150, 350, 310)]),
    "uniform": (HOPPER, [(50, 410, 190, 600), (310, 400, 490, 600)]),
}
Example = tuple[Image.Image, str, bool]  # an image, its class, and whether it is held out


def cut_photographs() -> Iterator[Example]:
    """Images every 16 pixels; of each 160 columns, 64 are held out, and no image has columns of both kinds."""
    for name, ((package, path), boxes) in PLACES.items():
        photograph = Image.open(str(files(package) / path)).convert("RGB")
        corners = itertools.product(range(0, photograph.width - 31, 16), range(0, photograph.height - 31, 16))
        for (x, y), (left, top, right, bottom) in itertools.product(corners, boxes):
            is_inside = left <= x + 16 < right and top <= y + 16 < bottom
            if is_inside and x % 160 not in (80, 144):
                yield photograph.crop((x, y, x + 32, y + 32)), name, x % 160 > 80


def read_folder(folder: pathlib.Path) -> Iterator[Example]:
    """Of each subfolder every fifth image is held out."""
    for subfolder in sorted(path for path in folder.iterdir() if path.is_dir()):
        for number, file in enumerate(sorted(subfolder.iterdir())):
            yield ImageOps.fit(Image.open(file).convert("RGB"), (32, 32)), subfolder.name, number % 5 == 0


class Images(Dataset[tuple[Tensor, int]]):
    """Images (3, 32, 32) from -1 to 1, and their classes; where ``augment`` is set, shifted and mirrored at random."""

    def __init__(self, examples: list[Example], names: list[str], augment: bool) -> None:
        self.examples, self.names, self.augment = examples, names, augment

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, name, _ = self.examples[index]
        pixels = torch.tensor(numpy.asarray(image)).permute(2, 0, 1) / 127.5 - 1
        if self.augment:
            down, right, side = torch.randint(0, 9, (3,)).tolist()  # drawn alike on any number of towers
            pixels = F.pad(pixels, (4, 4, 4, 4), mode="reflect")[:, down : down + 32, right : right + 32]
            pixels = pixels.flip(2) if side < 4 else pixels
        return pixels, self.names.index(name)


def convolution(inner: int, outer: int, size: int = 3, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inner, outer, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outer))


class Block(nn.Module):
    """Two convolutions around which there is a short cut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(convolution(inner, outer, stride=stride), nn.ReLU(), convolution(outer, outer))
        self.short_cut = convolution(inner, outer, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.short_cut(images) + self.residual(images))


def make_resnet(classes: int) -> nn.Module:
    """Images (n, 3, 32, 32) to logits (n, classes): the ResNet of 8 layers that He et al. (2015) have for CIFAR-10."""
    blocks = [Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)]
    pooled = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes)]
    return nn.Sequential(convolution(3, 16), nn.ReLU(), *blocks, *pooled)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=lambda text: text.split(","), help="one per tower, such as cpu:0,cpu:1")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--virtual-towers", type=int, help="the same bits on any number of towers that divides this")
    parser.add_argument("--images", type=pathlib.Path, help="a folder with a subfolder of images for each class")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("results/photographs"))
    arguments = parser.parse_args()
    strategy = mirrored.MirroredStrategy(arguments.devices, virtual_towers=arguments.virtual_towers, seed=0)
    examples = list(read_folder(arguments.images) if arguments.images else cut_photographs())
    names = sorted({name for _, name, _ in examples})
    train_set = Images([example for example in examples if not example[2]], names, augment=True)
    test_set = Images([example for example in examples if example[2]], names, augment=False)
    train = strategy.distribute_dataset(train_set, 64, shuffle=True)
    test = strategy.distribute_dataset(test_set, 256)

    with strategy.scope(sync_batch_norm=not arguments.virtual_towers):  # statistics of the batch, or of virtual towers
        model = make_resnet(len(names))
        optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9, nesterov=True, weight_decay=5e-4)
    stairs = torch.optim.lr_scheduler.StepLR(optimizer, max(1, arguments.epochs * len(train) * 2 // 5), gamma=0.1)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95), use_buffers=True).eval()

    def train_step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        strategy.backward(lambda x, y: F.cross_entropy(model(x), y, reduction="none"), images, labels)
        optimizer.step()
        stairs.step()
        average.update_parameters(model)

    @torch.no_grad()
    def test_step(images: Tensor, labels: Tensor) -> Tensor:
        return torch.stack([(network(images).argmax(1) == labels).sum() for network in (model, average)])

    def evaluate() -> list[float]:
        model.eval()
        correct = sum(strategy.reduce("sum", strategy.run(test_step, args=batch)) for batch in test)
        model.train()
        return [100 * int(number) / len(test_set) for number in correct]

    history: list[list[float]] = []  # of each epoch: what is right in percent, twice, and the learning rate
    objects = {"model": model, "optimizer": optimizer, "stairs": stairs, "average": average, "train": train}
    objects |= {"history": history}
    checkpoints = mirrored.CheckpointManager(strategy, arguments.output / "checkpoints", objects, every_steps=20)
    with checkpoints.resume():
        for epoch in train.epochs(arguments.epochs):
            for batch in train:
                strategy.run(train_step, args=batch)
                checkpoints.step()
            history.append([*evaluate(), stairs.get_last_lr()[0]])
            strategy.print("epoch {}: {:.1f}%, of the averaged weights {:.1f}%".format(epoch + 1, *history[-1]))

    if strategy.is_chief:
        save_picture(arguments.output / "photographs.png", history, average, test_set)
    right, averaged, _ = history[-1]
    strategy.print(f"{right:.2f}% of {len(test_set)} held-out images are right, with averaged weights {averaged:.2f}%")


@torch.no_grad()
def save_picture(path: pathlib.Path, history: list[list[float]], model: nn.Module, test_set: Images) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    left, right = plt.figure(figsize=(12, 5), layout="constrained").subfigures(1, 2, width_ratios=[2, 3])
    axes = left.subplots()
    weights, averages, rates = zip(*history, strict=True)
    epochs = range(1, len(history) + 1)
    axes.plot(epochs, weights, label="weights")
    axes.plot(epochs, averages, label="their moving average")
    axes.set(xlabel="epoch", ylabel="accuracy, %", title=f"{len(test_set)} held-out images")
    axes.legend(loc="lower right")
    stairs = axes.twinx()
    stairs.step(epochs, rates, color="gray", linestyle=":", where="mid")
    stairs.set(ylabel="learning rate (dotted)", yscale="log")
    chosen = [test_set[number * len(test_set) // 32] for number in range(32)]
    images = torch.stack([image for image, _ in chosen])
    guesses = model(images.to(next(model.parameters()).device)).argmax(1).tolist()
    for (image, label), guess, axes in zip(chosen, guesses, right.subplots(4, 8).flat, strict=True):
        axes.imshow((image.permute(1, 2, 0) + 1) / 2)
        axes.set_axis_off()
        axes.set_title(test_set.names[guess], color="black" if guess == label else "red", fontsize=9)
    right.suptitle("predictions of the averaged weights (wrong ones in red)")
    plt.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
