"""Fine-tune a network: its convolutions are restored from a checkpoint and frozen, its head is trained on new classes.

A network learns the digits 0 to 4, which lie anywhere in pictures of 16×16, from many pictures. Another one is to learn
5 to 9 from a few. It takes over the convolutions, under another name, and keeps them; its head begins anew. A third one
gets the same few pictures and begins from nothing. At the end, what was frozen must have the bits that were restored.

    python examples/fine_tuning.py                           every GPU of the machine, else one CPU tower
    python examples/fine_tuning.py --devices cpu:0,cpu:1     two CPU towers

It writes both learning curves, the few pictures, and predictions to --output. It can be ended at any time, and the same
command resumes from its newest checkpoint there.
"""

from __future__ import annotations

import argparse
import pathlib
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import mirrored


def load_pictures(classes: range, examples: int | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Training and test set of five digits: pictures (n, 1, 16, 16) from 0 to 1, and labels from 0 to 4.

    Trained on are the first ``examples`` of each digit; or, where it is None, four of five, each in eight places. All
    others are the test.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    labels = torch.tensor(data.target) - classes.start
    digits = F.pad(torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, (8, 8, 8, 8))
    if examples is None:
        chosen = torch.arange(len(labels)) % 5 > 0
    else:
        chosen = (F.one_hot(labels % 10, 10).cumsum(0).gather(1, labels.unsqueeze(1) % 10) <= examples).squeeze(1)
    random = torch.Generator().manual_seed(classes.start)
    sets = []
    for mask, places in ((chosen, 8 if examples is None else 1), (~chosen, 1)):
        mask = mask & (labels >= 0) & (labels < 5)
        pictures = digits[mask].repeat(places, 1, 1, 1)
        corners = torch.randint(0, 9, (len(pictures), 2), generator=random).tolist()
        pictures = torch.stack([p[:, y : y + 16, x : x + 16] for p, (y, x) in zip(pictures, corners, strict=True)])
        sets.append(TensorDataset(pictures, labels[mask].repeat(places)))
    return sets[0], sets[1]


def make_network(convolutions: str) -> nn.Sequential:
    """Pictures (n, 1, 16, 16) to logits (n, 5): convolutions, which get this name, and a head."""
    layers: list[nn.Module] = []
    for inner, outer in ((1, 16), (16, 32)):
        convolution = nn.Conv2d(inner, outer, 3, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(outer), nn.ReLU(), nn.MaxPool2d(2)]
    head = nn.Sequential(nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 5))
    return nn.Sequential(OrderedDict({convolutions: nn.Sequential(*layers), "head": head}))


def set_training(model: nn.Sequential) -> None:
    """Training mode, but not for frozen layers: there a BatchNorm would move its statistics, gradients or not."""
    for layer in model:
        layer.train(any(parameter.requires_grad for parameter in layer.parameters()))


