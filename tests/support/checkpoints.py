"""Checkpoints of one tower, and two that were saved."""

from __future__ import annotations

import pathlib
from typing import Any

import hypothesis.strategies as st
from torch import nn

import mirrored
from mirrored.checkpoint.manifest import name_of


def manager_of(folder: pathlib.Path, objects: dict[str, Any], **settings: Any) -> mirrored.CheckpointManager:
    """A manager of one tower."""
    return mirrored.CheckpointManager(mirrored.OneDeviceStrategy(), folder, objects, **settings)


def one_tower(folder: pathlib.Path, **settings: Any) -> tuple[mirrored.CheckpointManager, nn.Linear]:
    strategy = mirrored.OneDeviceStrategy()
    with strategy.scope():
        model = nn.Linear(3, 2)
    return mirrored.CheckpointManager(strategy, folder, {"model": model}, **{"every_steps": 1, **settings}), model


def damage(path: pathlib.Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    cuts = {"empty": 0, "1 byte": 1, "halves": len(data) // 2, "last byte": len(data) - 1}
    flips = {"first": 9, "middle": len(data) // 2, "end": len(data) - 3}
    if how in cuts:
        path.write_bytes(data[: cuts[how]])
    elif how in flips:
        data[flips[how]] ^= 1
        path.write_bytes(data)
    elif how == "longer":
        path.write_bytes(data + b"\0")
    else:
        path.unlink()
        if how == "folder":
            path.mkdir()
        elif how == "link":
            path.symlink_to(path.parent.parent / name_of(1) / path.name)


class Stubborn:
    """Takes no state."""

    def __init__(self) -> None:
        self.asked = 0

    def state_dict(self) -> dict[str, int]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if "asked" not in state or state["asked"] != self.asked:
            raise KeyError("not mine")


def come_back(folder: pathlib.Path, saved: Any, empty: Any) -> None:
    """Save one object, and restore it into another."""
    manager_of(folder, {"it": saved}).save("it", wait=True)
    manager_of(folder, {"it": empty}).restore("it")


KINDS = "dict items kind tensor array scalar tuple set size deque maxlen float bytes complex dtype device"


odd = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["x", "float32"])


json_values = st.recursive(
    odd,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KINDS.split()), inner, max_size=3),
    max_leaves=10,
)
