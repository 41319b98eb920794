"""A script whose last batch leaves a tower without examples; the lines of a document are its step."""

strategy = mirrored.MirroredStrategy(seed=0)
with strategy.scope():
    model = nn.Linear(20, 3)
inputs = torch.randn(9, 20)
test = strategy.distribute_dataset((inputs, inputs[:, :3].argmax(1)), 4, stand_in=True)

# The document's lines come here.

counts = [strategy.reduce("sum", strategy.run(test_step, args=batch))[1] for batch in test]
assert counts == [4, 4, 1], counts
