"""Sharing out the optimizer's step: every tower updates its part of the parameters, and all get all parts.

An optimizer stays what it is; when it steps, a twin of it does its work: of the same class and with the same settings,
but over this tower's shards of the parameters, so that time and state divide by the number of towers. An optimizer that
updates each element for itself computes the same bits that way. One step goes like this::

    backward                every tower has averaged its part of each bucket        towers/gradients/reduce_scatter.py
    meet                    all have come to the step
    twin.step()             updates the shards, with their part of the gradients
    spread                  each writes its shards into the others' parameters
    meet                    all parameters are whole

Parameters stay each tower's own memory (on one host a window, into which the others write in ``spread`` only), so what
a script does to ``p.data`` on every tower is done once on each. Towers that do not share memory average whole gradients
and gather the updated shards.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from towers.collectives.agreement import announce
from towers.collectives.communicator import Communicator
from towers.collectives.shared_memory.regions import Regions
from towers.errors import MirrorError
from towers.gradients.averager import GradientAverager
from towers.gradients.buckets import DenseSlot
from towers.gradients.lazy import PendingGradient
from towers.sharding import state as sharded_state
from towers.sharding.exchange import Exchange, GatheredParameters, SharedParameters
from towers.sharding.shards import Shard, share_out
from towers.system.log import get_logger
from towers.system.memory_layout import is_dense
from towers.system.torch_private import DisableTorchFunctionSubclass, compiler_traces, disable_dynamo, step_hooks

log = get_logger("towers")

_OWN_SETTINGS = ("params", "capturable")
"""What an optimizer and its twin do not have in common: torch.compile makes the optimizer alone capturable."""

_ELEMENTWISE = (SGD, Adam, AdamW, RMSprop, Adagrad, Adadelta, Adamax, NAdam, RAdam, Rprop, ASGD)


class OptimizerSharder:
    """Shares out the steps of optimizers over a strategy's parameters.

    Args:
        averager: of these parameters' gradients.
        channel: the averager's.
    """

    def __init__(self, averager: GradientAverager, channel: Communicator) -> None:
        self._averager = averager
        self._channel = channel
        self._exchange: Exchange = GatheredParameters(channel)
        if channel.regions is not None:
            self._exchange = SharedParameters(averager, channel)
        self._known: weakref.WeakKeyDictionary[Optimizer, ShardedOptimizer] = weakref.WeakKeyDictionary()
        self._twins: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._made = 0

    def is_twin(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer`` does the work of one that is shared out."""
        return optimizer in self._twins

    def barrier(self, purpose: str) -> None:
        """Meet all towers where steps begin, so that one that steps alone finds the others come for something else.

        Raises:
            DisagreementError: on all towers, when some have.
        """
        self._exchange.begin(purpose)

    def prepare(self, optimizer: Optimizer) -> None:
        """Before a step of an optimizer: see that its twin does it. All towers call it.

        Raises:
            MirrorError: the optimizer cannot be shared out.
        """
        sharded = self._known.get(optimizer)
        if sharded is None:
            name = f"{type(optimizer).__name__} number {self._made}"
            self._made += 1
            sharded = ShardedOptimizer(optimizer, self._averager, self._channel, self._exchange, name)
            self._known[optimizer] = sharded
            self._twins.add(sharded.twin)
        sharded.attach(optimizer)


