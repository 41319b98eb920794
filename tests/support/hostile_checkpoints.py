"""A small run, its whole standing, and checkpoints of it that were forged with all checksums right."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import mirrored
from mirrored.checkpoint import manifest as manifests
from mirrored.checkpoint.codec import Encoder, decode
from mirrored.checkpoint.folder import Disk, Folder
from mirrored.checkpoint.manifest import Manifest, StoredCheckpoint
from mirrored.checkpoint.tensors import FileLayout


class Run:
    """One tower's training in the middle of an epoch: a model, and all that its next step depends on.

    Attributes:
        objects: by name, what is saved.
        manager: of a folder with the checkpoint "honest".
    """

    def __init__(self, folder: pathlib.Path, **more: Any) -> None:
        self.strategy = mirrored.OneDeviceStrategy(seed=0)
        with self.strategy.scope():
            model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3)).to(memory_format=torch.channels_last)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.data = self.strategy.distribute_dataset(torch.randn(8, 2, 4, 4), 2, shuffle=True)
        self.progress: dict[str, Any] = {"losses": [0.5]}
        self.objects: dict[str, Any] = {
            "progress": self.progress,
            "schedule": schedule,
            "data": self.data,
            "model": model,
            "optimizer": optimizer,
            **more,
        }
        self.folder = folder
        self.batches = iter(self.data)
        self.manager = mirrored.CheckpointManager(self.strategy, folder, self.objects)
        self.step()
        self.manager.save("honest", wait=True)
        self.step()

    def step(self) -> None:
        optimizer = self.objects["optimizer"]
        optimizer.zero_grad()
        self.strategy.run(lambda: self.objects["model"](next(self.batches)).square().sum().backward())
        optimizer.step()
        self.objects["schedule"].step()
        self.progress["losses"].append(torch.rand(()).item())
        self.manager.step()

    def standing(self) -> dict[str, Any]:
        """All that must be as it was where a checkpoint was refused."""
        encoder = Encoder()
        found = {
            name: encoder.encode(
                dict(thing) if thing is self.progress else thing.state_dict(), name, skip_code=name == "schedule"
            )
            for name, thing in {**self.objects, "streams": self.strategy.streams, "strategy": self.strategy}.items()
        }
        digests = {name: hashlib.sha256(t.cpu().numpy().tobytes()).hexdigest() for name, t in encoder.tensors.items()}
        return {**found, "tensors": digests, "steps": self.manager.steps}


def forge(folder: pathlib.Path, states: Callable[[dict[str, Any]], Any], name: str = "forged") -> None:
    """Save as ``name`` the states of the checkpoint "honest" after ``states`` has changed them."""
    opened = StoredCheckpoint(folder / "honest")
    found = {each: decode(tree, opened.tensors.read) for each, tree in opened.manifest["objects"].items()}
    opened.close()
    states(found)
    encoder = Encoder()
    objects = {each: encoder.encode(state, each) for each, state in found.items()}
    layout = FileLayout(encoder.tensors)
    manifest = {**opened.manifest, "objects": objects, "tensors": layout.unusual}
    Folder(folder, Disk()).write(name, manifest, layout.pieces())


def forge_manifest(place: pathlib.Path, change: Callable[[Manifest], Any]) -> None:
    """Change the manifest of the checkpoint at ``place``, its own checksum included."""
    path = place / "manifest.json"
    manifest = manifests.load(path.read_bytes())
    change(manifest)
    path.write_bytes(manifests.dump(manifest))
