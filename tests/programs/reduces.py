"""Started by the tests: towers that average a region of shared memory until they are killed."""

import os
import pathlib
import sys

import torch

import mirrored


def reduce_for_long(folder):
    strategy = mirrored.MirroredStrategy()
    region = strategy.communicator.allocate(0, 1_000_000, torch.float32, strategy.device)
    strategy.communicator.submit_average(region).wait()
    pathlib.Path(folder, str(strategy.topology.index)).write_text(str(os.getpid()))
    while True:
        strategy.communicator.submit_average(region).wait()


if __name__ == "__main__":
    mirrored.launch(reduce_for_long, (sys.argv[1],), devices=["cpu:0", "cpu:1"])
