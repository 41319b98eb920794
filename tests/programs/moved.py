"""Changes its directory before it makes a strategy."""

import os

import mirrored

os.chdir("/")
mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
