"""The strategies: how each finds its towers."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mirrored import cluster
from mirrored.cluster.resolver import ClusterResolver
from mirrored.context import current_frame, set_default_strategy
from mirrored.interceptor import interceptor
from mirrored.strategy.base import Strategy
from mirrored.strategy.options import MIRROR_CHECK_INTERVAL, LocalSteps, TrainingOptions
from towers.collectives.communicator import Alone, Communicator
from towers.collectives.connecting import connect, refuse_unknown_peers
from towers.health import failure
from towers.options import CommunicationOptions, instead_of
from towers.system import accelerator, devices, machine
from towers.system.devices import Device
from towers.system.log import get_logger
from towers.topology import DEVICES, STARTED_BY, Topology

log = get_logger("mirrored")

COMMUNICATION = (
    "communication=mirrored.CommunicationOptions(implementation=…, algorithm=…, bucket_bytes=…, timeout_seconds=…), "
    "or leave it out: NCCL is used between GPUs"
)


class OneDeviceStrategy(Strategy):
    """The same script on one device: no process group, no hooks, nothing to wait for.

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
            machine.share_out_threads(1, alone=True)


class MirroredStrategy(Strategy):
    """One model on all devices of this machine, or on all processes of a launcher.

    Without a launcher, several devices make the constructor start this script again, once per device (this process
    becomes their agent by ``os.exec``; code before it runs once more, so construct the strategy first). Under torchrun
    or srun it spans their processes. It does not read ``TF_CONFIG``; one that describes several workers is an error.

    Args:
        devices: one per tower of this machine; ``["cpu:0", "cpu:1"]`` are two CPU towers. Default: every
            visible GPU, else one CPU tower.
        communication: see :class:`CommunicationOptions`.
        shard_optimizer: every tower updates its shard of the parameters only, so that the optimizer's time and memory
            divide by the number of towers; the numbers stay the same. For optimizers that update each element for
            itself (SGD, Adam, AdamW, RMSprop, …); others are an error at their first step. ``state_dict()`` is the
            ordinary one.
        virtual_towers: how many parts the work of a step is cut into, a power of two that the number of towers divides.
            With :meth:`Strategy.backward` a run then has the same bits on any such number of towers, 1 included. CPU
            towers compute with one thread each, unless ``OMP_NUM_THREADS`` says otherwise.
        mirror_check_interval: within so many ``run`` calls (and in the second, tenth and hundredth) the towers compare
            their parameters, optimizer state and optimizer settings bit by bit, see :meth:`check_mirrored`; a
            difference is a MirrorError on all towers. All is compared when a checkpoint is saved, too, and when the
            program ends. Parameters that are not finite only give a warning. None: no such checks. Between GPUs the
            result is read by the tenth run after.
        nonfinite_gradients: "ignore" (the default: a ``GradScaler`` makes infinities on purpose, and what it decides is
            the same on all towers), "warn" or "raise": at the end of each backward say which tower contributed NaN or
            infinity to which gradients; "raise" is a NonFiniteGradientError on all towers, which may catch it, zero
            the gradients and go on. It costs reading all gradients and one small collective a backward; GPUs are waited
            for.
        synchronize: :class:`mirrored.LocalSGD` or :class:`mirrored.DiLoCo`: towers step by themselves and average their
            parameters every so many steps, for slow networks. None: gradients are averaged in every step.
        restarts: how often all towers are started again when some have failed or were killed, perhaps with their
            worker: by this process, which becomes their agent, also where there is one tower. The script has to restore
            its newest checkpoint. A failure that comes back at the same step is the last.
        min_towers: with so many towers a job of several workers goes on where not all of them have come back within
            ``rejoin_timeout_seconds`` after a failure, and with more when they have come; with ``virtual_towers``, with
            the largest number that divides these, to the same bits. On one machine, with the devices that are left.
            None: with all of them only.
        seed: seeds Python's, NumPy's and torch's generators; also the default seed of ``distribute_dataset``.
            With and without it, the generators give equal numbers on all towers outside ``run`` (without it, as
            tower 0's happen to be) and different numbers inside. With it, the numbers outside ``run`` do not depend on
            the number of towers, and tower i draws the same ones inside ``run``. The change of generators takes some
            30 µs a ``run``; one tower without a seed has nothing to change.

    Raises:
        ValueError: ``devices`` names a CPU twice, one that is not there, or another number than the launcher
            started; ``virtual_towers`` does not fit the number of towers; or an option is none of its values.
        DisagreementError: the towers were given different options.
        CannotStartError: several devices, but this is no script of the user's (a notebook, a test runner).
        ClusterError: the launcher's variables are wrong, or ``TF_CONFIG`` describes several workers.
        StartupError, HandshakeError: the towers did not all come, or do not belong together.
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
            from towers.launching.members import check_restarts

            check_restarts(restarts, min_towers, virtual_towers)
        training = self._options(
            shard_optimizer, virtual_towers, mirror_check_interval, nonfinite_gradients, synchronize
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
        else:
            again = {"restarts": restarts, "min_towers": min_towers, "virtual_towers": virtual_towers}
            device = _start_towers(resolver, named, communication, again)
            topology, communicator = Topology(started_by=_started_by(resolver)), Alone(_use(device))
        super().__init__(topology, communicator, resolver, communication, seed, training)
        _announce(self)

    def _resolve(self) -> ClusterResolver:
        """The cluster: the processes of a launcher, or this machine."""
        launcher = cluster.from_launcher(os.environ)
        cluster.check_no_other_workers(os.environ, launcher, type(self).__name__)
        return launcher or cluster.this_machine(os.environ)


@functools.cache
def default_strategy() -> Strategy:
    """The strategy outside of all scopes: one replica, which does nothing."""
    return OneDeviceStrategy()


set_default_strategy(default_strategy)


def get_strategy() -> Strategy:
    """The current strategy; outside every scope and run the default one, which has one replica."""
    current = current_frame()
    strategy = current.strategy if current is not None else default_strategy()
    assert isinstance(strategy, Strategy)
    return strategy


def _named_devices(requested: Sequence[Device] | None) -> Sequence[Device] | None:
    """The devices of this worker's towers that a script, the command line or the interceptor names; else None."""
    if requested is None and (named := os.environ.get(DEVICES)):
        requested = named.split(",")
    return interceptor().devices(requested)


