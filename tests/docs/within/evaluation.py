"""A training that is evaluated, beside it or in turns; the lines of a document are the loops."""

strategy = mirrored.MirroredStrategy(seed=0)
with strategy.scope():
    model = nn.Linear(20, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(200, 20)
labels = inputs[:, :3].argmax(1)
train = strategy.distribute_dataset((inputs[:100], labels[:100]), 32, shuffle=True)
test = strategy.distribute_dataset((inputs[100:], labels[100:]), 64)


def train_step(x, y):
    optimizer.zero_grad()
    mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none")).backward()
    optimizer.step()


@torch.no_grad()
def test_step(x, y):
    return (model(x).argmax(1) == y).sum(), len(y)


def evaluate():
    return {"right": sum(strategy.reduce("sum", strategy.run(test_step, args=batch))[0] for batch in test)}


# The document's lines come here.

if "rows" in globals():
    assert [row["step"] for row in rows] == [20, 40, 60]
else:
    assert checkpoints.steps == 80
