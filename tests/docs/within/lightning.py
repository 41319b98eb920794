"""A script with a module of Lightning and texts; the lines of a document change the module's loss and fit it."""

import lightning as L
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from mirrored.lightning import MirroredLightningStrategy

strategy = mirrored.MultiWorkerMirroredStrategy(seed=0)
quiet = {"max_epochs": 2, "enable_progress_bar": False, "logger": False, "enable_checkpointing": False}


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.layers(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def collate(rows):
    x = pad_sequence(rows, batch_first=True)
    return x, F.pad(x[:, 1:], (0, 1))


texts = DataLoader([torch.randint(1, 9, (2 + i % 7,)) for i in range(21)], 6, shuffle=True, collate_fn=collate)

batches = DataLoader([(torch.randn(8), i % 3) for i in range(22)], 6, shuffle=True)

# The document's lines come here.

strategy.check_mirrored()
