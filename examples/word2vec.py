"""Learn what the words of Python's sources and of its manual mean, by the words beside them, as word2vec does.

Skip-gram with negative sampling (Mikolov et al., 2013): from a word, tell those near it from words drawn at random. Of
both tables a batch uses a few rows, so their gradients are sparse, and towers exchange those rows only. The random
words are drawn as data, not in the step: then they are the same for any number of towers.

    python examples/word2vec.py                           every GPU of the machine, else one CPU tower
    python examples/word2vec.py --devices cpu:0,cpu:1     two CPU towers

It prints the nearest neighbours of some words, and writes a map of the most frequent ones to --output. It can be ended
at any time, and the same command resumes from its newest checkpoint there.
"""

from __future__ import annotations

import argparse
import builtins
import collections
import keyword
import pathlib
import pydoc_data.topics
import re
import sysconfig

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import mirrored

WIDTH, WINDOW, NEGATIVES = 64, 4, 6


def read_texts(count: int) -> list[list[str]]:
    """The words, in lower case, of ``count`` source files and of the manual's pages; names are split at underscores."""
    files = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:count]
    texts = [file.read_text(errors="replace") for file in files] + list(pydoc_data.topics.topics.values())
    return [re.findall(r"[a-z]{2,}", text.lower()) for text in texts]


def pairs_of(texts: list[list[str]], vocabulary: dict[str, int], keep: Tensor) -> Tensor:
    """Numbers of a word and of one near it, shape (pairs, 2), in an order drawn at random.

    ``keep`` has, for each word, the share of its places that count: without most of the frequent words, windows reach
    further, and rare ones are not lost among them. Rare words, which are not in the vocabulary, are left out.
    """
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for text in texts:
        numbers = torch.tensor([vocabulary[word] for word in text if word in vocabulary], dtype=torch.long)
        numbers = numbers[torch.rand(len(numbers), generator=generator) < keep[numbers]]
        for apart in range(1, min(WINDOW, len(numbers) - 1) + 1):
            near = torch.stack([numbers[:-apart], numbers[apart:]], 1)
            pairs += [near, near.flip(1)]
    joined = torch.cat(pairs)
    return joined[torch.randperm(len(joined), generator=generator)]


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """Ready-made batches of pairs, each pair with random words, which are drawn anew in every epoch."""

    def __init__(self, pairs: Tensor, size: int, chances: Tensor) -> None:
        self.batches, self.chances = pairs.split(size), chances

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        pairs = self.batches[index]
        negatives = torch.multinomial(self.chances, len(pairs) * NEGATIVES, replacement=True)
        return pairs, negatives.view(-1, NEGATIVES)