def _join_towers(topology: Topology, named: Sequence[Device] | None, options: CommunicationOptions) -> Communicator:
    """This process is a tower already, which a launcher or our agent has started: join the others.

    Args:
        named: the devices of this worker's towers, if any were named.
    """
    failure.install_hooks()
    ours = STARTED_BY in os.environ  # our launchers show all GPUs to each tower
    options = _for_shared(named, options)
    device = devices.for_tower(topology.local_index, topology.local_size, named, topology.origin, sees_all=ours)
    log.debug("tower %d of %d on %s joins the others at %s", topology.index, topology.size, device, topology.address)
    return connect(topology, _use(device), options)


def _for_shared(named: Sequence[Device] | None, options: CommunicationOptions) -> CommunicationOptions:
    """Towers that share a device average through the host.

    Raises:
        ValueError: they are asked to do it otherwise.
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
    """No launcher has started towers: replace this process by an agent that runs this program once per tower.

    Args:
        named: the devices of this worker's towers, if any were named.
        again: fields of the job, on starting again.

    Returns:
        The device of the only tower, where there is but one; else it does not return.
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
    """The command that a person typed, for the log."""
    return "python with TF_CONFIG" if resolver.origin == "TF_CONFIG" else "python"


def _use(device: torch.device) -> torch.device:
    """Make ``device`` the current one of its kind. CPU towers all compute on the one CPU device of torch."""
    return accelerator.use(device) if device.type != "cpu" else torch.device("cpu")


def _announce(strategy: Strategy) -> None:
    """Share out the machine, and log the line that says how many towers, on what, by which backend, started how."""
    topology = strategy.topology
    if strategy.device.type == "cpu" and topology.size > 1:
        machine.keep_freed_memory()
    threads = machine.share_out_threads(topology.local_size, alone=strategy.virtual_towers is not None)
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
        strategy.communicator.backend,
        threads,
        topology.started_by,
    )
