"""Models whose parameters, gradients and optimizer states are sharded over the towers, by torch's ``fully_shard``.

A model is divided into units, such as the blocks of a transformer, and the rest. A tower stores a part of each unit,
and gathers the whole unit for its computation. The outermost unit stays whole from forward to backward. By default,
hosts with the same number of towers hold the same parts.

[Note: one unit at a time] A model on the ``meta`` device is initialised unit by unit, by the ``reset_parameters`` of
its layers or ``_init_weights`` of a model of Hugging Face. Each unit is sharded before the next one is initialised, so
a tower never holds the whole model. All towers draw the same random numbers outside of runs, so the values do not
depend on the number of towers.

[Note: the gradients of sharded parameters] torch reduces them in backward: the mean over the towers of losses that
``compute_average_loss`` has scaled for a mean. The averager does not process these parameters. Their gradients exist
only after that reduction, and need no guard. Their values differ between the towers of a host, so the mirror check
compares hosts with equal parts, and the numbers of steps.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from towers.collectives.agreement import announce
from towers.collectives.communicator import Communicator
from towers.collectives.process_group import ProcessGroupCommunicator, communicator_over, forming
from towers.errors import MirrorError
from towers.health.status import AVERAGING
from towers.mirroring import fingerprints
from towers.system.machine import return_freed_memory
from towers.system.tensors import Named, in_layout_of
from towers.system.torch_private import move_own, own_buffers, own_parameters

GATHERING = "gathering parameters"

Unit = type[nn.Module] | str
"""A class of modules, or its name."""


_communicators: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Communicator]] = weakref.WeakKeyDictionary()
"""The towers over which each model is sharded."""


def shard(
    strategy: Any,
    model: nn.Module,
    units: Sequence[Unit] | None,
    reshard_after_forward: bool | None,
    mixed_precision: MixedPrecisionPolicy | None,
    replicate_across_hosts: bool,
) -> None:
    """Shards a model over the towers; see ``Strategy.shard``."""
    engine = strategy.engine
    _check(engine, model)
    groups = [_Unit(name or type(model).__name__, unit) for name, unit in _units(model, units)]
    groups = _with_own_weights(model, groups, are_given=units is not None)
    for unit in groups:
        unit.check()
    originals = dict(model.named_parameters())
    engine.forget(model)
    options: dict[str, Any] = {}
    several = strategy.num_replicas_in_sync > 1
    if several:
        options["mesh"], communicator = _meshes(strategy, replicate_across_hosts)
    if reshard_after_forward is not None:
        options["reshard_after_forward"] = reshard_after_forward
    if mixed_precision is not None:
        options["mp_policy"] = mixed_precision
    if several and strategy.device.type == "cpu":
        return_freed_memory()
    for unit in groups:
        unit.initialise(strategy.device, getattr(model, "_init_weights", None))  # of Hugging Face
        if several:
            engine.make_equal(unit.named_tensors())
            sharded: Any = fully_shard(unit.module, **options)
            sharded.set_custom_all_gather(_Gather(communicator))
            sharded.set_custom_reduce_scatter(_ReduceScatter(communicator))
    model.register_load_state_dict_pre_hook(_take_parts)
    engine.add_sharded(model, originals)
    _communicators[model] = weakref.ref(strategy.communicator)


def _take_parts(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Lets ``load_state_dict`` take whole tensors, of which each tower keeps its part."""
    for name, place in model.named_parameters(remove_duplicate=False):
        if (key := prefix + name) in state:
            state[key] = in_layout_of(place, state[key])


def communicator_of(model: nn.Module) -> Communicator:
    """Returns the communicator of the towers over which a model, or a part of it, is sharded.

    Raises:
        ValueError: no strategy has sharded it.
    """
    for root, reference in _communicators.items():
        communicator = reference()
        if communicator is not None and not set(root.modules()).isdisjoint(model.modules()):
            return communicator
    raise ValueError(f"this {type(model).__name__} was sharded, but not by strategy.shard")


def _fingerprints_of_host(recorder: Any, towers: ProcessGroupCommunicator) -> list[tuple[str, Tensor]]:
    """Returns a fingerprint of all parts on this host of each parameter whose parts are replicated between hosts.

    Hosts with equal parameters have equal fingerprints. All towers call it together.

    Args:
        towers: those of this host.
    """
    named = [
        (f"{name}.{path}", parameter)
        for name, model in recorder.roots()
        for path, parameter in model.named_parameters()
        if isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 2
    ]
    if not named:
        return []
    parts = fingerprints([parameter.to_local().detach() for _, parameter in named])
    parts *= 2 * towers.index + 1  # equal parts in another order differ
    towers.all_reduce(parts)
    return [(name, fingerprint) for (name, _), fingerprint in zip(named, parts, strict=True)]


