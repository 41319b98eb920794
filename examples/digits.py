"""Train a small convolutional network on scikit-learn's 1,797 handwritten digits, on as many towers as there are.

The same file runs unchanged as

    python examples/digits.py                                         every GPU of the machine, else one CPU tower
    python examples/digits.py --devices cpu:0,cpu:1                   two CPU towers
    torchrun --nproc-per-node 2 examples/digits.py
    TF_CONFIG='{"cluster": …, "task": …}' python examples/digits.py    once on every worker

and writes the model, its learning curves and a sheet of test digits with predictions to --output. With --checkpoints it
can be ended at any time, and the same command resumes from there.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from tqdm import tqdm

import mirrored


class Digits(Dataset[tuple[Tensor, int]]):
    """8×8 images from 0 to 1; shifted by up to one pixel at random where ``augment`` is set."""

    def __init__(self, images: Tensor, labels: Tensor, augment: bool = False) -> None:
        self.images, self.labels, self.augment = images, labels, augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        if self.augment:
            down, right = torch.randint(0, 3, (2,)).tolist()
            image = F.pad(image, (1, 1, 1, 1))[:, down : down + 8, right : right + 8]
        return image, int(self.labels[index])


def load_digits() -> tuple[Digits, Digits]:
    """Training and test set: every fifth digit (20 %) is held out."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    held_out = torch.arange(len(labels)) % 5 == 0
    return Digits(images[~held_out], labels[~held_out], augment=True), Digits(images[held_out], labels[held_out])


class Net(nn.Sequential):
    """Two convolutions, two dense layers."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(64 * 4 * 4, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=lambda text: text.split(","), help="one per tower, such as cpu:0,cpu:1")
    parser.add_argument("--epochs", type=positive, default=20)
    parser.add_argument("--batch-size", type=positive, default=64, help="of all towers together")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="the highest of the one-cycle schedule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--restarts", type=int, default=0, help="how often all towers restart after a failure")
    parser.add_argument("--checkpoints", type=pathlib.Path, help="save here every hundred steps, and go on from here")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("results/digits"))
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    strategy = mirrored.MultiWorkerMirroredStrategy(
        devices=arguments.devices, seed=arguments.seed, restarts=arguments.restarts
    )
    train_set, test_set = load_digits()
    train = strategy.distribute_dataset(train_set, arguments.batch_size, shuffle=True)
    test = strategy.distribute_dataset(test_set, 256)

    with strategy.scope():
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, arguments.learning_rate, total_steps=arguments.epochs * len(train)
    )

    def train_step(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, int]:
        optimizer.zero_grad()
        logits = model(images)
        loss = mirrored.compute_average_loss(F.cross_entropy(logits, labels, reduction="none"))
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.detach(), (logits.argmax(1) == labels).sum(), len(labels)

    @torch.no_grad()
    def test_step(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, int]:
        logits = model(images)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return loss, (logits.argmax(1) == labels).sum(), len(labels)

    def evaluate() -> tuple[float, float]:
        """Mean loss and accuracy over the test set, every example counted once."""
        model.eval()
        results = [strategy.reduce("sum", strategy.run(test_step, args=batch)) for batch in test]
        model.train()
        loss, correct, count = (sum(column) for column in zip(*results, strict=True))
        assert count == len(test_set)
        return float(loss) / count, float(correct) / count

    history: list[tuple[float, float, float]] = []
    epoch_so_far = {"losses": 0.0, "correct": 0, "seen": 0}
    checkpoints = None
    if arguments.checkpoints is not None:
        objects = {"model": model, "optimizer": optimizer, "schedule": schedule, "train": train}
        objects |= {"history": history, "epoch so far": epoch_so_far}
        checkpoints = mirrored.CheckpointManager(strategy, arguments.checkpoints, objects, every_steps=100)
    with checkpoints.resume() if checkpoints is not None else contextlib.nullcontext():
        done = len(history) * len(train_set) + int(epoch_so_far["seen"])
        bar = tqdm(total=arguments.epochs * len(train_set), initial=done, unit="example", disable=not strategy.is_chief)
        for epoch in train.epochs(arguments.epochs):
            for images, labels in train:
                sums = strategy.reduce("sum", strategy.run(train_step, args=(images, labels)))
                for key, value in zip(epoch_so_far, sums, strict=True):
                    epoch_so_far[key] += value if key == "seen" else value.item()
                bar.update(sums[2])
                accuracy = epoch_so_far["correct"] / epoch_so_far["seen"]
                bar.set_postfix(epoch=epoch + 1, loss=f"{sums[0]:.3f}", accuracy=f"{accuracy:.1%}", refresh=False)
                if checkpoints is not None:
                    checkpoints.step()
            history.append((epoch_so_far["losses"] / len(train), *evaluate()))
            epoch_so_far.update(losses=0.0, correct=0, seen=0)
    bar.close()

    if strategy.is_chief:
        save(arguments.output, model, history, test_set)
    strategy.print(f"final loss {history[-1][0]:.9f}")
    strategy.print(f"test accuracy {history[-1][2]:.2%} on {len(test_set)} held-out digits; see {arguments.output}/")


def save(folder: pathlib.Path, model: nn.Module, history: list[tuple[float, float, float]], test_set: Digits) -> None:
    """The model as safetensors, and a PNG with the curves and a sheet of test digits with predictions."""
    import matplotlib
    from safetensors.torch import save_file

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    folder.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), folder / "model.safetensors")
    device = next(model.parameters()).device
    model.eval()
    with torch.no_grad():
        predictions = model(test_set.images[:60].to(device)).argmax(1).tolist()

    figure = plt.figure(figsize=(12, 5), layout="constrained")
    curves, sheet = figure.subfigures(1, 2)
    left = curves.subplots()
    epochs = range(1, len(history) + 1)
    left.plot(epochs, [row[0] for row in history], label="training loss")
    left.plot(epochs, [row[1] for row in history], label="test loss")
    left.set(xlabel="epoch", ylabel="cross-entropy", yscale="log", title=f"test accuracy {history[-1][2]:.2%}")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.legend(loc="center right")
    right = left.twinx()
    right.plot(epochs, [100 * row[2] for row in history], color="tab:green")
    right.set_ylabel("test accuracy, %", color="tab:green")
    for axes, image, label, guess in zip(
        sheet.subplots(6, 10).flat, test_set.images, test_set.labels.tolist(), predictions, strict=False
    ):
        axes.imshow(image[0], cmap="gray_r")
        axes.set_axis_off()
        axes.set_title(guess, color="black" if guess == label else "red", fontsize=9)
    sheet.suptitle("predictions (wrong ones in red)")
    figure.savefig(folder / "digits.png", dpi=110)


if __name__ == "__main__":
    main()
