"""A script whose strategy is made by the lines of a document."""

torch.manual_seed(0)
# The document's lines come here.

inputs = torch.randn(100, 20)
with strategy.scope():
    model = nn.Linear(20, 1)
    optimizer = torch.optim.Adam(model.parameters())
train = strategy.distribute_dataset(inputs, 32)


def train_step(x):
    optimizer.zero_grad()
    mirrored.compute_average_loss(model(x).square()).backward()
    optimizer.step()


for x in train:
    strategy.run(train_step, args=(x,))