class SkipGram(nn.Module):
    """How well words go together: those of pairs, shape (n,), and those with random words, (n, NEGATIVES)."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.words, self.near = (nn.Embedding(count, WIDTH, sparse=True) for _ in range(2))
        nn.init.uniform_(self.words.weight, -0.5 / WIDTH, 0.5 / WIDTH)
        nn.init.zeros_(self.near.weight)

    def forward(self, pairs: Tensor, negatives: Tensor) -> tuple[Tensor, Tensor]:
        words = self.words(pairs[:, 0])
        others = self.near(torch.cat([pairs[:, 1:], negatives], 1))
        scores = torch.einsum("nw,nkw->nk", words, others)
        return scores[:, 0], scores[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=lambda text: text.split(","), help="one per tower, such as cpu:0,cpu:1")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8192, help="pairs of all towers together")
    parser.add_argument("--files", type=int, default=200, help="how many source files are read; every tenth is a test")
    parser.add_argument("--words", type=int, default=2000, help="how many of the most frequent ones are learned")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("results/word2vec"))
    arguments = parser.parse_args()
    strategy = mirrored.MirroredStrategy(arguments.devices, seed=0)

    texts = read_texts(arguments.files)
    training = [text for number, text in enumerate(texts) if number % 10]
    common = collections.Counter(word for text in training for word in text).most_common(arguments.words)
    vocabulary = {word: number for number, (word, _) in enumerate(common)}
    shares = F.normalize(torch.tensor([float(count) for _, count in common]), p=1, dim=0)
    keep, chances = (3e-4 / shares).sqrt(), shares**0.75
    train_pairs, test_pairs = pairs_of(training, vocabulary, keep), pairs_of(texts[::10], vocabulary, keep)
    batches = (Batches(pairs, arguments.batch_size, chances) for pairs in (train_pairs, test_pairs))
    loaders = (DataLoader(each, batch_size=None) for each in batches)
    train, test = (strategy.distribute_dataset(loader, batch_dims=(0, 0)) for loader in loaders)

    with strategy.scope():
        model = SkipGram(len(vocabulary))
        optimizer = torch.optim.SparseAdam(model.parameters(), 5e-3)

    def train_step(pairs: Tensor, negatives: Tensor) -> Tensor:
        optimizer.zero_grad()
        good, bad = model(pairs, negatives)
        loss = mirrored.compute_average_loss(-F.logsigmoid(good) - F.logsigmoid(-bad).sum(1))
        loss.backward()
        optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def test_step(pairs: Tensor, negatives: Tensor) -> Tensor:
        good, bad = model(pairs, negatives)
        return (good > bad[:, 0]).sum()

    def evaluate() -> float:
        """How often, of a word near another one and a random one, the first goes with it better; chance is 0.5."""
        right = sum(strategy.reduce("sum", strategy.run(test_step, args=batch)) for batch in test)
        return float(right) / len(test_pairs)

    history: list[float] = []
    objects = {"model": model, "optimizer": optimizer, "train": train, "test": test, "history": history}
    checkpoints = mirrored.CheckpointManager(strategy, arguments.output / "checkpoints", objects, every_steps=100)
    with checkpoints.resume():
        for epoch in train.epochs(arguments.epochs):
            losses = []
            for batch in train:
                losses.append(strategy.run(train_step, args=batch))
                checkpoints.step()
            history.append(evaluate())
            strategy.print(f"epoch {epoch + 1}: the word that was near is told from a random one in {history[-1]:.2%}")

    if strategy.is_chief:
        table = F.normalize(model.words.weight.detach().cpu())
        for word in ("list", "open", "read", "true", "float", "thread", "class", "error", "path", "day"):
            if word in vocabulary:
                nearest = (table @ table[vocabulary[word]]).topk(7).indices.tolist()[1:]
                print(f"{word:>8}: {', '.join(common[number][0] for number in nearest)}")
        save_map(arguments.output / "word2vec.png", [word for word, _ in common[:600]], table)
    strategy.print(f"{len(train_pairs)} pairs learned; of {len(test_pairs)} held-out pairs {history[-1]:.3%} right")


def save_map(path: pathlib.Path, words: list[str], table: Tensor) -> None:
    """The words at their first two principal components, those that are more frequent first, where there is room."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = table[: len(words)] - table[: len(words)].mean(0)
    places = (rows @ torch.linalg.svd(rows, full_matrices=False).Vh[:2].T).tolist()
    keywords, known = {word.lower() for word in keyword.kwlist}, {word.lower() for word in dir(builtins)}
    figure, axes = plt.subplots(figsize=(11, 9), layout="constrained")
    axes.scatter(*zip(*places, strict=True), s=3, color="lightgray")
    axes.set(xticks=[], yticks=[], title="first two principal components; red: keywords, blue: built-in names")
    figure.draw_without_rendering()  # now places on the page are known
    taken = []
    for word, place in zip(words, places, strict=True):
        color = "tab:red" if word in keywords else "tab:blue" if word in known else "black"
        label = axes.annotate(word, place, ha="center", va="center", fontsize=8, color=color)
        box = label.get_window_extent().padded(1)
        if box.count_overlaps(taken):
            label.remove()
        else:
            taken.append(box)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