def _check(engine: Any, model: nn.Module) -> None:
    if (option := engine.hindrance_to_sharding) is not None:
        raise ValueError(f"strategy.shard cannot be combined with {option}: leave one of the two out")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(f"{name} is sharded already: give strategy.shard a model of plain parameters")
        if engine.recorder.is_mirrored(parameter):
            raise MirrorError(
                f"{name} is mirrored already, because strategy.run was called before strategy.shard: shard a model "
                "before its first run"
            )


def _units(model: nn.Module, units: Sequence[Unit] | None) -> list[tuple[str, nn.Module]]:
    """Returns the units with their paths, the innermost first.

    Raises:
        ValueError: a unit matches no module of the model.
    """
    kinds = {type(layer) for layer in model.modules()}
    if units is None:  # Hugging Face names them, also those of other parts of a family of models
        names = sorted(getattr(model, "_no_split_modules", None) or ())
        units = [name for name in names if any(_is(kind, name) for kind in kinds)]
    elif isinstance(units, (str, type)):
        units = [units]
    for unit in units:
        if not any(_is(kind, unit) for kind in kinds):
            name = unit if isinstance(unit, str) else unit.__name__
            there = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise ValueError(f"units={name} matches no module of {type(model).__name__}, which has {there}")
    found = [(name, layer) for name, layer in model.named_modules() if any(_is(type(layer), unit) for unit in units)]
    return found[::-1]


def _with_own_weights(model: nn.Module, units: list[_Unit], *, are_given: bool) -> list[_Unit]:
    """Returns the units of a model, with the outermost one, each with its own layers and no weight of another unit.

    Args:
        units: the innermost first. They are changed.
        are_given: whether the script has chosen them. Others that share a weight become part of the unit around them.

    Raises:
        ValueError: two units share a weight, which torch must gather with one of them.
    """
    if all(unit.module is not model for unit in units):
        units = [*units, _Unit(type(model).__name__, model)]
    for number, unit in enumerate(units):
        for other in units[:number]:  # the inner ones are first
            unit.leave_out(other)
    owners: dict[int, _Unit] = {}
    for unit in units:
        for path, _, name, tensor in unit.tensors():
            owner = owners.setdefault(id(tensor), unit)
            if owner is unit or not isinstance(tensor, nn.Parameter):
                continue
            if are_given:
                raise ValueError(
                    f"{'.'.join(filter(None, (unit.name, path, name)))} is also a weight of the unit {owner.name}: "
                    f"leave {type(owner.module).__name__} out of units, or choose units that contain both"
                )
            rest = [_Unit(other.name, other.module) for other in units if other is not owner]
            return _with_own_weights(model, rest, are_given=False)
    return units


def _is(kind: type, unit: Unit) -> bool:
    return any(base.__name__ == unit for base in kind.__mro__) if isinstance(unit, str) else issubclass(kind, unit)


