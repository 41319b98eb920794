"""Loaded by the server that tests' towers are forked from: torch's compiler, as far as it does not depend on a graph.

Each tower that compiles would load Inductor for itself and ask in seven processes what the CPU can do: 2.4 s of CPU.
"""

import torch._inductor.compile_fx  # noqa: F401  (to have it loaded)
from torch._inductor import cpu_vec_isa

cpu_vec_isa.pick_vec_isa()
