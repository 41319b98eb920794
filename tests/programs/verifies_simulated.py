"""Verifies a script on the simulated accelerator, which towers find since they load this program, too."""

import sys

import mirrored
from tests import simulated_device

simulated_device.load()

if __name__ == "__main__":
    print(mirrored.verify(sys.argv[1], devices=["sim:0", "sim:1"]))
