"""The strategies, and how each finds its towers."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mirrored import cluster
from mirrored.cluster import inherited
from mirrored.cluster.launchers import TPUClusterResolver
from mirrored.cluster.resolver import ClusterError, ClusterResolver
from mirrored.context import current_frame, set_default_strategy
from mirrored.interceptor import interceptor
from mirrored.strategy.base import Strategy
from mirrored.strategy.engine import MIRROR_CHECK_INTERVAL, LocalSteps, TrainingOptions
from towers.collectives.communicator import Alone, Communicator
from towers.collectives.connecting import connect, refuse_unknown_peers
from towers.health import failure
from towers.options import CommunicationOptions, instead_of
from towers.system import accelerator, devices, machine
from towers.system.devices import Device
from towers.system.messages import get_logger
from towers.topology import DEVICES, MEMORY, STARTED_BY, Topology

log = get_logger("mirrored")

COMMUNICATION = (
    "communication=mirrored.CommunicationOptions(implementation=…, algorithm=…, bucket_bytes=…, timeout_seconds=…), "
    "or leave it out: NCCL is used between GPUs"
)


class OneDeviceStrategy(Strategy):
    """Runs the same script on one device, without process groups and hooks.

    Args:
        device: ``"cuda:0"``, ``"cpu:0"``, ``"/gpu:0"`` or a ``torch.device``.
        virtual_towers, seed: see :class:`MirroredStrategy`.
    """

    def __init__(self, device: Device = "cpu:0", *, virtual_towers: int | None = None, seed: int | None = None) -> None:
        chosen = devices.parse(device)
        devices.check_exist([chosen])
        training = TrainingOptions(virtual_towers=virtual_towers)
        super().__init__(Topology(), Alone(_use(chosen)), None, CommunicationOptions(), seed, training)
        if virtual_towers is not None:
            machine.divide_threads(1, alone=True)


class MirroredStrategy(Strategy):
    """Trains one model on all devices of this machine, or on all processes of a launcher.

    Without a launcher, several devices make the constructor restart this script, once per device. This process becomes
    the agent of the towers (``os.exec``). Code before the constructor runs again, so construct the strategy first.
    Under torchrun or srun, the strategy spans their processes. It does not read ``TF_CONFIG``: a ``TF_CONFIG`` of
    several workers is an error.

    Args:
        devices: one per tower of this machine; ``["cpu:0", "cpu:1"]`` are two CPU towers. Default: every visible
            accelerator, or one CPU tower if there is none.
        communication: see :class:`CommunicationOptions`.
        shard_optimizer: whether each tower updates only its shard of the parameters. This divides the optimizer's time
            and memory by the number of towers and does not change the numbers. The optimizer must update each element
            independently (SGD, Adam, AdamW, RMSprop, …); any other raises an error at its first step. ``state_dict()``
            returns the whole state.
        virtual_towers: the number of parts into which the work of a step is split, a power of two that the number of
            towers divides. If the step calls :meth:`Strategy.backward`, it computes the same bits on any such number of
            towers. CPU towers then compute with one thread each, unless ``OMP_NUM_THREADS`` is set.
        mirror_check_interval: the largest number of ``run`` calls between two mirror checks (the second, tenth and
            hundredth call are checked, too). A check compares parameters, optimizer state and optimizer settings bit by
            bit, see :meth:`check_mirrored`. A difference raises a MirrorError on all towers. Towers are also compared
            when a checkpoint is saved and when the program ends. Parameters that are not finite cause a warning only.
            None disables the checks. Between GPUs, the result is read up to ten runs later.
        nonfinite_gradients: "ignore", "warn" or "raise". The default is "ignore", because a ``GradScaler`` creates
            infinities on purpose. "warn" and "raise" name, at the end of each backward, the tower and the gradients
            that are NaN or infinite. "raise" raises a NonFiniteGradientError on all towers, which may catch it, zero
            the gradients and continue. The cost is reading all gradients and one small collective per backward, and on
            GPUs one synchronisation.
        synchronize: :class:`mirrored.LocalSGD` or :class:`mirrored.DiLoCo`, for slow networks: towers step
            independently and average their parameters after a number of steps. None: gradients are averaged in every
            step.
        restarts: the largest number of restarts of all towers after failures, including the loss of a worker. This
            process becomes the agent, even with one tower. The script must restore its newest checkpoint. A failure
            that repeats at the same step ends the job.
        min_towers: the smallest number of towers with which a job continues after a restart. A job of several workers
            then continues without the workers that do not rejoin within ``rejoin_timeout_seconds``, and readmits them
            later. On one machine, a job continues on the remaining devices. With ``virtual_towers``, the number of
            towers is the largest that divides it, so the bits stay the same. None: all towers must rejoin.
        seed: seeds Python's, NumPy's and torch's generators, and is the default seed of ``distribute_dataset``. With
            and without a seed, the generators give equal numbers on all towers outside ``run`` (without it, those of
            tower 0), and different numbers inside. With a seed, the numbers outside ``run`` do not depend on the number
            of towers, and tower i draws the same numbers inside ``run``. Switching generators takes some 30 µs per
            ``run``; one tower without a seed does not switch.

    Raises:
        ValueError: ``devices`` names a CPU twice, a device that does not exist, or a number of devices other than the
            launcher's; ``virtual_towers`` does not fit the number of towers; or an option has an invalid value.
        DisagreementError: the towers received different options.
        CannotStartError: several devices, but the program is not a script (a notebook, a test runner).
        ClusterError: the launcher's variables are wrong, or ``TF_CONFIG`` describes several workers.
        StartupError, HandshakeError: some towers did not join, or they do not belong to the same job.
    """

    _options: Callable[..., TrainingOptions] = TrainingOptions

    @instead_of(cross_device_ops=COMMUNICATION, communication_options=COMMUNICATION)
    def __init__(
        self,
        devices: Sequence[Device] | None = None,
        *,
        communication: CommunicationOptions | None = None,
        shard_optimizer: bool = False,
        virtual_towers: int | None = None,
        mirror_check_interval: int | None = MIRROR_CHECK_INTERVAL,
        nonfinite_gradients: str = "ignore",
        synchronize: LocalSteps | None = None,
        restarts: int = 0,
        min_towers: int | None = None,
        seed: int | None = None,
    ) -> None:
        if restarts != 0 or min_towers is not None:
            from towers.launching.restarting.policy import check_restarts

            check_restarts(restarts, min_towers, virtual_towers)
        training = self._options(
            shard_optimizer=shard_optimizer,
            virtual_towers=virtual_towers,
            mirror_check_interval=mirror_check_interval,
            nonfinite_gradients=nonfinite_gradients,
            synchronize=synchronize,
        )
        communication = CommunicationOptions() if communication is None else communication
        if not isinstance(communication, CommunicationOptions):
            raise TypeError(
                f"communication is {communication!r}, but has to be "
                "mirrored.CommunicationOptions(implementation='nccl', …)"
            )
        resolver, named = self._resolve(), _named_devices(devices)
        if resolver.topology is not None:
            topology, communicator = resolver.topology, _join_towers(resolver.topology, named, communication)
            if restarts and topology.index == 0:
                _warn_of_no_restarts(restarts, min_towers)
        else:
            again = {"restarts": restarts, "min_towers": min_towers, "virtual_towers": virtual_towers}
            device = _start_towers(resolver, named, communication, again)
            topology, communicator = Topology(started_by=_started_by(resolver)), Alone(_use(device))
        super().__init__(topology, communicator, resolver, communication, seed, training)
        _announce(self)

    def _resolve(self) -> ClusterResolver:
        """Returns the cluster: the processes of a launcher, or this machine."""
        launcher = cluster.from_launcher(os.environ)
        cluster.check_no_other_workers(os.environ, launcher, type(self).__name__)
        return launcher or cluster.this_machine(os.environ)


class MultiWorkerMirroredStrategy(MirroredStrategy):
    """Trains one model on all devices of all workers (machines) of a cluster.

    The first of these that exists describes the cluster: ``cluster_resolver``, ``TF_CONFIG``, torchrun's variables,
    SLURM's variables. If none exists, the cluster is this machine. With ``TF_CONFIG``, start the same script on every
    worker. Each process becomes its worker's towers, and all towers connect to the chief's address.

    Args:
        cluster_resolver: for example ``TFConfigClusterResolver()``.
        options: ``devices``, one per tower of this worker, and other options of :class:`MirroredStrategy`.

    Raises:
        ClusterError: the cluster's description is wrong, or two descriptions contradict each other.
        ValueError, CannotStartError, StartupError, HandshakeError: see :class:`MirroredStrategy`.
    """

    @instead_of(communication_options=COMMUNICATION)
    def __init__(self, cluster_resolver: ClusterResolver | None = None, **options: Any) -> None:
        self._own_resolver = cluster_resolver
        super().__init__(**options)

    def _resolve(self) -> ClusterResolver:
        resolver = cluster.resolve(os.environ, self._own_resolver)
        if "ps" in resolver.cluster_spec():
            raise ClusterError(
                f"{resolver.origin}: cluster has 'ps' tasks, but mirrored training has no parameter servers: use "
                "mirrored.ParameterServerStrategy, or remove the job 'ps' and give its machines to 'worker'"
            )
        return resolver


class TPUStrategy(MultiWorkerMirroredStrategy):
    """Trains one model on all TPUs of this host, or of all hosts of a slice, with one tower per TPU.

    It needs torch_tpu (the extra ``tpu``), and is otherwise the strategy of several workers. ``MirroredStrategy()``
    also supports the TPUs of one host.

    Args:
        cluster_resolver: the hosts; default ``TPUClusterResolver()``.
        options: ``devices``, to use only some of this host's TPUs (``["tpu:0", "tpu:1"]``), and other options of
            :class:`MirroredStrategy`.

    Raises:
        ValueError: torch finds no TPU; the message contains the reason and the remedy. Otherwise see
            :class:`MirroredStrategy`.
        ClusterError: the hosts' variables are wrong.
    """

    @instead_of(tpu_cluster_resolver="cluster_resolver=", experimental_device_assignment="each TPU has a tower")
    def __init__(self, cluster_resolver: ClusterResolver | None = None, **options: Any) -> None:
        if why := accelerator.missing_tpu():
            raise ValueError(f"TPUStrategy: {why}. On other devices take MirroredStrategy")
        super().__init__(cluster_resolver or TPUClusterResolver(), **options)


@functools.cache
def default_strategy() -> Strategy:
    """Returns the strategy outside all scopes, which has one replica."""
    return OneDeviceStrategy()


set_default_strategy(default_strategy)


def get_strategy() -> Strategy:
    """Returns the current strategy. Outside every scope and run, that is the default strategy with one replica."""
    current = current_frame()
    strategy = current.strategy if current is not None else default_strategy()
    assert isinstance(strategy, Strategy)
    return strategy


def _named_devices(requested: Sequence[Device] | None) -> Sequence[Device] | None:
    """Returns the devices of this worker's towers that a script, the command line or the interceptor names, or None."""
    if requested is None and (named := os.environ.get(DEVICES)):
        requested = named.split(",")
    return interceptor().devices(requested)


