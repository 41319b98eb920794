"""Checks environment variables: TF_CONFIG, those of torchrun and SLURM, and those that change results or speed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from mirrored import cluster
from mirrored.cluster import launchers
from mirrored.cluster.resolver import ClusterError, ClusterResolver
from mirrored.cluster.tf_config import TFConfigClusterResolver
from mirrored.doctor import network
from mirrored.doctor.findings import Finding, Severity, note, ok, problem, warning
from towers.errors import CannotStartError
from towers.system.machine import loopback_interface
from towers.system.messages import split_address

_LAUNCHER, _TF_CONFIG = "launcher", "TF_CONFIG"
_LEFT_OVER = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


def check_launcher(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks whether torchrun's or SLURM's variables are complete, and agree with each other and with TF_CONFIG."""
    try:
        launcher = cluster.from_launcher(dict(environ))
    except (ClusterError, CannotStartError) as error:
        yield problem(
            _LAUNCHER,
            str(error),
            ("unset the variables that are left over from another job, or set those that are missing"),
        )
        return
    if launcher is None:
        yield _check_left_over(environ)
        return
    yield from _check_topology(launcher)
    # One agent per task of srun is common: RANK is used then.
    if launchers.torchrun_is_present(environ) and launchers.srun_is_present(environ):
        with contextlib.suppress(ClusterError):
            workers = launchers.SlurmClusterResolver(environ).workers
            if workers != launcher.workers:
                what = f"{launcher.origin} speak of {launcher.workers} workers, SLURM's of {workers}; the former count"
                yield note(_LAUNCHER, what)
    try:
        cluster.resolve(dict(environ))
    except ClusterError as error:
        if "contradict" in str(error):  # only check_tf_config reports errors of TF_CONFIG
            yield problem(_LAUNCHER, str(error), "unset the one that is left over")


def _check_left_over(environ: Mapping[str, str]) -> Finding:
    left = [name for name in _LEFT_OVER if environ.get(name)]
    if left:
        return warning(
            _LAUNCHER,
            f"{', '.join(left)} set, but not RANK and WORLD_SIZE: taken as started by no launcher",
            f"unset {' '.join(left)}, or start with torchrun, which sets all",
        )
    if environ.get("SLURM_JOB_ID"):
        return note(
            _LAUNCHER,
            f"in SLURM's job {environ['SLURM_JOB_ID']}, but no task of srun: a program started here is one worker",
            "start it by srun, one task per tower",
        )
    return ok(_LAUNCHER, "no variables of torchrun or SLURM are set")


def _check_topology(launcher: ClusterResolver) -> Iterator[Finding]:
    topology = launcher.topology
    assert topology is not None
    assert topology.address is not None
    yield note(
        _LAUNCHER,
        f"{launcher.origin}: tower {topology.index} of {topology.size}, {topology.local_index} of "
        f"{topology.local_size} on worker {topology.worker} of {topology.workers}",
        "if this process belongs to no such job, unset them: they are left over",
    )
    if topology.size == 1:
        return
    host, port = topology.address
    (addresses,) = network.look_up([host])
    if isinstance(addresses, OSError):
        yield problem(
            _LAUNCHER,
            f"the chief's address, {host} (from {launcher.origin}), does not resolve: "
            f"{addresses.strerror or addresses}",
            "correct MASTER_ADDR, or add it to /etc/hosts or the name server",
        )
    else:
        is_chief = topology.is_chief and topology.chief_serves
        yield network.check_chief(host, port, launcher.origin, is_chief=is_chief)


