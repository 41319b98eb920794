"""Checks how programs meet: interfaces, addresses, the variables of launchers, and those that change results."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import pathlib
import socket
from collections.abc import Iterator, Mapping, Sequence

from mirrored import cluster
from mirrored.cluster import launchers
from mirrored.cluster.resolver import ClusterError, ClusterResolver
from mirrored.cluster.tf_config import TFConfigClusterResolver
from mirrored.doctor.findings import Finding, Severity, note, ok, problem, warning
from towers.errors import CannotStartError, PortInUseError, StartupError
from towers.joining.store import listen
from towers.system import devices, machine
from towers.system.machine import loopback_interface
from towers.system.messages import split_address
from towers.system.timeouts import run_all_with_timeout

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
    (addresses,) = look_up([host])
    if isinstance(addresses, OSError):
        yield problem(
            _LAUNCHER,
            f"the chief's address, {host} (from {launcher.origin}), does not resolve: "
            f"{addresses.strerror or addresses}",
            "correct MASTER_ADDR, or add it to /etc/hosts or the name server",
        )
    else:
        is_chief = topology.is_chief and topology.chief_serves
        yield check_chief(host, port, launcher.origin, is_chief=is_chief)


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
    numeric = look_up([split_address(address)[0] for address in resolver.addresses])
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
        yield check_chief(host, port, _TF_CONFIG, is_chief=resolver.worker == 0)


def _check_addresses(
    resolver: TFConfigClusterResolver, numeric: list[list[str] | OSError], environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Checks whether this worker's address belongs to this machine, and whether the workers can reach each other's."""
    own = numeric[resolver.worker]
    if not isinstance(own, OSError) and not any(is_local(address) for address in own):
        yield warning(
            _TF_CONFIG,
            f"this worker's address, {resolver.addresses[resolver.worker]}, belongs to no interface of this machine",
            "check that task.index is this machine's; a service's address in front of it is right",
        )
    known = [answer for answer in numeric if not isinstance(answer, OSError)]
    loopback = [all(is_loopback(address) for address in answer) for answer in known]
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

_ALLOCATOR = _NOTE, "keeps glibc's defaults: mirrored models train more slowly, sharded ones faster but larger", ("",)