def _join_towers(topology: Topology, named: Sequence[Device] | None, options: CommunicationOptions) -> Communicator:
    """Joins the other towers, in a process that a launcher or the agent has started as a tower.

    Args:
        named: the devices of this worker's towers, if any were named.
    """
    failure.install_hooks()
    by_agent = STARTED_BY in os.environ  # mirrored's own launchers show all GPUs to each tower
    options = _for_shared(named, options)
    device = devices.for_tower(topology.local_index, topology.local_size, named, topology.origin, sees_all=by_agent)
    inherited.record(os.environ)
    log.debug("tower %d of %d on %s joins the others at %s", topology.index, topology.size, device, topology.address)
    return connect(topology, _use(device), options)


def _warn_of_no_restarts(restarts: int, min_towers: int | None) -> None:
    """Warns if the launcher of this tower was not told to restart towers, so that the script's wish has no effect."""
    if MEMORY in os.environ or int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0:
        return
    fewer = "" if min_towers is None else f" --min-towers {min_towers}"
    if os.environ.get(STARTED_BY, "").startswith("mirrored "):
        advice = f"start the script by python, or by mirrored run --restarts {restarts}{fewer}"
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        advice = f"pass --max-restarts {restarts} to torchrun"
    else:
        advice = "it does not restart them"
    log.warning("restarts=%d has no effect, because a launcher has started the towers: %s", restarts, advice)


