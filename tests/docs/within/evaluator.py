"""The evaluator of a cluster, beside a folder in which two checkpoints lie; the lines of a document evaluate them."""

import json
import os
import pathlib
import time

cluster = {"chief": ["127.0.0.1:9"], "evaluator": ["127.0.0.1:10"]}
os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "evaluator", "index": 0}})
strategy = mirrored.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = nn.Linear(20, 3)
inputs = torch.randn(10, 20)
test = strategy.distribute_dataset((inputs, inputs[:, :3].argmax(1)), 4)
checkpoints = mirrored.CheckpointManager(strategy, "results/run", {"model": model}, asynchronous=False)
last_step = 2
for _ in range(last_step):
    checkpoints.step()
    checkpoints.save()
assert pathlib.Path("results/run/step-00000002").exists()


@torch.no_grad()
def test_step(x, y):
    return (model(x).argmax(1) == y).sum(), len(y)


# The document's lines come here.

assert seen == 2