_VARIABLES = {
    "NCCL_ALGO": (_NOTE, "wins over CommunicationOptions(algorithm=…); NCCL's results and speed depend on it", _OFF),
    "NCCL_PROTO": (_NOTE, "pins NCCL's protocol; results and speed depend on it", _OFF),
    "NCCL_DEBUG": (_NOTE, "makes NCCL write to standard output", ("", "NONE", "VERSION", "WARN")),
    "NCCL_P2P_DISABLE": (_WARNING, "keeps GPUs from reading each other directly: slow", _OFF),
    "NCCL_SHM_DISABLE": (_WARNING, "keeps NCCL from shared memory: slow inside a host", _OFF),
    "NCCL_IB_DISABLE": (_WARNING, "keeps NCCL from InfiniBand and RoCE: slow between hosts that have it", _OFF),
    "NCCL_HOSTID": (_NOTE, "only towers with equal values share memory", ("",)),
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
    "MALLOC_TRIM_THRESHOLD_": _ALLOCATOR,
    "MALLOC_MMAP_THRESHOLD_": _ALLOCATOR,
    "GLIBC_TUNABLES": _ALLOCATOR,
    "TOWERS_DEVICES": (_WARNING, "is for towers that mirrored starts: strategies take their devices from it", ("",)),
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


_RESOLVE_SECONDS = 5.0
_CONNECT_SECONDS = 3.0
_LISTENING = "0A"  # the state in /proc/net/tcp
_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def check_interfaces(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks the interfaces of this machine, and those that Gloo and NCCL are configured to use."""
    interfaces = machine.interfaces()
    listed = ", ".join(f"{name} {address}" if address else f"{name} (no IPv4)" for name, address in interfaces.items())
    yield ok("interfaces", listed or "none")
    for variable in (_GLOO, _NCCL):
        if value := environ.get(variable):
            yield _check_chosen(variable, value, interfaces)


def _check_chosen(variable: str, value: str, interfaces: Mapping[str, str | None]) -> Finding:
    """Checks whether the interfaces that a variable selects exist and lead to other machines.

    Gloo takes complete names, and fails if one does not exist. NCCL takes prefixes of names, complete names after
    ``=``, and names to exclude after ``^``.
    """
    if variable == _GLOO:
        words, exact, excluded = value.split(","), True, False
    else:
        words, exact, excluded = value.lstrip("^=").split(","), "=" in value[:2], value.startswith("^")
    fix = f"unset {variable} (towers choose by themselves), or name one of {', '.join(interfaces)}"
    missing = [word for word in words if word not in interfaces]
    if variable == _GLOO and missing:
        return problem(variable, f"names {', '.join(map(repr, missing))}, which this machine does not have", fix)
    chosen = [name for name in interfaces if any(name == w if exact else name.startswith(w) for w in words) != excluded]
    what = f"chooses {', '.join(chosen)}"
    if not chosen:
        severe = problem if devices.count_of("cuda") > 1 else warning
        return severe(variable, f"is {value!r}, which leaves none of this machine's interfaces", fix)
    if not any(interfaces[name] for name in chosen):
        return warning(variable, f"{what}, without an IPv4 address", f"unset {variable}, or name one with an address")
    if set(chosen) == {machine.loopback_interface()}:
        fix = f"unset {variable}, unless all towers run on this machine"
        return warning(variable, f"{what}: other machines cannot be reached through it", fix)
    return ok(variable, what)


def look_up(hosts: Sequence[str]) -> list[list[str] | OSError]:
    """Returns the numeric addresses of each host, or the error (also TimeoutError). All are looked up in parallel."""

    def addresses(host: str) -> list[str]:
        return list(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(host, None)))

    results = run_all_with_timeout(_RESOLVE_SECONDS, [lambda host=host: addresses(host) for host in hosts])  # type: ignore[misc]
    return [  # a malformed name raises UnicodeError
        OSError(str(result)) if isinstance(result, BaseException) and not isinstance(result, OSError) else result
        for result in results
    ]


def is_loopback(address: str) -> bool:
    """Returns whether traffic to a numeric address stays on the machine."""
    return ipaddress.ip_address(address).is_loopback


def is_local(address: str) -> bool:
    """Returns whether a numeric address belongs to an interface of this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True


def check_chief(host: str, port: int, origin: str, *, is_chief: bool) -> Finding:
    """Checks whether the store can be served at the chief's address, or reached there from another worker.

    A store that does not answer yet is a warning. An address that cannot be reached is a problem.

    Args:
        origin: the source of the address, for messages.
    """
    return _check_can_serve(host, port, origin) if is_chief else _check_can_reach(host, port, origin)


def _check_can_serve(host: str, port: int, origin: str) -> Finding:
    subject = "chief's port"
    try:
        listen(host, port, origin)[0].close()
    except PortInUseError:
        return problem(
            subject,
            f"port {port} of {host}, where this machine has to serve the store, is in use by {_holder(port)}",
            "end that program (an earlier run?), or name another port on all workers; if it belongs to this very job, "
            "which is running, all is well",
        )
    except StartupError as error:
        return problem(subject, str(error), f"name an address of this machine as the chief's in {origin}")
    return ok(subject, f"port {port} of {host} is free for the store")


def _check_can_reach(host: str, port: int, origin: str) -> Finding:
    subject, chief = "chief", f"the chief at {host}:{port} (from {origin})"
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        return warning(
            subject,
            f"{chief} can be reached, but nothing listens on that port",
            (
                "this is normal if the chief has not started yet; otherwise it listens on another port, or a "
                "firewall refuses"
            ),
        )
    except OSError as error:
        fix = f"correct the chief's address in {origin}, or open the network and its firewalls to it"
        return problem(subject, f"{chief} cannot be reached: {error.strerror or error}", fix)
    return ok(subject, f"{chief} answers")


def _holder(port: int) -> str:
    """Returns the process that listens on a TCP port of this machine, if this user may see it."""
    inodes = set(_listening_on(port))
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            names = {os.readlink(entry) for entry in (process / "fd").iterdir()}
            if any(f"socket:[{inode}]" in names for inode in inodes):
                words = (process / "cmdline").read_bytes().split(b"\0")
                command = b" ".join(words).decode(errors="replace").strip()
                return f"process {process.name} ({command[:80]})"
        except OSError:  # another user's process, or one that has ended
            continue
    return "another process"


def _listening_on(port: int) -> Iterator[str]:
    """Yields the inodes of the sockets that listen on a TCP port."""
    for table in ("tcp", "tcp6"):
        try:
            lines = pathlib.Path("/proc/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == _LISTENING and words[1].endswith(f":{port:04X}"):
                yield words[9]
