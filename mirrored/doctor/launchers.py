"""The variables by which torchrun and SLURM tell a process that it is one of several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mirrored import cluster
from mirrored.cluster import ClusterError, ClusterResolver, slurm, tf_config, torchrun
from mirrored.doctor import addresses
from mirrored.doctor.finding import Finding, note, ok, problem, warning

_SUBJECT = "launcher"
_LEFT_OVER = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


def check(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Whether they are complete, and agree with each other and with TF_CONFIG."""
    try:
        launcher = cluster.from_launcher(environ)
    except ClusterError as error:
        yield problem(_SUBJECT, str(error), "unset what is left over from another job, or set what is missing")
        return
    if launcher is None:
        yield from _without(environ)
        return
    yield from _place(launcher)
    if torchrun.present(environ) and slurm.present(environ):
        yield from _two_launchers(launcher, environ)
    try:
        if tf_config.present(environ):
            cluster.resolve(environ)
    except ClusterError as error:
        if "contradict" in str(error):  # what is wrong with TF_CONFIG alone is said elsewhere
            yield problem(_SUBJECT, str(error), "unset the one that is left over")


def _without(environ: Mapping[str, str]) -> Iterator[Finding]:
    left = [name for name in _LEFT_OVER if environ.get(name)]
    if left:
        yield warning(
            _SUBJECT,
            f"{', '.join(left)} set, but not RANK and WORLD_SIZE: taken as started by no launcher",
            f"unset {' '.join(left)}, or start with torchrun, which sets all",
        )
    elif environ.get("SLURM_JOB_ID"):
        yield note(
            _SUBJECT,
            f"in SLURM's job {environ['SLURM_JOB_ID']}, but no task of srun: a program started here is one worker",
            "start it by srun, one task per tower",
        )
    else:
        yield ok(_SUBJECT, "no variables of torchrun or SLURM are set")


def _place(launcher: ClusterResolver) -> Iterator[Finding]:
    topology = launcher.topology
    assert topology is not None
    assert topology.address is not None
    yield note(
        _SUBJECT,
        f"{launcher.origin}: tower {topology.index} of {topology.size}, {topology.local_index} of "
        f"{topology.local_size} on worker {topology.worker} of {topology.workers}",
        "if this is no process of such a job, unset them: they are left over",
    )
    if topology.size == 1:
        return
    host, port = topology.address
    (found,) = addresses.resolve([host])
    if isinstance(found, OSError):
        yield problem(
            _SUBJECT,
            f"the chief's address, {host} (from {launcher.origin}), does not resolve: {found.strerror or found}",
            "correct MASTER_ADDR, or let /etc/hosts or the name server know it",
        )
    elif topology.is_chief and topology.serves_store:
        yield addresses.check_can_serve("chief's port", host, port, launcher.origin)
    else:
        yield addresses.check_can_reach("chief", host, port, launcher.origin)


def _two_launchers(launcher: ClusterResolver, environ: Mapping[str, str]) -> Iterator[Finding]:
    """torchrun inside of srun is common: one agent per task. Then RANK and its like count."""
    try:
        other = cluster.SlurmClusterResolver(environ)
    except ClusterError:
        return
    if launcher.workers != other.workers:
        yield note(
            _SUBJECT,
            f"{launcher.origin} speak of {launcher.workers} workers, SLURM's of {other.workers}; the former count",
        )
