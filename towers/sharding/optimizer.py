"""Shards the optimizer's step: every tower updates its shards of the parameters, and all towers get all shards.

When an optimizer steps, an inner optimizer does its work (:mod:`towers.sharding.shards`): over this tower's shards of
the parameters, so that time and state are divided by the number of towers. An optimizer that updates each element
independently computes the same bits that way. If towers share memory, one step consists of the following::

    backward                every tower has averaged its chunk of each bucket       towers/gradients/reductions.py
    barrier                 all towers have reached the step
    inner.step()            updates the shards, with their chunk of the gradients
    spread                  each writes its shards into the others' parameters      towers/sharding/transport.py
    barrier                 all parameters are complete

[Note: ways to shard] Towers that share memory average only their own chunks of the gradients
(:mod:`towers.gradients.reductions`), write their shards into each other's parameters, and can read each other's
state without their help. GPUs also average only their chunks, and gather shards and state with collectives. All other
towers (CPUs of several hosts, other accelerators) average whole gradients. With central storage, the updated parameters
and the state are in the memory of one host. :func:`transport_for` decides between them, and no other code of the
sharded step depends on the choice.

[Note: sharding is not the default] It is faster with slow optimizers, and as exact. But reading a gradient on only one
tower (``if strategy.is_chief: log(p.grad.norm())``), which is correct without sharding, becomes an error. So do
optimizers that were not declared element-wise. Code that worked must continue to work.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from towers.collectives.agreement import RepeatedCalls, announce_with_body
from towers.collectives.communicator import Communicator, from_bytes
from towers.collectives.process_group import ProcessGroupCommunicator
from towers.collectives.shared_memory.communicator import SharedMemoryCommunicator
from towers.errors import MirrorError
from towers.gradients.averager import GradientAverager
from towers.gradients.buckets import BucketLayout, DenseSlot, Slot
from towers.sharding import state as sharded_state
from towers.sharding.shards import (
    Shard,
    ShardedState,
    check_elementwise,
    copy_group_settings,
    cut_rows,
    inner_optimizer,
    inner_parameter,
    make_groups,
    shards_of,
    step_inner,
    with_closure_called,
)
from towers.sharding.transport import GatheredParameters, ShardTransport, SharedParameters
from towers.system.messages import get_logger
from towers.system.profiling import range_
from towers.system.tensors import is_dense
from towers.system.torch_private import DisableTorchFunctionSubclass, disable_dynamo, step_hooks

log = get_logger("towers")


def transport_for(channel: Communicator, calls: RepeatedCalls, *, central: bool, timeout: float) -> ShardTransport:
    """Returns the transport between the towers of ``channel``, which averages their gradients. All towers call it.

    Args:
        calls: compares calls of the script with the other towers.
        central: whether one copy of parameters and state is in the memory of a host.
        timeout: seconds for a collective.

    Raises:
        StartupError: on all towers: central storage was selected, and they cannot share memory.
    """
    if central:
        from towers.sharding.central import CentralStorage, on_one_host

        return CentralStorage(channel, on_one_host(channel, timeout))
    if isinstance(channel, SharedMemoryCommunicator):
        return SharedParameters(channel)
    if isinstance(channel, ProcessGroupCommunicator) and channel.may_scatter:
        return GatheredParameters(channel, calls)
    return ShardTransport(channel)


class OptimizerSharder:
    """Shards the steps of optimizers over a strategy's parameters.

    Args:
        averager: averages these parameters' gradients, with the reduction of ``transport``.
        transport: sends shards to the other towers.
    """

    def __init__(self, averager: GradientAverager, transport: ShardTransport) -> None:
        self._averager = averager
        self._transport = transport
        self._known: weakref.WeakKeyDictionary[Optimizer, ShardedOptimizer] = weakref.WeakKeyDictionary()
        self._inner: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._made = 0

    @property
    def state_is_readable(self) -> bool:
        """Whether a single tower can call an optimizer's ``state_dict()``. Otherwise, all towers must call it."""
        return self._transport.state_is_readable

    def is_inner(self, optimizer: Optimizer) -> bool:
        """Returns whether ``optimizer`` does the work of a sharded one."""
        return optimizer in self._inner

    def barrier(self, purpose: str) -> None:
        """Meets all towers where steps start, to detect a tower that steps while others make another call.

        Raises:
            DisagreementError: on all towers, if some make another call.
        """
        self._transport.barrier(purpose)

    def prepare(self, optimizer: Optimizer) -> None:
        """Ensures, before a step of an optimizer, that the inner one does it. All towers call it.

        Raises:
            MirrorError: the optimizer cannot be sharded.
        """
        sharded = self._known.get(optimizer)
        if sharded is None:
            name = f"{type(optimizer).__name__} number {self._made}"
            self._made += 1
            sharded = ShardedOptimizer(optimizer, self._averager, self._transport, name)
            self._known[optimizer] = sharded
            self._inner.add(sharded.inner)
        sharded.move_hooks(optimizer)


