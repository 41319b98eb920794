"""A transformer that translates, in the shape of ``language_translation`` of pytorch/examples."""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

import mirrored

PAD, BOS, EOS = 0, 1, 2


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """Sentences, and their translations: each word has another number, and the order is reversed."""

    def __init__(self, count: int, words: int) -> None:
        dictionary = torch.randperm(words) + 3
        lengths = torch.randint(2, 9, (count,)).tolist()
        sources = [torch.randint(0, words, (length,)) for length in lengths]
        begin, end = torch.tensor([BOS]), torch.tensor([EOS])
        self.pairs = [(torch.cat([begin, s + 3, end]), torch.cat([begin, dictionary[s].flip(0), end])) for s in sources]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.pairs[index]


def collate(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    sources, targets = zip(*pairs, strict=True)
    return pad_sequence(sources, True, PAD), pad_sequence(targets, True, PAD)


class Translator(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.transformer = nn.Transformer(width, 2, 1, 1, 32, dropout=0.1, batch_first=True)
        self.source_embedding = nn.Embedding(words, width)
        self.target_embedding = nn.Embedding(words, width)
        self.generator = nn.Linear(width, words)
        places = torch.arange(16)[:, None] * torch.exp(-torch.arange(0, width, 2) * math.log(10000) / width)
        self.register_buffer("positions", torch.stack([places.sin(), places.cos()], dim=2).flatten(1))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        src = self.source_embedding(source) + self.positions[: source.shape[1]]
        tgt = self.target_embedding(target) + self.positions[: target.shape[1]]
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        padded = source == PAD
        output = self.transformer(
            src,
            tgt,
            tgt_mask=causal,
            src_key_padding_mask=padded,
            tgt_key_padding_mask=target == PAD,
            memory_key_padding_mask=padded,
        )
        return self.generator(output)


def main() -> None:
    parser = argparse.ArgumentParser(description="Machine translation")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=4)
    args = parser.parse_args()

    strategy = mirrored.MirroredStrategy(seed=7)
    pairs = Pairs(60, 20)
    train_set = torch.utils.data.Subset(pairs, range(41))
    valid_set = torch.utils.data.Subset(pairs, range(41, 58))
    train_loader = DataLoader(train_set, args.batch, shuffle=True, collate_fn=collate)
    train_dl = strategy.distribute_dataset(train_loader, stand_in=True)  # torch's transformer takes no empty batch
    valid_loader = DataLoader(valid_set, args.batch, collate_fn=collate)
    valid_dl = strategy.distribute_dataset(valid_loader, stand_in=True)
    with strategy.scope():
        model = Translator(words=23, width=16)
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.9, 0.98), eps=1e-9)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / args.warmup, (args.warmup / (step + 1)) ** 0.5)
    )

    def token_losses(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits, wanted = model(source, target[:, :-1]), target[:, 1:]
        losses = F.cross_entropy(logits.transpose(1, 2), wanted, reduction="none")
        return losses, wanted != PAD

    def train_step(source: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad()
        losses, present = token_losses(source, target)
        loss = mirrored.compute_average_loss(losses, sample_weight=present, denominator="weights")
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.detach()

    @torch.no_grad()
    def valid_step(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        losses, present = mirrored.drop_stand_in(*token_losses(source, target))
        return (losses * present).sum(), present.sum()

    for epoch in range(1, args.epochs + 1):
        model.train()
        train_loss = 0.0
        for batch in train_dl:
            train_loss += float(strategy.reduce("sum", strategy.run(train_step, args=batch)))
        model.eval()
        valid_loss, tokens = torch.zeros(()), torch.zeros((), dtype=torch.long)
        for batch in valid_dl:
            loss, present = strategy.run(valid_step, args=batch)
            valid_loss, tokens = valid_loss + loss, tokens + present
        valid_loss, tokens = strategy.reduce("sum", (valid_loss, tokens))
        strategy.print(f"Epoch: {epoch} train loss {train_loss / len(train_dl):.3f} val {valid_loss / tokens:.3f}")


if __name__ == "__main__":
    main()
