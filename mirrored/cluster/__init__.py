"""Finds the description of this process's cluster. Each kind of description has its own class."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from mirrored.cluster import inherited, launchers
from mirrored.cluster.resolver import ClusterError, ClusterResolver, LocalClusterResolver
from towers.topology import FEWER_WORKERS


def from_launcher(environ: MutableMapping[str, str]) -> ClusterResolver | None:
    """Returns the cluster of this tower's launcher: torchrun's variables (torchrun, the agent, ``launch``) or SLURM's.

    None: no launcher has started this process as a tower.

    Raises:
        CannotStartError: it is a child of a tower, and not a tower.
        ClusterError: the variables are wrong.
    """
    if launchers.torchrun_is_present(environ) or "SLURM_PROCID" in environ:
        inherited.check(environ)
    if launchers.torchrun_is_present(environ):
        return launchers.TorchrunClusterResolver(environ)
    return launchers.SlurmClusterResolver(environ) if launchers.srun_is_present(environ) else None


def check_no_other_workers(environ: Mapping[str, str], launcher: ClusterResolver | None, strategy: str) -> None:
    """Checks that ``TF_CONFIG`` describes no workers that a strategy, which does not read it, would leave out.

    Args:
        launcher: the cluster of the towers, if a launcher has started them.
        strategy: the name of the strategy's class.

    Raises:
        ClusterError: ``TF_CONFIG`` describes more workers than the launcher, or is wrong.
    """
    if not environ.get("TF_CONFIG", "").strip():
        return
    from mirrored.cluster import tf_config

    described, workers = tf_config.TFConfigClusterResolver(environ), launcher.workers if launcher is not None else 1
    if described.workers > workers:
        raise ClusterError(
            f"TF_CONFIG describes {described.workers} workers, but {strategy} does not read it, so every worker would "
            "train alone: use mirrored.MultiWorkerMirroredStrategy(). If every worker is to train alone, run "
            "os.environ.pop('TF_CONFIG') before the strategy is created"
        )


def this_machine(environ: Mapping[str, str]) -> LocalClusterResolver:
    """Returns the cluster of this machine, for a process whose environment describes no cluster.

    Raises:
        ClusterError: the environment is that of torchrun on several machines, as Kubeflow sets it, without torchrun.
    """
    if (nodes := environ.get("PET_NNODES", "1")) not in ("1", "1:1"):
        raise ClusterError(
            f"PET_NNODES is {nodes}, for torchrun, but torchrun has not started this process, which would train alone: "
            "put torchrun in place of python, or unset PET_NNODES"
        )
    return LocalClusterResolver()


def resolve(environ: MutableMapping[str, str], own: ClusterResolver | None = None) -> ClusterResolver:
    """Returns the cluster of a strategy for several workers: TF_CONFIG, torchrun's variables, SLURM's, or one worker.

    The first of these that exists counts. A tower has both ``TF_CONFIG`` and its launcher's variables. They must agree,
    unless the job continues with fewer workers.

    Args:
        own: the script's own resolver, which replaces TF_CONFIG.

    Raises:
        ClusterError: either is wrong, or the two contradict each other. In that case the message names both.
    """
    described = own
    if described is None and "TF_CONFIG" in environ:
        from mirrored.cluster import tf_config

        if tf_config.present(environ):
            described = tf_config.TFConfigClusterResolver(environ)
    launcher = from_launcher(environ)
    if described is None:
        return launcher or this_machine(environ)
    if launcher is not None and described.topology is None:
        same = (described.workers, described.worker) == (launcher.workers, launcher.worker)
        if not same and FEWER_WORKERS not in environ:
            raise ClusterError(
                f"{described.origin} and {launcher.origin} contradict each other: {described.origin} names "
                f"worker {described.worker} of {described.workers}, {launcher.origin} name worker "
                f"{launcher.worker} of {launcher.workers}; unset the one that is left over from another job"
            )
        described.topology = launcher.topology
    return described
