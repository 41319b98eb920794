"""Learn which word follows in Python's own standard library, with a table of n-grams in central storage.

The table has a row for each hash of the last one, two, three and four words: with --rows 100000000 it has 13 GB, and
sparse Adam's state 26 GB more, which few GPUs have beside a model. CentralStorageStrategy keeps them once, in the
memory of the host, however many towers there are; of a batch only the rows that it uses go to a device.

    python examples/ngrams.py                              every GPU of the machine, else one CPU tower
    python examples/ngrams.py --devices cpu:0,cpu:1        two CPU towers
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import re
import sysconfig

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import mirrored

WIDTH, LONGEST = 32, 4


def read_words(files: list[pathlib.Path]) -> list[list[str]]:
    """Names, numbers and signs of each source file."""
    return [re.findall(r"\w+|[^\w\s]", file.read_text(errors="replace")) for file in files]


def examples(texts: list[list[str]], vocabulary: dict[str, int], rows: int) -> TensorDataset:
    """For each word of the texts: rows of the n-grams before it, shape (4,), and its number; 0 is any rare word."""
    grams, words = [], []
    for text in texts:
        numbers = np.array([vocabulary.get(word, 0) for word in text], dtype=np.uint64)
        count = max(0, len(numbers) - LONGEST)
        hashed, columns = np.zeros(count, dtype=np.uint64), []
        for back in range(1, LONGEST + 1):
            word = numbers[LONGEST - back : LONGEST - back + count]
            hashed = (hashed + word + np.uint64(back)) * np.uint64(0x9E3779B97F4A7C15)
            columns.append((hashed >> np.uint64(20)) % np.uint64(rows))
        grams.append(np.stack(columns, 1).astype(np.int64))
        words.append(numbers[LONGEST:].astype(np.int64))
    return TensorDataset(torch.from_numpy(np.concatenate(grams)), torch.from_numpy(np.concatenate(words)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=lambda text: text.split(","), help="one per tower, such as cpu:0,cpu:1")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=1024, help="of all towers together")
    parser.add_argument("--rows", type=int, default=2**20, help="of the table")
    parser.add_argument("--files", type=int, default=120, help="how many source files are read; every tenth is a test")
    arguments = parser.parse_args()
    strategy = mirrored.CentralStorageStrategy(arguments.devices, seed=0)

    texts = read_words(sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[: arguments.files])
    training_texts = [text for number, text in enumerate(texts) if number % 10]
    common = collections.Counter(word for text in training_texts for word in text).most_common(1000)
    vocabulary = {word: number for number, (word, _) in enumerate(common, start=1)}
    train_set = examples(training_texts, vocabulary, arguments.rows)
    test_set = examples(texts[::10], vocabulary, arguments.rows)
    train = strategy.distribute_dataset(train_set, arguments.batch_size, shuffle=True)
    test = strategy.distribute_dataset(test_set, 4096)

    with strategy.scope():
        table = nn.EmbeddingBag(arguments.rows, WIDTH, sparse=True, mode="sum")  # stays on the host
        nn.init.zeros_(table.weight)  # an n-gram that is new says nothing
        head = nn.Linear(WIDTH, len(vocabulary) + 1)  # is on the tower's device
        optimizers = [torch.optim.SparseAdam(table.parameters(), 3e-3), torch.optim.Adam(head.parameters(), 3e-3)]

    def train_step(grams: Tensor, words: Tensor) -> Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = mirrored.compute_average_loss(F.cross_entropy(head(table(grams)), words, reduction="none"))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def test_step(grams: Tensor, words: Tensor) -> Tensor:
        return (head(table(grams)).argmax(1) == words).sum()

    for epoch in train.epochs(arguments.epochs):
        losses = [strategy.run(train_step, args=batch) for batch in train]
        loss = strategy.reduce("sum", torch.stack(losses).mean())
        correct = sum(int(strategy.reduce("sum", strategy.run(test_step, args=batch))) for batch in test)
        strategy.print(
            f"epoch {epoch + 1}: loss {float(loss):.3f}, the next word is right in {correct / len(test_set):.1%} of "
            f"{len(test_set)} held-out places"
        )
    strategy.print(f"the table of {table.weight.nbytes / 1e6:.0f} MB is on {table.weight.device}, once for all towers")


if __name__ == "__main__":
    main()
