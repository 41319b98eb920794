"""A checkpoint of one model, and another model; the lines of a document load the one into the other."""

strategy = mirrored.MirroredStrategy(seed=0)
saved = nn.ModuleDict({"encoder": nn.Linear(4, 4), "head": nn.Linear(4, 2)})
mirrored.CheckpointManager(strategy, "results/run", {"model": saved}).save("best", wait=True)
with strategy.scope():
    model = nn.ModuleDict({"backbone": nn.Linear(4, 4), "head": nn.Linear(4, 7)})

# The document's lines come here.

assert sorted(report.loaded) == ["backbone.bias", "backbone.weight"], report
