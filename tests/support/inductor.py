"""Loaded by the server that tests' towers are forked from: Inductor, and its look at what the CPU can do.

Each tower that compiles would do it for itself, the look in seven processes: 2.4 s of CPU. Nor do towers measure, for
a log, how long a new graph's guards take once the caches of the CPU are empty: 50 ms of CPU for each graph.
"""

import os
import shutil

import torch._inductor.compile_fx  # noqa: F401  (to have it loaded)
from torch._dynamo import guards
from torch._inductor import cpu_vec_isa

if shutil.which(os.environ.get("CXX", "c++")):
    cpu_vec_isa.pick_vec_isa()
if hasattr(guards, "profile_guard_manager"):
    guards.profile_guard_manager = lambda *_: 0.0
