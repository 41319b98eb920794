"""A script with virtual towers; the lines of a document make the strategy and the step."""

# The document's lines come here.

with strategy.scope():
    model = nn.Sequential(nn.Linear(20, 64), nn.Dropout(), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(100, 20)
train = strategy.distribute_dataset((inputs, inputs[:, :3].argmax(1)), 27, shuffle=True)
for x, y in train:
    strategy.run(train_step, args=(x, y))
assert F.relu(inputs).shape == inputs.shape