def check_tf_config(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks the grammar of TF_CONFIG, its addresses, and the chief's port."""
    text = environ.get("TF_CONFIG")
    if text is None:
        yield ok(_TF_CONFIG, "is not set")
        return
    if not text.strip():
        yield note(_TF_CONFIG, "is set but empty: taken as unset")
        return
    try:
        resolver = TFConfigClusterResolver(environ)
    except ClusterError as error:
        yield problem(_TF_CONFIG, str(error), "correct it, or unset it if it is left over from another job")
        return
    if resolver.workers == 1:
        yield note(_TF_CONFIG, f"this is the {resolver.task_type} of a cluster of one")
        return
    yield ok(
        _TF_CONFIG,
        f"worker {resolver.worker} of {resolver.workers} ({resolver.task_type} {resolver.task_id}) at "
        f"{resolver.addresses[resolver.worker]}, the chief at {resolver.addresses[0]}; for "
        "MultiWorkerMirroredStrategy only",
    )
    numeric = network.look_up([split_address(address)[0] for address in resolver.addresses])
    unknown = [
        f"{address} ({answer.strerror or answer})"
        for address, answer in zip(resolver.addresses, numeric, strict=True)
        if isinstance(answer, OSError)
    ]
    if unknown:
        yield problem(
            _TF_CONFIG,
            f"{len(unknown)} of {len(numeric)} addresses do not resolve here: {', '.join(unknown[:8])}",
            "correct the names, or add them to /etc/hosts or the name server; in Kubernetes a pod's name resolves "
            "once its service exists",
        )
    yield from _check_addresses(resolver, numeric, environ)
    if not isinstance(numeric[0], OSError):
        host, port = split_address(resolver.addresses[0])
        yield network.check_chief(host, port, _TF_CONFIG, is_chief=resolver.worker == 0)


def _check_addresses(
    resolver: TFConfigClusterResolver, numeric: list[list[str] | OSError], environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Checks whether this worker's address belongs to this machine, and whether the workers can reach each other's."""
    own = numeric[resolver.worker]
    if not isinstance(own, OSError) and not any(network.is_local(address) for address in own):
        yield warning(
            _TF_CONFIG,
            f"this worker's address, {resolver.addresses[resolver.worker]}, belongs to no interface of this machine",
            "check that task.index is this machine's; a service's address in front of it is right",
        )
    known = [answer for answer in numeric if not isinstance(answer, OSError)]
    loopback = [all(network.is_loopback(address) for address in answer) for answer in known]
    if isinstance(numeric[0], OSError) or all(loopback):
        return
    if resolver.worker != 0 and loopback[0]:
        yield problem(
            _TF_CONFIG,
            f"the chief's address, {resolver.addresses[0]}, leads here to this machine itself, but other workers are "
            "elsewhere",
            "name the chief by an address that leads to it from all workers (see /etc/hosts)",
        )
    if environ.get("GLOO_SOCKET_IFNAME") == loopback_interface():
        yield problem(
            "GLOO_SOCKET_IFNAME",
            "is the loopback interface, by which the other workers of TF_CONFIG cannot be reached",
            "unset it: towers find the interface that leads to the chief",
        )


_NOTE, _WARNING = Severity.NOTE, Severity.WARNING

_OFF = ("", "0")

_VARIABLES = {
    "NCCL_ALGO": (_NOTE, "wins over CommunicationOptions(algorithm=…); NCCL's results and speed depend on it", _OFF),
    "NCCL_PROTO": (_NOTE, "pins NCCL's protocol; results and speed depend on it", _OFF),
    "NCCL_DEBUG": (_NOTE, "makes NCCL write to standard output", ("", "NONE", "VERSION", "WARN")),
    "NCCL_P2P_DISABLE": (_WARNING, "keeps GPUs from reading each other directly: slow", _OFF),
    "NCCL_SHM_DISABLE": (_WARNING, "keeps NCCL from shared memory: slow inside a host", _OFF),
    "NCCL_IB_DISABLE": (_WARNING, "keeps NCCL from InfiniBand and RoCE: slow between hosts that have it", _OFF),
    "NCCL_HOSTID": (_NOTE, "lets towers of the same value alone share memory with each other", ("",)),
    "NCCL_NET": (_NOTE, "pins NCCL's network", ("",)),
    "CUDA_LAUNCH_BLOCKING": (_WARNING, "makes the host wait for every kernel: slow, and nothing overlaps", _OFF),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (_WARNING, "allocates GPU memory again each time: slow", _OFF),
    "NVIDIA_TF32_OVERRIDE": (_WARNING, "switches TF32 for all libraries: other results, another speed", ("",)),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": (_WARNING, "makes float32 products TF32: other results", _OFF),
    "CUBLAS_WORKSPACE_CONFIG": (_NOTE, "makes cuBLAS deterministic, or not; some products get slower", ("",)),
    "TORCH_DISTRIBUTED_DEBUG": (_WARNING, "checks every collective by another one: slow", ("", "OFF", "INFO")),
    "TORCH_NCCL_BLOCKING_WAIT": (_WARNING, "makes the host wait for every NCCL collective: nothing overlaps", _OFF),
    "TORCH_COMPILE_DISABLE": (_WARNING, "turns torch.compile off", _OFF),
    "TORCHDYNAMO_DISABLE": (_WARNING, "turns torch.compile off", _OFF),
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": (_WARNING, "lets torch.load run code from files", _OFF),
    "ATEN_CPU_CAPABILITY": (_WARNING, "pins the instructions of CPU kernels: other results, slower", ("",)),
    "MKL_CBWR": (_NOTE, "pins how MKL sums: other bits than without it", ("",)),
    "OMP_PROC_BIND": (_WARNING, "may bind all towers' threads to the same cores", ("", "FALSE")),
    "GOMP_CPU_AFFINITY": (_WARNING, "binds all towers' threads to the same cores", ("",)),
    "KMP_AFFINITY": (_WARNING, "may bind all towers' threads to the same cores", ("", "NONE", "DISABLED")),
    "MALLOC_TRIM_THRESHOLD_": (_NOTE, "keeps CPU towers from keeping freed memory: steps are slower", ("",)),
    "MALLOC_MMAP_THRESHOLD_": (_NOTE, "keeps CPU towers from keeping freed memory: steps are slower", ("",)),
    "GLIBC_TUNABLES": (_NOTE, "keeps CPU towers from keeping freed memory: steps are slower", ("",)),
    "TOWERS_DEVICES": (_WARNING, "is meant for towers alone: strategies take their devices from it", ("",)),
}
"""For each variable, its severity, its effect, and the upper-case values without an effect."""


def check_variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks whether any of these variables has a value with an effect."""
    matter = False
    for name, (severity, effect, harmless) in _VARIABLES.items():
        if (value := environ.get(name)) is not None and value.strip().upper() not in harmless:
            matter = True
            yield Finding(severity, name, f"is {value!r}: {effect}", f"unset {name}, unless it was set on purpose")
    if not matter:
        yield ok("variables", f"none of {len(_VARIABLES)} that change results or speed is set")
