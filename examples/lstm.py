"""Train an LSTM to write Python, piece by piece, on Python's own standard library, by truncated backpropagation.

The files are one long text of words and signs, where all rare words are the same piece. It is cut into columns that are
read side by side, 32 pieces in each step. The hidden state is carried from step to step, but gradients end where a step
begins. Ready-made batches are cut in their order, so each tower keeps its columns, and their state. Gradients are
clipped, and the learning rate goes down by a staircase.

    python examples/lstm.py                           every GPU of the machine, else one CPU tower
    python examples/lstm.py --devices cpu:0,cpu:1     two CPU towers

It writes learning curves, and code that the model has made up, to --output. It can be ended at any time, and the same
command resumes from its newest checkpoint there, on any number of towers.
"""

from __future__ import annotations

import argparse
import collections
import math
import pathlib
import re
import sysconfig

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import mirrored

WIDTH, STEPS, VOCABULARY = 256, 32, 2000
State = tuple[Tensor, Tensor]
"""Of the LSTM: two tensors of shape (1, columns, WIDTH)."""


def read_pieces(file: pathlib.Path) -> list[str]:
    """Words and signs, each with the space before it, and line breaks with the indentation that follows."""
    return re.findall(r"\n *| ?\w+| ?[^\w\s]|\s", file.read_text(errors="replace").encode("ascii", "replace").decode())


def cut(texts: list[list[str]], numbers: dict[str, int], columns: int) -> list[Tensor]:
    """Neighbouring chunks of shape (columns, STEPS + 1): the last piece of one is the first of the next."""
    text = torch.tensor([numbers.get(piece, 0) for text in texts for piece in text])  # 0: a rare one
    length = len(text) // columns
    text = text[: columns * length].view(columns, length)
    return [text[:, begin : begin + STEPS + 1] for begin in range(0, length - STEPS, STEPS)]


class LSTM(nn.Module):
    """Pieces (columns, steps) to logits of the next ones, (columns, steps, VOCABULARY), and the state after them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        nn.init.normal_(self.embed.weight, std=0.1)

    def forward(self, pieces: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        output, (hidden, cell) = self.lstm(self.embed(pieces), state)
        return self.head(output), (hidden.detach(), cell.detach())  # here backpropagation is truncated


class Carried:
    """The state of this tower's columns between two steps; None before the first. A checkpoint has that of all."""

    def __init__(self, strategy: mirrored.Strategy) -> None:
        self.strategy = strategy
        self.state: State | None = None

    def state_dict(self) -> dict[str, object]:
        return {"all": None if self.state is None else self.strategy.gather(torch.stack(self.state), axis=2)}

    def load_state_dict(self, saved: dict[str, Tensor | None]) -> None:
        self.state = None
        if (state := saved["all"]) is not None:
            towers, tower = self.strategy.num_replicas_in_sync, self.strategy.topology.index
            hidden, cell = state.to(self.strategy.device).tensor_split(towers, dim=2)[tower].unbind()
            self.state = hidden.contiguous(), cell.contiguous()


