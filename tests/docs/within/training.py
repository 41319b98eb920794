"""A script that trains a small network; the lines of a document stand in its middle."""

strategy = mirrored.MirroredStrategy(seed=0)
with strategy.scope():
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
inputs = torch.randn(1000, 20)
train_set = torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))
train = strategy.distribute_dataset(train_set, global_batch_size=153, shuffle=True)


def train_step(x, y):
    optimizer.zero_grad()
    loss = mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"))
    loss.backward()
    optimizer.step()
    return loss.detach()


# The document's lines come here.

for batch in train:
    strategy.run(train_step, args=batch)
strategy.check_mirrored()
