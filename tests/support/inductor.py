"""Loaded by the server that tests' towers are forked from: Inductor, and its look at what the CPU can do.

Each tower that compiles would do it for itself, the look in seven processes: 2.4 s of CPU.
"""

import os
import shutil

import torch._inductor.compile_fx  # noqa: F401  (to have it loaded)
from torch._inductor import cpu_vec_isa

if shutil.which(os.environ.get("CXX", "c++")):
    cpu_vec_isa.pick_vec_isa()
