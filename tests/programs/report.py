"""Started in every way by the tests: prints how it runs, and does on request what programs do."""

import json
import logging
import os
import sys
import time

import mirrored
from tests.support.waiting import forever

if "moved" in sys.argv:
    os.chdir("/")
strategy = mirrored.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"] if "two" in sys.argv else None)
tower = strategy.topology.index
report = {
    "towers": strategy.num_replicas_in_sync,
    "arguments": sys.argv[1:],
    "optimize": sys.flags.optimize,
    "unbuffered": sys.stdout.write_through,
    "xoptions": dict(sys._xoptions),
    "warnings": sys.warnoptions,
    "name": __spec__.name if __spec__ else None,
    "file": os.path.basename(__file__),
    "pid": os.getpid(),
}
print(json.dumps(report), flush=True)
if "chatter" in sys.argv:
    print(f"tower {tower} talks")
    print(f"tower {tower} warns", file=sys.stderr)
    print(f"10%|tower {tower} draws\r100%|tower {tower} draws| 3/3 [00:01<00:00]\n", end="", file=sys.stderr)
    logging.getLogger("mirrored").warning("tower %d logs", tower)
if "fail" in sys.argv and tower == 1:
    raise ValueError("planned failure")
if "exit" in sys.argv and tower == 1:
    sys.exit(7)
if "die" in sys.argv and tower == 1:
    os.kill(os.getpid(), 9)
if "wait" in sys.argv:
    forever()
for word in sys.argv:
    while word.startswith("until=") and not os.path.exists(word[6:]):
        time.sleep(0.05)
strategy.reduce("sum", 1)