class ShardedOptimizer:
    """One optimizer and this tower's twin of it."""

    def __init__(
        self,
        optimizer: Optimizer,
        averager: GradientAverager,
        channel: Communicator,
        exchange: Exchange,
        name: str,
    ) -> None:
        self._averager = averager
        self._channel = channel
        self._exchange = exchange
        self._name = name
        self._check(optimizer)
        self.twin: Optimizer = _twin_of(optimizer)
        self._signature: tuple[int, list[list[int]]] | None = None
        self._cut: list[DenseSlot] = []
        self._groups: list[list[nn.Parameter]] = []
        self._depth = 0
        self._left: dict[Any, dict[str, Any]] = {}  # state of parameters that are in no group at present
        self._key = averager.new_key()
        self._block: Tensor | None = None
        self._blocks: list[Tensor | None] = []
        self._hidden: Any = None
        before = optimizer.register_step_pre_hook(self._before)
        after = optimizer.register_step_post_hook(self._after)
        optimizer.register_state_dict_pre_hook(self._show_state)
        optimizer.register_state_dict_post_hook(self._hide_state)
        self._hooks = before.id, after.id
        weakref.finalize(optimizer, channel.release, self._key)

    def attach(self, optimizer: Optimizer) -> None:
        """See that the twin steps after all other hooks of the optimizer, and that they find its parameters again."""
        before, after = self._hooks
        pre_hooks, post_hooks = step_hooks(optimizer)
        pre_hooks.move_to_end(before)
        post_hooks.move_to_end(after, last=False)

    def _check(self, optimizer: Optimizer) -> None:
        kind = type(optimizer)
        if kind not in _ELEMENTWISE and not getattr(kind, "elementwise", False):
            known = ", ".join(sorted(known.__name__ for known in _ELEMENTWISE))
            raise MirrorError(
                f"shard_optimizer=True cannot share out {kind.__name__}.step(): that is known to be right for "
                f"optimizers that update each element for itself ({known}). If {kind.__name__} does, set "
                f"{kind.__name__}.elementwise = True; else leave shard_optimizer out"
            )
        if optimizer.defaults.get("differentiable"):
            raise MirrorError("shard_optimizer=True cannot share out an optimizer with differentiable=True")

    # -- one step ----------------------------------------------------------------------------------------

    @disable_dynamo
    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Let the twin step, and leave the optimizer's own step nothing to do."""
        self._depth += 1
        if self._depth > 1:  # a subclass has called its parent's step
            return None
        try:
            args, kwargs = _closed(args, kwargs)
            with torch.no_grad(), DisableTorchFunctionSubclass():
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
        for group, twins in zip(optimizer.param_groups, self.twin.param_groups, strict=True):
            group.update((name, value) for name, value in twins.items() if name not in _OWN_SETTINGS)

    def _step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._signature is not None and self._signature[0] == self._averager.generation:
            self._exchange.bring_back(self._cut)  # before others write there
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        new = "" if isinstance(optimizer.state, SharedOut) else " and new state"
        self._exchange.begin(f"steps {self._name} with {count} parameters{new}")
        self._averager.refresh()
        signature = (self._averager.generation, [[id(p) for p in group["params"]] for group in optimizer.param_groups])
        if signature != self._signature:
            self._share_out(optimizer)
            self._signature = signature
        if not isinstance(optimizer.state, SharedOut):
            self._take_state(optimizer)
        if any(shard.whole and shard.nbytes for shard in self._shards) or self._has_strange_gradient():
            self._averager.complete()
        for shard, parameter in zip(self._shards, self._parameters, strict=True):
            whole = shard.parameter
            if not shard.is_at(parameter, whole):  # a script has given the parameter other memory
                parameter.data = shard.of(whole)
            gradient = whole.grad
            if gradient is not None and gradient.stride() != whole.stride():
                gradient = torch.empty_like(whole).copy_(gradient)
            parameter.grad = None if gradient is None else shard.of(gradient)
        _copy_settings(optimizer, self.twin)
        step = type(self.twin).step
        getattr(step, "__wrapped__", step)(self.twin, *args, **kwargs)  # without the hooks: those are the optimizer's
        for parameter in self._parameters:
            parameter.grad = None  # who holds a gradient keeps its memory from being used again
        regions = self._channel.regions
        if regions is not None:
            self._keep_state_readable(regions)
        self._spread()
        if regions is not None:
            self._blocks = regions.blocks(self._key)
            if regions.newly_mapped:
                regions.barrier.wait()
                regions.close_files()

    def _has_strange_gradient(self) -> bool:
        """Whether a gradient that is not complete has been given to another parameter."""
        gradients = ((slot, slot.parameter.grad) for slot in self._cut if slot.parameter is not None)
        return any(isinstance(g, PendingGradient) and g is not slot.pending for slot, g in gradients)

    # -- sharing out -------------------------------------------------------------------------------------

    def _share_out(self, optimizer: Optimizer) -> None:
        """Cut the parameters as the buckets are cut now; state goes along."""
        slots = [[self._slot_of(p) for p in group["params"]] for group in optimizer.param_groups]
        flat = [slot for group in slots for slot in group]
        if len(set(flat)) != len(flat):
            raise MirrorError(f"shard_optimizer=True cannot share out {self._name}: it holds a parameter twice")
        if self._signature is not None and isinstance(optimizer.state, SharedOut):
            present = {slot.parameter for slot in flat}
            state = {**self._left, **self._whole_state()}
            self._left = {p: values for p, values in state.items() if p not in present}
            optimizer.state = defaultdict(dict, {p: values for p, values in state.items() if p in present})
        mine = bytes(self._can_be_cut(slot) for slot in flat)
        everybody = self._channel.all_gather_bytes(mine)
        whole = {slot for slot, *can in zip(flat, *everybody, strict=True) if not all(can)}
        names = [slot.name for slot in flat if slot in whole and slot.numel]
        if names and self._channel.index == 0:
            log.info(
                "%s: %d parameters (%s …) are updated whole by every tower: they are not dense in memory, or their "
                "gradients are of another dtype, or something shares them (another parameter, a kept state_dict())",
                self._name,
                len(names),
                ", ".join(names[:3]),
            )
        self._layouts = {
            slot: parameter.detach().to("meta") for slot in flat if (parameter := slot.parameter) is not None
        }
        size = self._channel.size
        self._all_shards = [share_out(slots, whole, size, tower) for tower in range(size)]
        self._shards = self._all_shards[self._channel.index]
        self._cut = [slot for slot in flat if slot not in whole]
        self._exchange.place(self._cut)
        self._spread = self._exchange.plan([[s for s in own if not s.whole] for own in self._all_shards])
        self._parameters = [_twin_parameter(shard) for shard in self._shards]
        own = {name: optimizer.defaults[name] for name in _OWN_SETTINGS if name in optimizer.defaults}
        self.twin.param_groups = [{**group, **own, "params": []} for group in optimizer.param_groups]
        for shard, parameter in zip(self._shards, self._parameters, strict=True):
            self.twin.param_groups[shard.group]["params"].append(parameter)
        if isinstance(optimizer.state, SharedOut):
            optimizer.state = defaultdict(dict)

    def _slot_of(self, parameter: Tensor) -> DenseSlot:
        slot = self._averager.slot_of(parameter)
        if isinstance(slot, DenseSlot):
            return slot
        what = f"parameter {slot.name}, whose gradients are sparse" if slot else "parameters that no scope mirrored"
        raise MirrorError(f"shard_optimizer=True cannot share out {self._name}: it holds {what}")

    def _can_be_cut(self, slot: DenseSlot) -> bool:
        parameter = slot.parameter
        if parameter is None or not parameter.numel() or not is_dense(parameter):
            return False
        if parameter.dtype != slot.dtype:  # it cannot lie in a bucket's window as its gradient does in the bucket
            return False
        return self._exchange.can_place(parameter)

    # -- state -------------------------------------------------------------------------------------------

    def _take_state(self, optimizer: Optimizer) -> None:
        """Cut the optimizer's own state, which it has had from its creation or was just given (``load_state_dict``)."""
        own: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        for shard, parameter in zip(self._shards, self._parameters, strict=True):
            if state := optimizer.state.get(shard.parameter):
                own[parameter] = sharded_state.cut(state, shard)
        self.twin.state = own
        optimizer.state = SharedOut(self._name)  # type: ignore[assignment]
        self._block = None

    def _keep_state_readable(self, regions: Regions) -> None:
        """Keep the state where other towers can read it, and all of it there, also when this one has ended."""

        def allocate(nbytes: int) -> Tensor:
            block = regions.allocate(self._key, nbytes, torch.uint8)
            return _zeros(nbytes) if block is None else block

        inside = range(0)
        if self._block is not None:
            inside = range(self._block.data_ptr(), self._block.data_ptr() + self._block.nbytes)
        values = (value for state in self.twin.state.values() for value in state.values())
        if any(not isinstance(value, Tensor) or value.data_ptr() not in inside for value in values):
            self._block = sharded_state.encode(self.twin.state, self._parameters, allocate, move=True)

    def _whole_state(self) -> dict[Any, dict[str, Any]]:
        """The ordinary state, by parameter; where towers share memory one can ask alone."""
        blocks = self._blocks
        if self._channel.regions is None or any(block is not None and not block.numel() for block in blocks):
            mine = sharded_state.encode(self.twin.state, self._parameters, _zeros)
            everybody = announce(self._channel, f"takes the state of {self._name}", body=mine.numpy().tobytes())
            blocks = [torch.frombuffer(bytearray(said.body), dtype=torch.uint8) for said in everybody]
        return sharded_state.join(self._all_shards, blocks, self._layouts)

    def _show_state(self, optimizer: Optimizer) -> None:
        """For ``state_dict()``, the optimizer has its ordinary state."""
        self._hidden = optimizer.state
        if isinstance(optimizer.state, SharedOut):
            whole = self._whole_state()
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            optimizer.state = defaultdict(dict, {p: whole[p] for p in parameters if p in whole})

    def _hide_state(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        optimizer.state = self._hidden


class SharedOut(dict[Any, Any]):
    """What stands for the state of an optimizer whose twins have it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def _refuse(self, *_: Any) -> NoReturn:
        raise MirrorError(
            f"the state of {self._name} is shared out over the towers (shard_optimizer=True): take it from "
            "optimizer.state_dict(), which has all of it, and give it back by load_state_dict()"
        )

    def __bool__(self) -> bool:
        return True

    def _look(self, *args: Any) -> Any:
        if not compiler_traces():
            self._refuse()
        return iter(())  # torch.compile looks into the state of an optimizer that it traces, and finds none

    __missing__ = __setitem__ = __delitem__ = __contains__ = __deepcopy__ = __reduce_ex__ = _refuse
    get = setdefault = update = pop = popitem = clear = _refuse  # type: ignore[assignment]
    __iter__ = keys = values = items = _look  # type: ignore[assignment]


def _closed(args: Any, kwargs: Any) -> Any:
    """The arguments of a step, its closure called once for the twin and the optimizer both."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        return args, kwargs
    with torch.enable_grad():
        result = closure()
    if len(args) > 1:
        return (args[0], lambda: result, *args[2:]), kwargs
    return args, {**kwargs, "closure": lambda: result}


def _zeros(nbytes: int) -> Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")


def _twin_parameter(shard: Shard) -> nn.Parameter:
    parameter = nn.Parameter(shard.of(shard.parameter), requires_grad=False)
    if parameter.dtype != shard.slot.dtype:
        parameter.grad_dtype = shard.slot.dtype
    return parameter


def _twin_of(optimizer: Optimizer) -> Optimizer:
    """Another of the same class with the same settings, without parameters, state or hooks."""
    twin: Optimizer = object.__new__(type(optimizer))
    hooks = {name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")}  # type: ignore[var-annotated]
    twin.__dict__.update(vars(optimizer), **hooks, state=defaultdict(dict), param_groups=[])
    twin.__dict__.pop("step", None)  # schedulers wrap it
    return twin


def _copy_settings(optimizer: Optimizer, twin: Optimizer) -> None:
    """What schedulers, scalers and scripts may have changed since the last step."""
    for group, twins in zip(optimizer.param_groups, twin.param_groups, strict=True):
        twins.update((name, value) for name, value in group.items() if name not in _OWN_SETTINGS)
    for name in ("grad_scale", "found_inf"):  # as torch.amp.GradScaler hands them to fused optimizers
        if hasattr(optimizer, name):
            setattr(twin, name, getattr(optimizer, name))
        elif hasattr(twin, name):
            delattr(twin, name)
