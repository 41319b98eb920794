"""The evaluator of a cluster, beside a folder in which two checkpoints lie; the lines of a document evaluate them."""

import json
import os
import pathlib

from mirrored.evaluation import watching

watching._GRACE = 0.5  # seconds that a run which had ended before may take to begin again
cluster = {"chief": ["127.0.0.1:9"], "evaluator": ["127.0.0.1:10"]}
os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "evaluator", "index": 0}})
strategy = mirrored.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = nn.Linear(20, 3)
inputs = torch.randn(10, 20)
test = strategy.distribute_dataset((inputs, inputs[:, :3].argmax(1)), 4)
checkpoints = mirrored.CheckpointManager(strategy, "results/run", {"model": model}, every_steps=1)
with checkpoints.resume():
    for _ in range(2):
        checkpoints.step()
assert pathlib.Path("results/run/step-00000002").exists()


@torch.no_grad()
def test_step(x, y):
    return (model(x).argmax(1) == y).sum(), len(y)


# The document's lines come here.

assert [row["step"] for row in rows] == [1, 2]
