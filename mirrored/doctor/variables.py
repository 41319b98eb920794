"""Environment variables that change results or speed without a word."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from mirrored.doctor.finding import Finding, Severity, ok


@dataclasses.dataclass(frozen=True)
class _Variable:
    """A variable, and what it does when it is set.

    Attributes:
        harmless: values, in upper case, with which it does nothing.
    """

    name: str
    severity: Severity
    effect: str
    harmless: tuple[str, ...] = ("", "0")


_NOTE, _WARNING = Severity.NOTE, Severity.WARNING

_VARIABLES = (
    _Variable("NCCL_ALGO", _NOTE, "wins over CommunicationOptions(algorithm=…); NCCL's results and speed depend on it"),
    _Variable("NCCL_PROTO", _NOTE, "pins NCCL's protocol; results and speed depend on it"),
    _Variable("NCCL_DEBUG", _NOTE, "makes NCCL write to standard output", ("", "NONE", "VERSION", "WARN")),
    _Variable("NCCL_P2P_DISABLE", _WARNING, "keeps GPUs from reading each other directly: slow"),
    _Variable("NCCL_SHM_DISABLE", _WARNING, "keeps NCCL from shared memory: slow inside a host"),
    _Variable("NCCL_IB_DISABLE", _WARNING, "keeps NCCL from InfiniBand and RoCE: slow between hosts that have it"),
    _Variable("NCCL_NET", _NOTE, "pins NCCL's network", ("",)),
    _Variable("CUDA_LAUNCH_BLOCKING", _WARNING, "makes the host wait for every kernel: slow, and nothing overlaps"),
    _Variable("CUDA_DEVICE_MAX_CONNECTIONS", _NOTE, "limits how much of communication and computing overlaps", ("",)),
    _Variable("PYTORCH_NO_CUDA_MEMORY_CACHING", _WARNING, "allocates GPU memory anew each time: slow"),
    _Variable("NVIDIA_TF32_OVERRIDE", _WARNING, "switches TF32 for all libraries: other results, another speed", ("",)),
    _Variable("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", _WARNING, "makes float32 products TF32: other results"),
    _Variable("CUBLAS_WORKSPACE_CONFIG", _NOTE, "makes cuBLAS deterministic, or not; some products get slower", ("",)),
    _Variable("TORCH_DISTRIBUTED_DEBUG", _WARNING, "checks every collective by another one: slow", ("", "OFF", "INFO")),
    _Variable("TORCH_CPP_LOG_LEVEL", _NOTE, "makes torch write much", ("", "WARNING", "ERROR", "FATAL", "2", "3")),
    _Variable("TORCH_LOGS", _NOTE, "makes torch.compile write much", ("",)),
    _Variable("TORCH_NCCL_BLOCKING_WAIT", _WARNING, "makes the host wait for every NCCL collective: nothing overlaps"),
    _Variable("TORCH_COMPILE_DISABLE", _WARNING, "turns torch.compile off"),
    _Variable("TORCHDYNAMO_DISABLE", _WARNING, "turns torch.compile off"),
    _Variable("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", _WARNING, "lets torch.load run code from files"),
    _Variable("ATEN_CPU_CAPABILITY", _WARNING, "pins the instructions of CPU kernels: other results, slower", ("",)),
    _Variable("MKL_CBWR", _NOTE, "pins how MKL sums: other bits than without it", ("",)),
    _Variable("OMP_PROC_BIND", _WARNING, "may bind all towers' threads to the same cores", ("", "FALSE")),
    _Variable("GOMP_CPU_AFFINITY", _WARNING, "binds all towers' threads to the same cores", ("",)),
    _Variable("KMP_AFFINITY", _WARNING, "may bind all towers' threads to the same cores", ("", "NONE", "DISABLED")),
    _Variable("OMP_WAIT_POLICY", _NOTE, "ACTIVE lets waiting threads take the cores of other towers", ("", "PASSIVE")),
    _Variable("MALLOC_TRIM_THRESHOLD_", _NOTE, "keeps CPU towers from keeping freed memory: steps are slower", ("",)),
    _Variable("MALLOC_MMAP_THRESHOLD_", _NOTE, "keeps CPU towers from keeping freed memory: steps are slower", ("",)),
    _Variable("GLIBC_TUNABLES", _NOTE, "keeps CPU towers from keeping freed memory: steps are slower", ("",)),
    _Variable(
        "LD_PRELOAD", _NOTE, "loads a library into every tower; another malloc keeps memory in its own way", ("",)
    ),
    _Variable("PYTHONMALLOC", _NOTE, "debug allocators make Python slow", ("", "PYMALLOC", "MALLOC", "MIMALLOC")),
    _Variable("PYTHONDEVMODE", _NOTE, "Python's development mode is slow", ("",)),
    _Variable("TOWERS_DEVICES", _WARNING, "is meant for towers alone: strategies take their devices from it", ("",)),
)


def check(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Whether any of them is set to something that matters."""
    found = False
    for variable in _VARIABLES:
        value = environ.get(variable.name)
        if value is None or value.strip().upper() in variable.harmless:
            continue
        found = True
        fix = f"unset {variable.name}, unless it is there on purpose"
        yield Finding(variable.severity, variable.name, f"is {value!r}: {variable.effect}", fix)
    if not found:
        yield ok("variables", f"none of {len(_VARIABLES)} that change results or speed is set")