def _for_shared(named: Sequence[Device] | None, options: CommunicationOptions) -> CommunicationOptions:
    """Returns the options with which towers that share a device average through the host.

    Raises:
        ValueError: the options name another implementation.
    """
    if named is None or not devices.are_shared(devices.parse_all(named)):
        return options
    if options.implementation not in ("auto", "host"):
        raise ValueError(
            f"devices names {', '.join(map(str, named))}: towers that share a device average through the host, "
            f"but implementation is {options.implementation!r}; omit it, or give each tower its own device"
        )
    return dataclasses.replace(options, implementation="host")


def _start_towers(
    resolver: ClusterResolver,
    named: Sequence[Device] | None,
    options: CommunicationOptions,
    again: Mapping[str, Any],
) -> torch.device:
    """Replaces this process by an agent that runs this program once per tower, if no launcher has started towers.

    Args:
        named: the devices of this worker's towers, if any were named.
        again: the fields of the job that are about restarts.

    Returns:
        The device of the only tower. If there are several, the function does not return.
    """
    refuse_unknown_peers()
    _for_shared(named, options)
    chosen = devices.for_worker(named)
    if len(chosen) > 1 or resolver.workers > 1 or again["restarts"]:
        from towers.launching.job import Job, become

        log.debug("starting this program again as %d towers of worker %d", len(chosen), resolver.worker)
        become(
            Job(
                towers=len(chosen),
                kind=chosen[0].type,
                worker=resolver.worker,
                workers=resolver.workers,
                addresses=resolver.addresses,
                origin=resolver.origin,
                started_by=_started_by(resolver),
                startup_seconds=options.startup_timeout_seconds,
                rejoin_seconds=options.rejoin_timeout_seconds,
                collective_seconds=options.timeout_seconds,
                **again,
            )
        )
    return chosen[0]


