"""Loaded by the server that tests' towers are forked from: Inductor, and what it finds out once in a process.

Each tower that compiles would do it for itself: look in seven processes at what the CPU can do, 2.4 s of CPU; and, for
the keys of its cache, load the attention of tensors over devices and read all of torch's files, 0.15 s each. Nor do
towers measure, for a log, how long a new graph's guards take once the caches of the CPU are empty: 50 ms of CPU for
each graph.
"""

import os
import shutil

import torch._inductor.compile_fx
import torch.distributed.tensor.experimental._attention  # noqa: F401  (to have it loaded)
from torch._dynamo import guards
from torch._inductor import codecache, cpu_vec_isa

codecache.torch_key()
if shutil.which(os.environ.get("CXX", "c++")):
    cpu_vec_isa.pick_vec_isa()
if hasattr(guards, "profile_guard_manager"):
    guards.profile_guard_manager = lambda *_: 0.0