def train(
    strategy: mirrored.MirroredStrategy,
    model: nn.Sequential,
    train_set: TensorDataset,
    test_set: TensorDataset,
    epochs: int,
    folder: pathlib.Path,
) -> list[float]:
    """Train what is not frozen, from the newest checkpoint in ``folder`` on, and save the end there as "end".

    Returns the test set's accuracy after each epoch.
    """
    train = strategy.distribute_dataset(train_set, 64, shuffle=True)
    test = strategy.distribute_dataset(test_set, 512)
    optimizer = torch.optim.Adam([parameter for parameter in model.parameters() if parameter.requires_grad], 1e-3)

    def train_step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        loss = mirrored.compute_average_loss(F.cross_entropy(model(images), labels, reduction="none"))
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def test_step(images: Tensor, labels: Tensor) -> Tensor:
        return (model(images).argmax(1) == labels).sum()

    def evaluate() -> float:
        model.eval()
        correct = sum(int(strategy.reduce("sum", strategy.run(test_step, args=batch))) for batch in test)
        set_training(model)
        return correct / len(test_set)

    history: list[float] = []
    objects = {"model": model, "optimizer": optimizer, "train": train, "history": history}
    checkpoints = mirrored.CheckpointManager(strategy, folder, objects, every_steps=50)
    set_training(model)
    with checkpoints.resume():
        for _ in train.epochs(epochs):
            for batch in train:
                strategy.run(train_step, args=batch)
                checkpoints.step()
            history.append(evaluate())
    checkpoints.save("end", wait=True)
    return history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=lambda text: text.split(","), help="one per tower, such as cpu:0,cpu:1")
    parser.add_argument("--pretraining", type=int, default=5, help="epochs with the many pictures of 0 to 4")
    parser.add_argument("--epochs", type=int, default=50, help="with the few pictures of 5 to 9")
    parser.add_argument("--examples", type=int, default=10, help="pictures of each of the digits 5 to 9")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("results/fine_tuning"))
    arguments = parser.parse_args()
    strategy = mirrored.MirroredStrategy(arguments.devices, seed=0)

    with strategy.scope(sync_batch_norm=True):
        pretrained = make_network("convolutions")
    folder = arguments.output / "pretrained"
    accuracy = train(strategy, pretrained, *load_pictures(range(5)), arguments.pretraining, folder)[-1]
    strategy.print(f"0 to 4: {accuracy:.2%} of held-out pictures are right")

    with strategy.scope(sync_batch_norm=True):
        model, scratch = make_network("frozen"), make_network("convolutions")
    report = mirrored.load_weights(
        model,
        folder / "end",
        rename={"convolutions.": "frozen."},
        exclude="head.*",  # would fit, but knows other digits
    )
    strategy.print(report)
    model.get_submodule("frozen").requires_grad_(False)
    restored = {name: value.clone() for name, value in model.state_dict().items()}

    few, test_set = load_pictures(range(5, 10), arguments.examples)
    curves = {
        "fine-tuned": train(strategy, model, few, test_set, arguments.epochs, arguments.output / "fine_tuned"),
        "from scratch": train(strategy, scratch, few, test_set, arguments.epochs, arguments.output / "scratch"),
    }
    same = [name for name, value in model.state_dict().items() if torch.equal(value, restored[name])]
    frozen = [name for name in restored if name.startswith("frozen.")]
    if same != frozen:
        raise SystemExit(f"frozen are {frozen}, but what has the bits that were restored are {same}")

    if strategy.is_chief:
        save_picture(arguments.output / "fine_tuning.png", curves, few, test_set, model)
    strategy.print(f"the {len(frozen)} frozen tensors have the bits that were restored; all others were trained")
    results = ", ".join(f"{name} {history[-1]:.2%}" for name, history in curves.items())
    strategy.print(f"5 to 9, from {len(few)} pictures: {results} of {len(test_set)} held-out ones are right")


@torch.no_grad()
def save_picture(
    path: pathlib.Path, curves: dict[str, list[float]], few: TensorDataset, test_set: TensorDataset, model: nn.Module
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure = plt.figure(figsize=(12, 4), layout="constrained")
    left, middle, right = figure.subfigures(1, 3, width_ratios=[4, 4, 3])
    axes = left.subplots()
    for name, history in curves.items():
        axes.plot(range(1, len(history) + 1), [100 * accuracy for accuracy in history], label=name)
    axes.set(xlabel="epoch", ylabel="accuracy, %", title=f"{len(test_set)} held-out pictures of 5 to 9")
    axes.legend(loc="lower right")

    pictures, labels = few.tensors
    rows = F.pad(pictures[labels.argsort(stable=True), 0], (0, 1, 0, 1), value=1).unflatten(0, (5, -1))
    axes = middle.subplots()
    axes.imshow(rows.transpose(1, 2).flatten(0, 1).flatten(1), cmap="gray_r")
    axes.set(xticks=[], yticks=[], title=f"all {len(few)} pictures that are trained on")

    pictures, labels = (tensor[:: len(test_set) // 20] for tensor in test_set.tensors)
    model.eval()
    guesses = model(pictures.to(next(model.parameters()).device)).argmax(1).tolist()
    for picture, label, guess, axes in zip(pictures, labels, guesses, right.subplots(4, 5).flat, strict=False):
        axes.imshow(picture[0], cmap="gray_r")
        axes.set(xticks=[], yticks=[])
        axes.set_title(guess + 5, color="black" if guess == label else "red", fontsize=9)
    right.suptitle("fine-tuned (wrong ones in red)")
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
