"""A script with a model and a test set; the lines of a document evaluate it."""

strategy = mirrored.MirroredStrategy(seed=0)
with strategy.scope():
    model = nn.Linear(20, 3)
inputs = torch.randn(101, 20)
test = strategy.distribute_dataset((inputs, inputs[:, :3].argmax(1)), 10)

# The document's lines come here.

right = (model(inputs).argmax(1) == inputs[:, :3].argmax(1)).double().mean()
assert abs(float(accuracy.compute()) - float(right)) < 1e-6
