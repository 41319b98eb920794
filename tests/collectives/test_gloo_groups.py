"""Groups that Gloo connects."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch.distributed as dist

import mirrored
from tests.support.late import take_turns
from towers.collectives import process_group

pytestmark = pytest.mark.slow


def leave_channels() -> None:
    options = mirrored.CommunicationOptions(implementation="gloo")
    communicator = mirrored.MirroredStrategy(communication=options).communicator
    channels: list[Any] = []

    def leave() -> None:
        dist.destroy_process_group(channels[0]._group)
        channels.clear()
        gc.collect()
        process_group._unused.clear()  # where c10d's group would wait for the next one to be made

    take_turns([0, 1] * 3, lambda: channels.append(communicator.channel()), leave)


def test_a_tower_that_leaves_once_it_has_a_channel_cuts_nobody_off() -> None:
    """As one does whose script ends when it has made its strategy, which makes a channel at last."""
    mirrored.launch(leave_channels, devices=["cpu:0", "cpu:1"])