def _meshes(strategy: Any, replicate_across_hosts: bool) -> tuple[DeviceMesh, ProcessGroupCommunicator]:
    """Returns torch's mesh of the towers, and a communicator over the towers that hold one model together."""
    meshes = strategy.engine.meshes
    if replicate_across_hosts not in meshes:
        device, topology = strategy.device, strategy.topology
        local_sizes = set(announce(strategy.communicator, "shards a model", topology.local_size))
        sizes: tuple[int, ...] = (topology.size,)
        names: tuple[str, ...] = ("shard",)
        if replicate_across_hosts and len(local_sizes) == 1 and topology.local_size < topology.size:
            sizes, names = (topology.size // topology.local_size, topology.local_size), ("replicate", "shard")
        with forming(dist.get_backend()):
            mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
        over = communicator_over(mesh.get_group("shard"), strategy.communicator, strategy.engine.timeout)
        meshes[replicate_across_hosts] = mesh, over
        if mesh.ndim == 2:
            strategy.engine.replicated_parts = functools.partial(_fingerprints_of_host, strategy.engine.recorder, over)
    made: tuple[DeviceMesh, ProcessGroupCommunicator] = meshes[replicate_across_hosts]
    return made


class _Allocates:
    """The memory of torch's collectives; see ``FSDPModule.set_custom_all_gather``.

    With a communicator's collectives in place of torch's own, a tower that does not take part is found and named.
    """

    def __init__(self, communicator: ProcessGroupCommunicator) -> None:
        self._communicator = communicator

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class _Gather(_Allocates):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        return self._communicator.gather_parts(output_tensor, input_tensor, GATHERING, async_op=async_op)


class _ReduceScatter(_Allocates):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        return self._communicator.reduce_parts(output_tensor, input_tensor, op, AVERAGING, async_op=async_op)


def _receives_values(layer: nn.Module, device: torch.device, initialise: Callable[[nn.Module], Any] | None) -> bool:
    """Gives values to the tensors of a layer, and returns whether each tensor received some.

    Before, numbers are filled with a value that none has. Every value of other tensors is possible, so the layer is
    initialised twice, after different values.
    """
    tensors = (*own_parameters(layer).values(), *own_buffers(layer).values())
    own = [tensor.detach() for tensor in tensors if tensor is not None]
    impossible = [_impossible(tensor.dtype) for tensor in own]
    initialise = initialise or (lambda layer: getattr(layer, "reset_parameters", lambda: None)())

    def give_values(other: bool) -> list[Tensor]:
        for tensor, value in zip(own, impossible, strict=True):
            tensor.fill_(other if value is None else value)
        initialise(layer)
        return [tensor.clone() for tensor, value in zip(own, impossible, strict=True) if value is None]

    first: list[Tensor] = []
    if None in impossible:
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
            first = give_values(True)
    second = give_values(False)
    if any(not torch.equal(one, other) for one, other in zip(first, second, strict=True)):
        return False
    numbers = [(tensor, value) for tensor, value in zip(own, impossible, strict=True) if value is not None]
    return not any(bool((tensor.isnan() if value != value else tensor == value).any()) for tensor, value in numbers)


def _impossible(dtype: torch.dtype) -> float | None:
    """Returns a value that no tensor of a model has, or None if there is none."""
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return torch.iinfo(dtype).min if dtype.is_signed else None


class _Unit:
    """A module whose parameters are gathered together, except those of units inside it."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self._layers = {id(layer): (path, layer) for path, layer in module.named_modules()}

    def leave_out(self, inner: _Unit) -> None:
        """Leaves the layers of a unit inside this one to that unit."""
        if id(inner.module) in self._layers:
            for key in inner._layers:
                self._layers.pop(key, None)

    def tensors(self) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
        """Yields the tensors of the unit's own layers: path, layer, name, tensor. Tied weights recur."""
        for path, layer in self._layers.values():
            for name, tensor in (*own_parameters(layer).items(), *own_buffers(layer).items()):
                if tensor is not None:
                    yield path, layer, name, tensor

    def check(self) -> None:
        """Checks that torch can shard the unit.

        Raises:
            ValueError: its parameters have several dtypes.
        """
        parameters = ((path, name, t.dtype) for path, _, name, t in self.tensors() if isinstance(t, nn.Parameter))
        kinds = {kind: f"{path}.{name}".strip(".") for path, name, kind in parameters}
        if len(kinds) > 1:
            examples = " and ".join(f"{name} is {str(kind).removeprefix('torch.')}" for kind, name in kinds.items())
            raise ValueError(
                f"the parameters of a unit must have one dtype, but in {self.name}, {examples}: convert them, or make "
                "smaller units"
            )

    def initialise(self, device: torch.device, initialise: Callable[[nn.Module], Any] | None) -> None:
        """Gives the unit's tensors memory on a device, and those on ``meta`` their first values.

        Args:
            initialise: gives values to the tensors of a layer. Default: the layer's ``reset_parameters``.

        Raises:
            ValueError: a layer on ``meta`` receives no values.
        """
        on_meta: dict[int, list[tuple[nn.Module, str]]] = {}
        for _, layer, name, tensor in self.tensors():
            if tensor.is_meta:
                on_meta.setdefault(id(tensor), []).append((layer, name))
        waiting = {id(layer) for places in on_meta.values() for layer, _ in places}
        for path, layer in self._layers.values():
            if id(layer) not in waiting:
                move_own(layer, device)
                continue
            layer.to_empty(device=device, recurse=False)
            if not _receives_values(layer, device, initialise):
                raise ValueError(
                    f"{path or self.name} ({type(layer).__name__}) has tensors on the meta device, but no "
                    "reset_parameters() that gives them values: define it, or create the model on a real device"
                )
        for (first, name), *others in on_meta.values():
            for layer, other in others:  # tied weights
                setattr(layer, other, getattr(first, name))

    def named_tensors(self) -> list[Named]:
        """Returns the unit's own tensors."""
        found: dict[int, Named] = {}
        for path, _, name, tensor in self.tensors():
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            full = ".".join(filter(None, (self.name, path, name)))
            if not isinstance(tensor, DTensor):  # a weight that an inner unit has, too
                found.setdefault(id(tensor), Named(full, tensor, kind, tensor.requires_grad))
        return list(found.values())
