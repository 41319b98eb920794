"""Loaded by the server that tests' towers are forked from, so that each of them has it: some take seconds to load.

Each tower that compiles would load Inductor for itself and ask in seven processes what the CPU can do: 2.4 s of CPU.
"""

import encodings.idna
import multiprocessing.popen_forkserver

import hypothesis
import pytest
import torch._inductor.compile_fx
from torch._inductor import cpu_vec_isa

import mirrored

__all__ = ["encodings", "hypothesis", "mirrored", "multiprocessing", "pytest", "torch"]

cpu_vec_isa.pick_vec_isa()