@torch.no_grad()
def write_code(model: nn.Module, numbers: dict[str, int], device: torch.device) -> str:
    """Code that begins with "def"; likely pieces are drawn more often than they come, and no rare ones."""
    generator = torch.Generator().manual_seed(0)
    text, state = [numbers["\n"], numbers["def"]], None
    read = text
    for _ in range(180):
        logits, state = model(torch.tensor([read], device=device), state)
        chances = (logits[0, -1, : 1 + len(numbers)].cpu() / 0.7).softmax(0)
        chances[0] = 0
        read = [int(torch.multinomial(chances, 1, generator=generator))]
        text += read
    pieces = ["", *numbers]
    return "".join(pieces[number] for number in text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=lambda text: text.split(","), help="one per tower, such as cpu:0,cpu:1")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--columns", type=int, default=32, help="of all towers together")
    parser.add_argument("--learning-rate", type=float, default=5e-3, help="it is halved with every epoch")
    parser.add_argument("--files", type=int, default=60, help="how many source files are read; every tenth is a test")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("results/lstm"))
    arguments = parser.parse_args()
    strategy = mirrored.MirroredStrategy(arguments.devices, seed=0)

    files = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[: arguments.files]
    training = [read_pieces(file) for number, file in enumerate(files) if number % 10]
    common = collections.Counter(piece for text in training for piece in text).most_common(VOCABULARY - 1)
    numbers = {piece: number for number, (piece, _) in enumerate(common, start=1)}
    train_chunks = cut(training, numbers, arguments.columns)
    test_chunks = cut([read_pieces(file) for file in files[::10]], numbers, arguments.columns)
    train = strategy.distribute_dataset(DataLoader(train_chunks, batch_size=None), batch_dims=0)
    test = strategy.distribute_dataset(DataLoader(test_chunks, batch_size=None), batch_dims=0)

    with strategy.scope():
        model = LSTM()
        optimizer = torch.optim.Adam(model.parameters(), arguments.learning_rate)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=len(train), gamma=0.5)  # a staircase

    def losses_of(chunk: Tensor, state: State | None) -> tuple[Tensor, State]:
        """The mean loss of each column's next pieces, shape (columns,), and the state after them."""
        logits, state = model(chunk[:, :-1], state)
        return F.cross_entropy(logits.transpose(1, 2), chunk[:, 1:], reduction="none").mean(1), state

    def train_step(chunk: Tensor, state: State | None) -> tuple[Tensor, State]:
        optimizer.zero_grad()
        losses, state = losses_of(chunk, state)
        loss = mirrored.compute_average_loss(losses)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # of the global gradient
        optimizer.step()
        schedule.step()
        return loss.detach(), state

    @torch.no_grad()
    def test_step(chunk: Tensor, state: State | None) -> tuple[Tensor, State]:
        losses, state = losses_of(chunk, state)
        return losses.sum(), state

    def evaluate() -> float:
        """The perplexity of the test set: among how many pieces, equally likely, the model is left to choose."""
        total, state = torch.zeros((), device=strategy.device), None
        for chunk in test:
            loss, state = strategy.run(test_step, args=(chunk, state))
            total += loss
        return math.exp(float(strategy.reduce("sum", total)) / (len(test) * arguments.columns))

    curve: list[tuple[int, float, float]] = []  # steps, perplexity of that chunk, learning rate
    history: list[tuple[int, float]] = []  # steps, perplexity of the test set
    carried = Carried(strategy)
    objects = {"model": model, "optimizer": optimizer, "schedule": schedule, "train": train, "carried": carried}
    checkpoints = mirrored.CheckpointManager(
        strategy, arguments.output / "checkpoints", {**objects, "curve": curve, "history": history}, every_steps=100
    )
    with checkpoints.resume():
        for epoch in train.epochs(arguments.epochs):
            for chunk in train:
                loss, carried.state = strategy.run(train_step, args=(chunk, carried.state))
                if len(curve) * 20 <= checkpoints.steps:
                    perplexity = math.exp(float(strategy.reduce("sum", loss)))
                    curve.append((checkpoints.steps, perplexity, schedule.get_last_lr()[0]))
                checkpoints.step()
            carried.state = None  # an epoch begins with the first chunk
            history.append((checkpoints.steps, evaluate()))
            strategy.print(f"epoch {epoch + 1}: perplexity {history[-1][1]:.2f}, learning rate {curve[-1][2]:.1e}")

    if strategy.is_chief:
        save_picture(arguments.output / "lstm.png", curve, history, write_code(model, numbers, strategy.device))
    strategy.print(f"perplexity {history[-1][1]:.3f} of {len(test) * arguments.columns * STEPS} held-out pieces")


def save_picture(path: pathlib.Path, curve: list[tuple[int, ...]], history: list[tuple[int, float]], code: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
    steps, training, rates = zip(*curve, strict=True)
    left.plot(steps, training, linewidth=0.8, label="training text")
    left.plot(*zip(*history, strict=True), marker="o", label="held-out files")
    left.set(xlabel="step", ylabel="perplexity", yscale="log", title=f"perplexity {history[-1][1]:.2f}")
    left.legend(loc="upper right")
    stairs = left.twinx()
    stairs.step(steps, rates, where="post", color="tab:gray", linestyle=":")
    stairs.set_ylabel("learning rate (dotted)", color="tab:gray")
    stairs.set_ylim(bottom=0)
    code = "\n".join(line[:64] for line in code.strip().splitlines()[:26])
    right.text(0, 1, code, family="monospace", fontsize=8, va="top", parse_math=False)
    right.set(title="made up by the model")
    right.set_axis_off()
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
