"""Right: sequences that each tower pads to the longest of its own share."""

import torch
from torch import nn

import mirrored

strategy = mirrored.MirroredStrategy()
with strategy.scope():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
examples = [torch.randn(int(length), 3) for length in torch.randint(1, 9, (27,))]


def collate(sequences):
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    return nn.utils.rnn.pad_sequence(sequences, batch_first=True), lengths


train = strategy.distribute_dataset(examples, 8, collate_fn=collate, shuffle=True)


def train_step(x, lengths):
    optimizer.zero_grad()
    present = torch.arange(x.shape[1]) < lengths[:, None]
    per_example = (model(x)[..., 0].square() * present).sum(1) / lengths
    mirrored.compute_average_loss(per_example).backward()
    optimizer.step()


for _ in range(3):
    for batch in train:
        strategy.run(train_step, args=batch)
