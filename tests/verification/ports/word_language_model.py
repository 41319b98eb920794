"""An LSTM with truncated backpropagation, in the shape of ``word_language_model`` of pytorch/examples."""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import mirrored


class RNNModel(nn.Module):
    def __init__(self, tokens: int, width: int, layers: int) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(tokens, width)
        self.rnn = nn.LSTM(width, width, layers, dropout=0.2)
        self.decoder = nn.Linear(width, tokens)
        self.layers, self.width = layers, width
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, source: Tensor, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        output, hidden = self.rnn(self.drop(self.encoder(source)), hidden)
        return self.decoder(self.drop(output)), hidden

    def init_hidden(self, columns: int) -> tuple[Tensor, Tensor]:
        weight = self.decoder.weight
        zeros = weight.new_zeros(self.layers, columns, self.width)
        return zeros, zeros.clone()


def batchify(data: Tensor, columns: int) -> Tensor:
    """The text in columns: time comes first."""
    length = len(data) // columns
    return data[: length * columns].view(columns, -1).t().contiguous()


def chunks(source: Tensor, bptt: int) -> list[tuple[Tensor, Tensor]]:
    pairs = []
    for i in range(0, len(source) - 1, bptt):
        length = min(bptt, len(source) - 1 - i)
        pairs.append((source[i : i + length], source[i + 1 : i + 1 + length]))
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description="Language model")
    parser.add_argument("--lr", type=float, default=5.0)
    parser.add_argument("--clip", type=float, default=0.25)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=7)
    parser.add_argument("--bptt", type=int, default=9)
    parser.add_argument("--log-interval", type=int, default=2)
    args = parser.parse_args()

    strategy = mirrored.MirroredStrategy(seed=1111)
    tokens = 31
    text = torch.randint(0, tokens, (430,)) * torch.randint(0, 2, (430,))
    columns = batchify(text[:300], args.batch_size)
    val_columns = batchify(text[300:], 5)
    train_chunks, val_chunks = chunks(columns, args.bptt), chunks(val_columns, args.bptt)
    train_data = strategy.distribute_dataset(DataLoader(train_chunks, batch_size=None), batch_dims=(1, 1))
    val_data = strategy.distribute_dataset(DataLoader(val_chunks, batch_size=None), batch_dims=(1, 1))
    with strategy.scope():
        model = RNNModel(tokens, width=16, layers=2)
    lr = args.lr

    def losses_of(output: Tensor, targets: Tensor) -> Tensor:
        """One loss for each column."""
        return F.cross_entropy(output.permute(1, 2, 0), targets.t(), reduction="none").mean(1)

    def train_step(data: Tensor, targets: Tensor, hidden: tuple[Tensor, Tensor] | None):
        model.zero_grad()
        if hidden is None:
            hidden = model.init_hidden(data.shape[1])
        output, hidden = model(data, tuple(state.detach() for state in hidden))
        loss = mirrored.compute_average_loss(losses_of(output, targets))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=-lr)
        return loss.detach(), hidden

    @torch.no_grad()
    def evaluate_step(data: Tensor, targets: Tensor, hidden: tuple[Tensor, Tensor] | None):
        output, hidden = model(data, model.init_hidden(data.shape[1]) if hidden is None else hidden)
        return (losses_of(output, targets) * len(data)).sum(), targets.numel(), hidden

    def evaluate() -> float:
        model.eval()
        total_loss, count, hidden = torch.zeros(()), 0, None
        for data, targets in val_data:
            loss, predicted, hidden = strategy.run(evaluate_step, args=(data, targets, hidden))
            total_loss += loss
            count += predicted
        total_loss, count = strategy.reduce("sum", (total_loss, count))
        return float(total_loss) / int(count)

    best_val_loss = math.inf
    for epoch in range(1, args.epochs + 1):
        model.train()
        total_loss, hidden = torch.zeros(()), None
        for batch, (data, targets) in enumerate(train_data, 1):
            loss, hidden = strategy.run(train_step, args=(data, targets, hidden))
            total_loss += loss
            if batch % args.log_interval == 0:
                current = float(strategy.reduce("sum", total_loss)) / args.log_interval
                ppl = math.exp(current)
                strategy.print(f"| epoch {epoch:3d} | lr {lr:02.2f} | loss {current:5.2f} | ppl {ppl:8.2f}")
                total_loss = torch.zeros(())
        val_loss = evaluate()
        strategy.print(f"| end of epoch {epoch:3d} | valid loss {val_loss:5.4f} | valid ppl {math.exp(val_loss):8.4f}")
        if val_loss < best_val_loss * 0.99:
            best_val_loss = val_loss
        else:
            lr /= 4.0


if __name__ == "__main__":
    main()