@dataclass(frozen=True)
class _Division:
    """The division of one optimizer's parameters among the towers, for the present buckets.

    Attributes:
        layout: the buckets.
        groups: for each of the optimizer's groups, the setting that prevents tables, and the ``id`` of its parameters.
        all_shards, shards: every tower's, and this tower's.
        parameters: the inner optimizer's, one for each shard.
        sharded: the parameters that are not updated whole by every tower.
        templates: for each parameter, a tensor with its shape and strides, without memory.
        spread: sends all towers' shards to all towers.
    """

    layout: BucketLayout
    groups: list[list[Any]]
    all_shards: list[list[Shard]]
    shards: list[Shard]
    parameters: list[nn.Parameter]
    sharded: list[Slot]
    templates: Mapping[Slot, Tensor]
    spread: Callable[[], None]


class ShardedOptimizer:
    """One optimizer and this tower's inner one."""

    def __init__(self, optimizer: Optimizer, averager: GradientAverager, transport: ShardTransport, name: str) -> None:
        check_elementwise(optimizer, transport.feature, transport.remedy)
        self._averager = averager
        self._transport = transport
        self._name = name
        self.inner: Optimizer = inner_optimizer(optimizer)
        self._division: _Division | None = None
        self._groups: list[list[nn.Parameter]] = []  # the optimizer's groups, while its own step runs without them
        self._depth = 0
        self._unused: dict[Any, dict[str, Any]] = {}  # state of parameters that are presently in no group
        key = averager.keys.new()
        self._readable = transport.readable_state(key)
        self._hidden: Any = None
        before = optimizer.register_step_pre_hook(self._before)
        after = optimizer.register_step_post_hook(self._after)
        optimizer.register_state_dict_pre_hook(self._show_state)
        optimizer.register_state_dict_post_hook(self._hide_state)
        self._hooks = before.id, after.id
        weakref.finalize(optimizer, transport.release, key)

    def move_hooks(self, optimizer: Optimizer) -> None:
        """Ensures that the inner one steps after all other hooks of the optimizer, which see its parameters."""
        before, after = self._hooks
        pre_hooks, post_hooks = step_hooks(optimizer)
        pre_hooks.move_to_end(before)
        post_hooks.move_to_end(after, last=False)

    # -- one step ----------------------------------------------------------------------------------------

    @disable_dynamo
    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Lets the inner one step, and leaves no work for the optimizer's own step."""
        self._depth += 1
        if self._depth > 1:  # a subclass has called its parent's step
            return None
        try:
            args, kwargs = with_closure_called(args, kwargs)
            with range_("mirrored::sharded-step"), torch.no_grad(), DisableTorchFunctionSubclass():
                self._step(optimizer, args[1:], kwargs)
        except BaseException:
            self._depth = 0
            raise
        self._groups = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = []
        return args, kwargs

    @disable_dynamo
    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        for group, parameters in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = parameters
        copy_group_settings(self.inner, optimizer)

    def _step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        division = self._division
        if division is not None and division.layout is self._averager.layout:
            self._transport.restore_places(division.sharded)  # before other towers write there
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        new = "" if isinstance(optimizer.state, ShardedState) else " and new state"
        self._transport.begin(f"steps {self._name} with {len(parameters)} parameters{new}", parameters)
        self._averager.refresh()
        groups = [[_hindrance(group), *map(id, group["params"])] for group in optimizer.param_groups]
        addresses = None
        if division is None or division.layout is not self._averager.layout or division.groups != groups:
            division = self._divide(optimizer, groups)
            addresses = [parameter.data_ptr() for parameter in division.parameters]
        if not isinstance(optimizer.state, ShardedState):
            self._take_state(optimizer, division)
        whole = any(shard.whole and shard.nbytes for shard in division.shards)
        self._transport.gather_gradients(division.sharded, whole=whole)
        self._transport.load(division.shards, division.parameters)
        step_inner(optimizer, self.inner, args, kwargs, self._transport.state_device)
        if addresses not in (None, [parameter.data_ptr() for parameter in division.parameters]):
            raise MirrorError(
                f"{self._transport.feature} cannot shard {self._name}: it gives parameters other memory (p.data = …), "
                f"but has to update them in place (p.data.copy_(…)); or {self._transport.remedy}"
            )
        for parameter in division.parameters:
            parameter.grad = None  # the memory of a held gradient cannot be used again
        if self._readable is not None:
            self._readable.keep(self.inner.state, division.parameters)
        division.spread()
        if self._readable is not None:
            self._readable.map_peers()

    # -- dividing ----------------------------------------------------------------------------------------

    def _divide(self, optimizer: Optimizer, groups: list[list[Any]]) -> _Division:
        """Divides the parameters like the present buckets, and their state with them."""
        slots = [[self._slot_of(p, group) for p in group["params"]] for group in optimizer.param_groups]
        flat = [slot for group in slots for slot in group]
        if len(set(flat)) != len(flat):
            raise MirrorError(f"{self._transport.feature} cannot shard {self._name}: it holds a parameter twice")
        if self._division is not None and isinstance(optimizer.state, ShardedState):
            present = {slot.parameter() for slot in flat}
            state = {**self._unused, **self._whole_state()}
            self._unused = {p: values for p, values in state.items() if p not in present}
            optimizer.state = defaultdict(dict, {p: values for p, values in state.items() if p in present})
        cuts = self._cut(flat)
        size = self._transport.channel.size
        all_shards = [shards_of(tower, slots, cuts, size) for tower in range(size)]
        shards = all_shards[self._transport.channel.index]
        templates = {slot: p.detach().to("meta") for slot in flat if (p := slot.parameter()) is not None}
        layout = self._averager.layout
        self._transport.place(list(cuts), layout, self._averager.keys)
        spread = self._transport.plan([[shard for shard in row if not shard.whole] for row in all_shards])
        parameters = [inner_parameter(shard, self._transport.home(shard)) for shard in shards]
        make_groups(optimizer, self.inner, shards, parameters)
        self._division = _Division(layout, groups, all_shards, shards, parameters, list(cuts), templates, spread)
        if isinstance(optimizer.state, ShardedState):
            optimizer.state = defaultdict(dict)
        return self._division

    def _slot_of(self, parameter: Tensor, group: Mapping[str, Any]) -> Slot:
        slot, transport = self._averager.slot_of(parameter), self._transport
        if isinstance(slot, DenseSlot) or (slot is not None and transport.takes_sparse and not _hindrance(group)):
            return slot
        what = f"parameter {slot.name}, with sparse gradients" if slot else "parameters that no scope mirrored"
        hindrance = f", together with {_hindrance(group)}" if slot is not None and transport.takes_sparse else ""
        raise MirrorError(f"{transport.feature} cannot shard {self._name}: it holds {what}{hindrance}")

    def _cut(self, slots: Sequence[Slot]) -> dict[Slot, list[int]]:
        """Returns where tower 0 splits parameters, without parameters that some tower cannot shard.

        All towers update the latter whole.
        """
        channel = self._transport.channel
        local = [self._can_be_sharded(slot) and cut_rows(slot, channel.size) for slot in slots]
        rows = channel.all_gather_json(local)
        cuts = {slot: row[0] for slot, *row in zip(slots, *rows, strict=True) if all(row)}
        whole = [slot for slot in slots if slot not in cuts and slot.shape.numel()]
        names = [slot.name for slot in whole if (p := slot.parameter()) is not None and p.requires_grad]
        if names and channel.index == 0:
            log.info(
                "%s: %d parameters (%s …) are updated whole by every tower: they are not dense in memory, or their "
                "gradients are of another dtype, or something shares them (another parameter, a kept state_dict())",
                self._name,
                len(names),
                ", ".join(names[:3]),
            )
        return cuts

    def _can_be_sharded(self, slot: Slot) -> bool:
        parameter = slot.parameter()
        if parameter is None or not parameter.numel() or not is_dense(parameter):
            return False
        if parameter.dtype != slot.dtype:  # its place in a bucket's region would differ from its gradient's
            return False
        return self._transport.can_place(parameter)

    # -- state -------------------------------------------------------------------------------------------

    def _take_state(self, optimizer: Optimizer, division: _Division) -> None:
        """Shards the optimizer's own state, which it has had from its creation or just received (load_state_dict)."""
        shards: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        for shard, parameter in zip(division.shards, division.parameters, strict=True):
            if state := optimizer.state.get(shard.parameter):
                shards[parameter] = sharded_state.shard_of(state, shard, self._transport.state_device)
        self.inner.state = shards
        optimizer.state = ShardedState(self._name)  # type: ignore[assignment]

    def _whole_state(self) -> dict[Any, dict[str, Any]]:
        """Returns the ordinary state, by parameter. If the state is readable, a single tower can call it."""
        division = self._division
        assert division is not None
        blocks = None if self._readable is None else self._readable.blocks()
        if blocks is None:
            body = sharded_state.encode(self.inner.state, division.parameters).numpy().tobytes()
            replies = announce_with_body(self._transport.channel, f"takes the state of {self._name}", body=body)
            blocks = [from_bytes(reply.body) for reply in replies]
        return sharded_state.merge(division.all_shards, blocks, division.templates, self._transport.state_device)

    def _show_state(self, optimizer: Optimizer) -> None:
        """Gives the optimizer its ordinary state, for ``state_dict()``."""
        self._hidden = optimizer.state
        if isinstance(optimizer.state, ShardedState):
            whole = self._whole_state()
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            optimizer.state = defaultdict(dict, {p: whole[p] for p in parameters if p in whole})

    def _hide_state(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        optimizer.state = self._hidden


def _hindrance(group: Mapping[str, Any]) -> str | None:
    """Returns the setting of a group that prevents rows of a table, or None.

    torch's fused kernels accept no sparse gradients.
    """
    return next((name for name in ("momentum", "fused") if group.get(name)), None)
