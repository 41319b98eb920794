"""Data parallelism by hand: scikit-learn's digits by the package ``towers`` alone, without ``mirrored``.

The first programs for several GPUs were written so: every device holds a copy of the model, a *tower*, and computes the
gradients of its part of the batch. They are averaged, variable by variable, and every tower takes the same optimizer
step. What ``mirrored`` adds to these lines: gradients in buckets, averaged beside the backward; data, evaluation and
checkpoints for all towers; checks that nothing drifts apart.

    python examples/towers_digits.py                           every GPU of the machine, else two CPU towers
    python examples/towers_digits.py --devices cpu:0,cpu:1,cpu:2

It compares the towers at the end, to the bit, and writes the loss and two towers' filters to --output. Ended at any
time, it resumes from the last epoch there.
"""

from __future__ import annotations

import argparse
import os
import pathlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import towers
import towers.backend  # collectives of CPU towers through shared memory, for torch.distributed

State = dict[str, Tensor]


def load_digits() -> tuple[Tensor, Tensor]:
    """1,797 images from 0 to 1, shape (1797, 1, 8, 8), and their labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def train(devices: list[str], epochs: int, batch_size: int, saved: pathlib.Path) -> tuple[State, list[float], float]:
    """What each tower runs, in a process of its own; its parameters, the losses of all epochs and the accuracy."""
    # Who am I? launch has told this process its number, and the address where all towers meet.
    tower, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(devices[tower])
    if device.type == "cpu":
        backend = "towers_shm"
        torch.set_num_threads(max(1, torch.get_num_threads() // count))  # CPU towers share the processor
    else:
        backend = dist.get_default_backend_for_device(device)  # NCCL, between NVIDIA's GPUs
        torch.accelerator.set_device_index(device)
    dist.init_process_group(backend)

    # Every tower has its copy of the model, and all copies begin alike: as tower 0's.
    torch.manual_seed(0)
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses: list[float] = []
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    if saved.exists():  # all towers load what tower 0 has saved
        state = torch.load(saved, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        losses = state["losses"]

    images, labels = (tensor.to(device) for tensor in load_digits())
    held_out = torch.arange(len(labels), device=device) % 5 == 0
    train_images, train_labels = images[~held_out], labels[~held_out]
    for epoch in range(len(losses), epochs):
        # The order is drawn from the epoch's number, so it is the same on all towers.
        order = torch.randperm(len(train_labels), generator=torch.Generator().manual_seed(epoch))
        total = torch.zeros((), device=device)
        for batch in order.split(batch_size):
            # 1. A tower takes its share of the batch. The last batch is smaller, and shares may differ by one digit.
            share = batch.tensor_split(count)[tower].to(device)
            # 2. It computes the loss. The mean over towers has to be the mean over the digits of the batch: so the sum
            #    over the share is divided by the batch's size, and not by the share's, and multiplied by the towers.
            logits = model(train_images[share])
            loss = F.cross_entropy(logits, train_labels[share], reduction="sum") * count / len(batch)
            # 3. It computes the gradients, of its own share only.
            optimizer.zero_grad()
            loss.backward()
            # 4. For each variable, all towers wait here for each other, and each gets the average of the gradients.
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
            # 5. Copies that were the same take the same step with the same gradients: they remain the same.
            optimizer.step()
            total += loss.detach() * len(batch) / len(train_labels)
        dist.all_reduce(total, dist.ReduceOp.AVG)
        losses.append(total.item())
        if tower == 0:  # written under another name first: what is there is complete
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
            torch.save(state, saved.with_suffix(".new"))
            os.replace(saved.with_suffix(".new"), saved)

    # Each tower looks at its share of the test digits; how many are right is added up.
    share = held_out.nonzero().flatten().tensor_split(count)[tower]
    with torch.no_grad():
        right = (model(images[share]).argmax(1) == labels[share]).sum()
    dist.all_reduce(right)
    dist.destroy_process_group()
    accuracy = right.item() / held_out.sum().item()
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}, losses, accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=lambda text: text.split(","), help="one per tower, such as cpu:0,cpu:1")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="of all towers together")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("results/towers_digits"))
    arguments = parser.parse_args()
    kind = torch.accelerator.current_accelerator(check_available=True)
    gpus = [f"{kind}:{number}" for number in range(torch.accelerator.device_count())] if kind else []
    devices = arguments.devices or gpus or ["cpu:0", "cpu:1"]
    arguments.output.mkdir(parents=True, exist_ok=True)

    # Here, a process for each tower calls train; if one fails, all end, and its error is raised here.
    saved = (arguments.output / "state.pt").resolve()
    results = towers.launch(train, (devices, arguments.epochs, arguments.batch_size, saved), devices=devices)

    states, (_, losses, accuracy) = [state for state, _, _ in results], results[0]
    for tower, state in enumerate(states):
        for name, tensor in state.items():
            if not torch.equal(tensor.view(torch.int32), states[0][name].view(torch.int32)):
                raise SystemExit(f"{name} is not the same on tower {tower} as on tower 0")
    save_picture(arguments.output / "towers_digits.png", losses, [states[0], states[-1]])
    print(f"final loss {losses[-1]:.6f}, test accuracy {accuracy:.2%}; towers with the same bits: {len(states)}")


def save_picture(path: pathlib.Path, losses: list[float], states: list[State]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, places = plt.subplot_mosaic([["left", "first"], ["left", "last"]], figsize=(10, 5), layout="constrained")
    left = places["left"]
    left.plot(range(1, len(losses) + 1), losses, marker="o", markersize=3)
    left.set(xlabel="epoch", ylabel="cross-entropy", yscale="log", title="training loss")
    for state, name in zip(states, ("first", "last"), strict=True):
        axes = places[name]
        filters = F.pad(state["0.weight"], (1, 1, 1, 1), value=float("nan"))  # (32, 1, 5, 5)
        sheet = filters.view(4, 8, 5, 5).permute(0, 2, 1, 3).reshape(20, 40)
        axes.imshow(sheet.numpy(), cmap="coolwarm", vmin=-1, vmax=1)
        axes.set(title=f"first layer's filters on the {name} tower")
        axes.set_axis_off()
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
