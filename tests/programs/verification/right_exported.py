"""Right: a model that is traced, exported, and saved and loaded again, after an epoch; the arguments say which."""

import copy
import io
import pickle
import sys

import torch
import torch.nn.functional as F
from torch import fx, nn

import mirrored

strategy = mirrored.MirroredStrategy()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.second(self.dropout(torch.tanh(self.first(x))))


with strategy.scope():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(27, 5), torch.randint(0, 3, (27,)))
train = strategy.distribute_dataset(data, 8)
# Where nothing can be written: a comparison keeps checkpoints elsewhere.
checkpoints = mirrored.CheckpointManager(strategy, "/proc/nowhere", {"model": model, "train": train})


def train_step(x, y):
    optimizer.zero_grad()
    mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none")).backward()
    optimizer.step()


def mapped(x):
    parameters = dict(model.named_parameters())
    return torch.func.vmap(lambda row: torch.func.functional_call(model, parameters, (row,)))


def saved_and_loaded(x):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
    torch.save(state, file := io.BytesIO())
    file.seek(0)
    state = torch.load(file)
    loaded = Net().eval()
    loaded.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return loaded


def restored(x):
    checkpoints.save("best")
    checkpoints.restore("best")
    loaded = Net().eval()
    mirrored.load_weights(loaded, "/proc/nowhere/best")
    return loaded


AGAIN = {
    "trace": lambda x: torch.jit.trace(model, (x,)),
    "script": lambda x: torch.jit.script(model),
    "fx": lambda x: fx.symbolic_trace(model),
    "export": lambda x: torch.export.export(model, (x,)).module(),
    "strict export": lambda x: torch.export.export(model, (x,), strict=True).module(),
    "compile": lambda x: torch.compile(model, backend="eager"),
    "vmap": mapped,
    "save": saved_and_loaded,
    "pickle": lambda x: pickle.loads(pickle.dumps(model)),
    "copy": lambda x: copy.deepcopy(model),
    "checkpoint": restored,
}
"""The model once more, for an input ``x``."""
if torch.__version__ < (2, 10):
    del AGAIN["strict export"]  # docs/how-to/verify.md says so


for _ in range(2):
    for batch in train:
        strategy.run(train_step, args=batch)
    model.eval()
    inputs = data.tensors[0][:4].clone()
    with torch.no_grad():
        for kind in sys.argv[1:] or AGAIN:
            torch.testing.assert_close(AGAIN[kind](inputs)(inputs), model(inputs))
    model.train()