def _started_by(resolver: ClusterResolver) -> str:
    """Returns the command that the user typed, for the log."""
    return "python with TF_CONFIG" if resolver.origin == "TF_CONFIG" else "python"


def _use(device: torch.device) -> torch.device:
    """Makes ``device`` the current device of its kind. CPU towers all compute on the one CPU device of torch."""
    return accelerator.use(device) if device.type != "cpu" else torch.device("cpu")


def _announce(strategy: Strategy) -> None:
    """Divides the machine's threads among its towers, and logs the towers, their device, backend and launcher."""
    topology = strategy.topology
    if strategy.device.type == "cpu" and topology.size > 1:
        machine.keep_freed_memory()
    threads = machine.divide_threads(topology.local_size, alone=strategy.virtual_towers is not None)
    if not strategy.is_chief:
        return
    where = accelerator.name(strategy.device) if strategy.device.type != "cpu" else "cpu"
    workers = f" of {topology.workers} workers" if topology.workers > 1 else ""
    virtual = f" ({strategy.virtual_towers} virtual)" if strategy.virtual_towers is not None else ""
    log.info(
        "%d tower%s%s%s on %s, %s, %s, started by %s",
        topology.size,
        "s" if topology.size > 1 else "",
        virtual,
        workers,
        where,
        strategy.communicator.backend if topology.size > 1 else Alone.backend,
        threads,
        topology.started_by,
    )
