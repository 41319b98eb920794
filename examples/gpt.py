"""Train a small GPT to write Python, byte by byte, on the functions of Python's own standard library.

Functions differ in length, so batches are padded, and each tower's share has another number of bytes: the loss is the
mean over the bytes of all towers (``denominator="weights"``). What a step costs, and which tower the others wait for,
is shown by a monitor.

    python examples/gpt.py                           every GPU of the machine, else one CPU tower
    python examples/gpt.py --devices cpu:0,cpu:1     two CPU towers
    … --shard                                        each tower holds a part of every layer

It writes learning curves, and a function that the model has made up, to --output. It can be ended at any time, and the
same command resumes from its newest checkpoint there.
"""

from __future__ import annotations

import argparse
import ast
import pathlib
import sysconfig

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import mirrored

WIDTH, LAYERS, LENGTH = 128, 3, 96
"""Of the model, and how many bytes of a function it reads; a text begins and ends with a zero, and so it is padded."""


def read_functions(files: list[pathlib.Path]) -> Tensor:
    """The beginnings of all functions in these files, as bytes: shape (functions, LENGTH + 1), int64."""
    rows = []
    for file in files:
        text = file.read_text(errors="replace")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                source = (ast.get_source_segment(text, node) or "").encode("ascii", "replace")[: LENGTH - 1]
                rows.append(torch.tensor([0, *source, *[0] * (LENGTH - len(source))]))
    return torch.stack(rows)


class GPT(nn.Module):
    """A decoder-only transformer: (texts, length) bytes to logits of the next ones, (texts, length, 128)."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(128, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.1, F.gelu, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, texts: Tensor) -> Tensor:
        length = texts.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=texts.device)
        places = self.places(torch.arange(length, device=texts.device))
        return self.head(self.layers(self.bytes(texts) + places, mask=mask, is_causal=True))


def losses_of(model: nn.Module, texts: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each next byte, and its weight: 1 up to the zero that ends a text, 0 for its padding."""
    following = texts[:, 1:]
    losses = F.cross_entropy(model(texts[:, :-1]).transpose(1, 2), following, reduction="none")
    return losses, ((following != 0) | (texts[:, :-1] != 0)).to(losses.dtype)


@torch.no_grad()
def write_function(model: nn.Module, device: torch.device) -> str:
    """A function that begins with "def "; the likely bytes are drawn more often than they come."""
    generator = torch.Generator().manual_seed(0)
    text = [0, *b"def "]
    while len(text) < LENGTH and text[-1] != 0:
        logits = model(torch.tensor([text], device=device))[0, -1].cpu()
        text.append(int(torch.multinomial((logits / 0.7).softmax(0), 1, generator=generator)))
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in map(chr, text[1:-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=lambda text: text.split(","), help="one per tower, such as cpu:0,cpu:1")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64, help="of all towers together")
    parser.add_argument("--files", type=int, default=60, help="how many source files are read; every tenth is a test")
    parser.add_argument("--shard", action="store_true", help="shard the model over the towers")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("results/gpt"))
    arguments = parser.parse_args()
    strategy = mirrored.MirroredStrategy(arguments.devices, seed=0)

    files = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[: arguments.files]
    train_set = TensorDataset(read_functions([file for number, file in enumerate(files) if number % 10]))
    test_set = TensorDataset(read_functions(files[::10]))
    train = strategy.distribute_dataset(train_set, arguments.batch_size, shuffle=True)
    test = strategy.distribute_dataset(test_set, arguments.batch_size)

    with strategy.scope():
        model = GPT()
    if arguments.shard:
        strategy.shard(model, units=[nn.TransformerEncoderLayer])
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)  # after shard(), which replaces the parameters
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=arguments.epochs * len(train))

    def train_step(texts: Tensor) -> Tensor:
        optimizer.zero_grad()
        losses, weights = losses_of(model, texts)
        loss = mirrored.compute_average_loss(losses, weights, denominator="weights")
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of the global gradient
        optimizer.step()
        schedule.step()
        return loss.detach()

    @torch.no_grad()
    def test_step(texts: Tensor) -> Tensor:
        losses, weights = losses_of(model, texts)
        return torch.stack([(losses * weights).sum(), weights.sum()])

    def evaluate() -> float:
        """The mean loss of the test set's bytes, in bits."""
        model.eval()
        loss, count = sum(strategy.reduce("sum", strategy.run(test_step, args=batch)) for batch in test)
        model.train()
        return float(loss / count) / 0.6931

    history: list[tuple[int, float]] = []  # steps, and bits for each byte
    monitor = mirrored.Monitor(strategy, every=20, total=arguments.epochs * len(train))
    objects = {"model": model, "optimizer": optimizer, "schedule": schedule, "train": train, "history": history}
    checkpoints = mirrored.CheckpointManager(
        strategy, arguments.output / "checkpoints", {**objects, "monitor": monitor}, every_steps=20
    )
    with checkpoints.resume(), monitor:
        for _ in train.epochs(arguments.epochs):
            for batch in train:
                monitor.step(strategy.run(train_step, args=batch))
                checkpoints.step()
            with monitor.paused():
                history.append((monitor.steps, evaluate()))

    model.eval()
    text = write_function(model, strategy.device)  # on all towers, because they hold a sharded model together
    if strategy.is_chief:
        save_picture(arguments.output / "gpt.png", history, text)
    strategy.print(f"{history[-1][1]:.3f} bits for each byte of {len(test_set)} held-out functions")


def save_picture(path: pathlib.Path, history: list[tuple[int, float]], text: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot(*zip(*history, strict=True), marker="o")
    left.set(xlabel="step", ylabel="bits for each byte", title="held-out functions")
    right.text(0, 1, text, family="monospace", va="top", wrap=True)
    right.set(title="made up by the model")
    right.set_axis_off()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
