"""A script that trains on padded sequences; the lines of a document are its step."""

from torch.nn.utils.rnn import pad_sequence

strategy = mirrored.MirroredStrategy(seed=0)
with strategy.scope():
    model = nn.Sequential(nn.Embedding(50, 16, padding_idx=0), nn.Linear(16, 50))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
sequences = [torch.randint(1, 50, (int(length),)) for length in torch.randint(2, 9, (23,))]
train = strategy.distribute_dataset(sequences, 4, collate_fn=lambda texts: pad_sequence(texts, batch_first=True))

# The document's lines come here.

for tokens in train:
    strategy.run(train_step, args=(tokens,))
strategy.check_mirrored()
