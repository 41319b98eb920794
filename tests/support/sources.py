"""Loaded by the server that tests' towers are forked from: the sources that a tower's first stack trace quotes.

torch notes a trace when a process seeds kinds of devices that it has not used: each tower read 20 files, 3 ms of CPU.
"""

import linecache
import sys

_SEED = ["torch", "torch._compile", "torch._dynamo.eval_frame", "torch.random", "torch.mtia"]
_SEED += [f"torch.{kind}{module}" for kind in ("cuda", "xpu") for module in ("", ".random")]
_TOWER = ["multiprocessing.forkserver", "multiprocessing.process", "multiprocessing.spawn", "tests.support.jobs"]
_TOWER += ["towers.launching.launch", "towers.health.failure", "towers.options"]
_TOWER += ["mirrored.seeds", "mirrored.strategy.base", "mirrored.strategy.kinds"]

for name in (*_SEED, *_TOWER):
    if file := getattr(sys.modules.get(name), "__file__", None):
        linecache.getlines(file)
