"""Watches a script's calls of torch: losses, random numbers, BatchNorm, writes to parameters."""

from __future__ import annotations

import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from mirrored.context import current_frame, current_replica
from mirrored.empty_shares import takes_statistics_of_all_towers
from mirrored.verification import draws
from mirrored.verification.interventions import Interventions, LossFactor, divisor_factors, in_double
from mirrored.verification.loss_graph import scale_terms, terms_of
from mirrored.verification.trace import (
    Draw,
    Event,
    Happened,
    Loss,
    RunCall,
    Sketch,
    Term,
    Trace,
    has_values,
    memory_of,
    sketch,
    tensors_of,
)
from towers import batch_norm
from towers.collectives.labelled import LabelledGather
from towers.system.messages import class_name
from towers.system.torch_private import NormBase, in_functorch_transform, own_buffers, unsaved_buffers

_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)

_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""The names of the arguments of ``F.scaled_dot_product_attention``."""

_NO_WRITES = frozenset({"requires_grad_", "retain_grad_", "share_memory_"})

_SET_GRADIENT: Any = Tensor.grad.__set__  # type: ignore[union-attr]

_ZEROING = frozenset({"zero_", "_foreach_zero_"})

_WRITING_OPERATORS = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"})

_STATISTICS = ("running_mean", "running_var")

_OVER_EXAMPLES = {
    **dict.fromkeys(("sum", "mean", "nanmean", "prod", "max", "min", "amax", "amin", "median", "nanmedian", "mode"), 1),
    **dict.fromkeys(("std", "var", "std_mean", "var_mean", "logsumexp", "bincount", "cov", "corrcoef"), 1),
    **dict.fromkeys(("norm", "vector_norm", "quantile", "nanquantile", "topk", "kthvalue"), 2),
}
"""Functions that may compute one value from all examples of a batch, with the position of their argument ``dim``."""


def script_line() -> int | None:
    """Returns the line of the script that is being executed, if it is on the stack."""
    for frame, line in traceback.walk_stack(sys._getframe()):
        if frame.f_globals.get("__name__") == "__main__" and frame.f_code.co_filename != "<string>":
            return line
    return None


def _line_that_creates() -> int | None:
    """Returns the line of the script that creates the outermost module whose ``__init__`` is being executed."""
    line = None
    for frame, number in traceback.walk_stack(sys._getframe(1)):
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), nn.Module):
            line = None
        elif line is None and frame.f_globals.get("__name__") == "__main__":
            line = number
    return line


def is_called_by_us(*libraries: str) -> bool:
    """Returns whether this package, outside of the calling module, makes the current call.

    Args:
        libraries: packages through which it may make the call.
    """
    caller = sys._getframe(1)
    for frame, _ in traceback.walk_stack(caller):
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if frame.f_globals is not caller.f_globals and package not in libraries:
            return package in ("mirrored", "towers")
    return False


def in_a_graph() -> bool:
    """Returns whether torch builds a graph of the calls (a trace, an export), into which recording calls would go.

    The computations of such calls are not training.
    """
    return torch.jit.is_tracing() or torch.compiler.is_compiling() or torch.compiler.is_exporting()


class Modules:
    """The modules that the script has called, and the names of their parameters and buffers.

    Attributes:
        parameters: the parameters of the optimizers that have made a step, by name.
        calls: the modules that are being called, the innermost last.
        lines: the lines of the script that created these parameters, and that last changed a buffer, by name.
    """

    def __init__(self) -> None:
        self.parameters: dict[str, Tensor] = {}
        self.calls: list[nn.Module] = []
        self.lines: dict[str, int | None] = {}
        self._created = WeakIdKeyDictionary()  # lines, by parameter
        self._assigned: weakref.WeakKeyDictionary[nn.Module, dict[str, int | None]] = weakref.WeakKeyDictionary()
        self._buffer_addresses: dict[int | None, str] = {}
        register_module_parameter_registration_hook(self._note_parameter)
        register_module_buffer_registration_hook(self._note_buffer)
        self._roots: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._names: dict[int, str] = {}
        self._addresses: dict[int | None, str] = {}

    def _note_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter not in self._created:
            self._created[parameter] = _line_that_creates()

    def _note_buffer(self, module: nn.Module, name: str, buffer: Tensor | None) -> None:
        self._assigned.setdefault(module, {})[name] = script_line()

    def roots(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields the modules that were called from outside of modules and still exist, with names."""
        for name, reference in self._roots:
            if (root := reference()) is not None:
                yield name, root

    def root_name(self, module: nn.Module) -> str:
        """Returns the name of an outermost module: its class and, from the second of the class on, a number."""
        for name, root in self.roots():
            if root is module:
                return name
        kind = class_name(module)
        number = sum(root.split("[")[0] == kind for root, _ in self._roots)
        name = f"{kind}[{number}]" if number else kind
        self._roots.append((name, weakref.ref(module)))
        return name

    def leave(self, module: nn.Module) -> None:
        """Ends a module's call, and the calls within it that an exception has ended."""
        while self.calls and self.calls.pop() is not module:
            pass

    def innermost(self) -> str:
        """Returns the name of the innermost module that is being called, for messages."""
        module = self.calls[-1] if self.calls else None
        for name, root in self.roots():
            for path, candidate in root.named_modules():
                if candidate is module:
                    return f"{name}.{path}" if path else name
        return class_name(module) if module is not None else "a batch norm outside of modules"

    def name_parameters(self, parameters: Sequence[Tensor], optimizer: int) -> list[str]:
        """Returns the names of an optimizer's parameters: their paths, or otherwise their indices in the optimizer."""
        if not all(id(p) in self._names for p in parameters):
            paths = {id(p): f"{name}.{path}" for name, root in self.roots() for path, p in root.named_parameters()}
            for i, p in enumerate(parameters):
                if id(p) not in self._names:
                    self._names[id(p)] = name = paths.get(id(p), f"parameter {i} of optimizer {optimizer}")
                    self.parameters[name] = p  # replaces a former one
                    self.lines[name] = self._created.get(p)
        return [self._names[id(p)] for p in parameters]

    def note_addresses(self) -> None:
        """Notes the addresses of parameters and buffers, so that :meth:`written` can identify them by their memory."""
        self._addresses = {memory_of(p): name for name, p in self.parameters.items()}
        self._buffer_addresses = {memory_of(buffer): name for name, buffer in self.buffers(False)}

    def written(self, tensor: Any) -> str | None:
        """Returns the parameter that shares a tensor's memory, or None. The line of a buffer that does is noted."""
        if not isinstance(tensor, Tensor) or not self._addresses or (address := memory_of(tensor)) is None:
            return None
        if (buffer := self._buffer_addresses.get(address)) is not None:
            self.lines[buffer] = script_line()
        return self._addresses.get(address)

    def hold_gradients(self, value: Any) -> bool:
        """Returns whether a tensor, or one of several, shares the memory of the gradient of a module's parameter."""
        named = [each for _, root in self.roots() for each in nn.Module.named_parameters(root)]  # Keras' creates some
        gradients = {memory_of(p.grad) for _, p in named if p.grad is not None} - {None}
        return any(memory_of(tensor) in gradients for tensor in tensors_of(value))

    def buffers(self, several: bool) -> Iterator[tuple[str, Tensor]]:
        """Yields the buffers that must be equal on any number of towers, with names.

        Buffers in no ``state_dict`` are left out. With ``several`` towers, so are the running statistics of layers that
        normalise over each tower's own examples, because their effect on training is compared.
        """
        for name, root in self.roots():
            for path, module in root.named_modules():
                local = several and isinstance(module, NormBase) and not takes_statistics_of_all_towers(module)
                for key, buffer in own_buffers(module).items():
                    if buffer is None or not has_values(buffer) or key in unsaved_buffers(module):
                        continue
                    if not (local and key in _STATISTICS):
                        full = ".".join(filter(None, (name, path, key)))
                        # A later change in place has another line, see :meth:`written`.
                        if (line := self._assigned.get(module, {}).pop(key, None)) is not None:
                            self.lines[full] = line
                        yield full, buffer


class ByHand(Optimizer):
    """An optimizer whose steps change nothing: its hooks record the gradients of a script without optimizers."""

    def __init__(self) -> None:
        super().__init__([{"params": []}], {})

    def step_on(self, parameters: Iterable[nn.Parameter]) -> None:
        """Makes a step of the parameters that have gradients."""
        self.param_groups[0]["params"] = [p for p in parameters if p.grad is not None]
        self.step()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Changes nothing."""


class Watcher(TorchFunctionMode):
    """Records the script's actions inside the context, and applies the run's interventions.

    It leaves dropout out and replaces other random numbers in ``run``, so that one tower and several compute the same;
    see [Note: random numbers in a comparison] of the draws.

    Args:
        trace: the recording, which leaves the process at the end.
        interventions: the changes of this run.

    Attributes:
        modules: the script's modules.
        call: the running call of ``strategy.run``.
        tower: this tower's index.
        losses: the losses of the backwards since the last step.
        batch_norms: layers that used only this tower's statistics since the last step.
        averaged: the gradients at the end of the last backward that averaged, by the identity of the parameter.
        stepping: whether an optimizer's step is running.
        drawn: the state of torch's generators after the last draw in ``run`` that was noticed.
        refused: the BatchNorm layer that could not normalise a share of one example.
        by_hand: makes the steps of a script that updates its parameters itself.
    """

    def __init__(self, trace: Trace, interventions: Interventions) -> None:
        self.trace = trace
        self.interventions = interventions
        self.modules = Modules()
        self.call: RunCall | None = None
        self.tower = 0
        self.losses: list[Loss] = []
        self.batch_norms: dict[str, None] = {}
        self.averaged: dict[int, Sketch] = {}
        self.stepping = False
        self.drawn = ""
        self.refused: str | None = None
        self.by_hand = ByHand()
        self._accumulated = False  # whether the last backward was in no_sync, so that gradients are this tower's own
        self._gather: LabelledGather | None = None  # for global BatchNorm

    @property
    def _share(self) -> tuple[int, int]:
        """Returns the numbers of examples (this tower, all towers) in the current step; (0, 0) if unknown."""
        return self.call.shares[0] if self.call is not None and self.call.shares else (0, 0)

    @property
    def device(self) -> torch.device:
        """This tower's device."""
        frame = current_frame()
        return frame.strategy.device if frame is not None else torch.device("cpu")

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        result = self._watch(func, args, named)
        if not self.interventions.double or _shares_memory(result, args, named):
            return result
        return in_double(result)

    def _watch(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if in_a_graph():
            return func(*args, **named)
        name = getattr(func, "__name__", "")
        if func is Tensor.backward:
            return self._backward(*args, **named)
        if func is F.batch_norm:
            return self._batch_norm(*args, **named)
        if func in _DROPOUTS:
            return self._dropout(func, *args, **named)
        if func is F.scaled_dot_product_attention:
            return self._attention(**dict(zip(_ATTENTION, args, strict=False)), **named)
        if name in draws.DRAWING and not in_functorch_transform():
            if self.call is not None:
                return self._random(self.call, name, func, args, named)
            if self.trace.datasets and sys._getframe(2).f_globals.get("__name__") == "__main__":
                self._note(Happened.DRAW, name)
        if args and _writes(name, func) and not self.stepping:
            if (parameter := self.modules.written(args[0])) is not None:
                self._note(Happened.WRITE, parameter)
            if name not in _ZEROING and self.modules.hold_gradients(args[0]):
                self._note(Happened.CHANGE, name, averaged=not self._accumulated)
                if self._accumulated and self.interventions.skip_local_changes:
                    return args[0]
        if func == _SET_GRADIENT and args[1] is not None and not self.stepping:
            self._note(Happened.CHANGE, "an assignment", averaged=not self._accumulated)
        if func is Tensor.register_hook and args[0].is_leaf and args[0].requires_grad:
            self._note(Happened.CHANGE, name)
            if self.interventions.skip_local_changes:
                return func(args[0], lambda gradient: None)
        if self.call is not None and (dim := self._over_examples(self.call, name, args, named)) is not None:
            place = script_line(), name
            self.call.over_examples.setdefault(place, self._share[0])
            if place in self.interventions.whole_batch and (replica := current_replica()) is not None:
                args = (replica.all_gather(args[0], axis=dim), *args[1:])
        result = func(*args, **named)
        if self.call is None or (local := len(self.call.examples)) < 2:
            return result
        if isinstance(result, Tensor) and result.requires_grad and result.shape[-2:] == (local, local):
            self.call.over_examples.setdefault((script_line(), None), local)
        return result

    def _over_examples(self, call: RunCall, name: str, args: Sequence[Any], named: Mapping[str, Any]) -> int | None:
        """Returns the dimension of the examples over which the script, or its model, calls a function; None if none."""
        if name not in _OVER_EXAMPLES or not args or type(args[0]) is not Tensor:
            return None
        shape = args[0].shape
        local, total = next((share for share in call.shares if share[:1] == shape[:1]), self._share)
        if local == total or total < self.trace.towers or local not in shape or in_functorch_transform():
            return None
        if is_called_by_us("torch"):
            return None
        dim, at = shape.index(local), _OVER_EXAMPLES[name]
        over = named.get("dim", args[at] if len(args) > at else None)
        dims = over if isinstance(over, (tuple, list)) else [over]
        given = [each % len(shape) for each in dims if isinstance(each, int) and not isinstance(each, bool)]
        return dim if dim in given or not given else None

    def _note(self, kind: Happened, what: str, averaged: bool = False) -> None:
        self.trace.events.append(Event(kind, what, script_line(), len(self.trace.steps), averaged))

    # For the next three functions, torch passes all arguments after the tensors by name, even defaults.

    def _backward(self, loss: Tensor, gradient: Tensor | None, **options: Any) -> None:
        if self.call is not None:
            self.call.trained = True
        terms = terms_of(loss)
        whole, factors = self._factors(terms)
        if loss.numel() == 1:
            value = float(loss.detach().double().real)
            # A factor of 0 turns even NaN, the mean over an empty share, into 0.
            multiplied = None if factors else value * whole if whole else 0.0
            self.losses.append(Loss(multiplied, terms, script_line(), self._share))
        scaled = scale_terms(loss, factors)
        self._accumulated = False  # averaging's writes are not changes by the script (torch 2.9 reports them)
        try:
            with self:  # recomputations in backward (checkpoints) are watched, too
                torch.autograd.backward(loss if whole == 1.0 else loss * whole, gradient, **options)
        finally:
            for handle in scaled:
                handle.remove()
        frame = current_frame()
        self._accumulated = frame is not None and frame.strategy.accumulates
        if self.call is None or self._accumulated:
            return
        parameters = [p for _, root in self.modules.roots() for p in root.parameters()]
        if not self.stepping or len(self.losses) == 1:  # of several in an optimizer's closure, the first counts
            self.averaged = {id(p): sketch(p.grad) for p in parameters if p.grad is not None and has_values(p.grad)}
        if self.interventions.by_hand:
            self.by_hand.step_on(parameters)

    def _factors(self, terms: Sequence[Term]) -> tuple[float, dict[int, float]]:
        """Returns the factors by which this run multiplies a whole loss, and some of several summands."""
        replica, change = current_replica(), self.interventions.loss
        if replica is None or self.call is None or change is LossFactor.NONE:
            return 1.0, {}
        if change is LossFactor.DIVISOR:
            factors = divisor_factors(replica, [term.divisor for term in terms])
            return (factors[0], {}) if len(factors) == 1 else (1.0, factors)
        factor, some = change.of(self.trace.towers, *self._share), self.interventions.terms
        return (1.0, dict.fromkeys(some, factor)) if some and factor != 1.0 else (factor, {})

    def _batch_norm(self, x: Tensor, mean: Any, variance: Any, training: bool, **others: Any) -> Tensor:
        replica = current_replica()
        if not training or replica is None or replica.num_replicas_in_sync == 1:
            return F.batch_norm(x, mean, variance, training=training, **others)
        if self.interventions.global_statistics:
            running = (mean, variance) if mean is not None and variance is not None else None
            if self._gather is None:
                self._gather = LabelledGather(replica.strategy.communicator.channel())
            return batch_norm.normalise(self._gather, "a batch norm", x, running=running, **others)
        layer = self.modules.innermost()
        self.batch_norms[layer] = None
        try:
            return F.batch_norm(x, mean, variance, training=training, **others)
        except ValueError:  # a share of one example has no variance
            self.refused = layer
            raise

    def _dropout(self, func: Any, value: Tensor, p: float, training: bool, inplace: bool) -> Any:
        left_out = training and p > 0 and self.leave_out(func.__name__, value)
        return func(value, p, training and not left_out, inplace)

    def _attention(self, **named: Any) -> Tensor:
        if named.get("dropout_p", 0.0) > 0 and self.leave_out("scaled_dot_product_attention", named["query"]):
            named["dropout_p"] = 0.0
        return F.scaled_dot_product_attention(**named)

    def before_module(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Leaves out the dropout that a module's forward passes to torch inside other calls."""
        if not isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) or self.trace.virtual:
            return
        if module.dropout and module.training and inputs and isinstance(inputs[0], Tensor):
            self.leave_out(type(module).__name__, inputs[0])
        module.dropout = 0.0

    def leave_out(self, dropout: str, value: Tensor) -> bool:
        """Notes a dropout, and returns whether it is left out.

        With virtual towers, whose draws are equal on any number of towers, it is neither noted nor left out.
        """
        if self.trace.virtual:
            return False
        self.trace.left_out.add("dropout")
        if self.call is not None and not in_functorch_transform():
            draw = Draw(dropout, script_line(), draws.generator_state(value.device), tuple(value.shape), dropout=True)
            self.call.draws.append(draw)
        return True

    def _random(
        self, call: RunCall, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        trace, shapes = self.trace, self.interventions.shapes
        state = draws.generator_state(self.device)
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor) or not has_values(result):
            return result
        if kwargs.get("generator") is None and not trace.virtual:
            if state == self.drawn:  # otherwise, an earlier call has drawn, too
                self.drawn = draws.generator_state(self.device)
            key = len(trace.calls) - 1, len(call.draws)
            local = tuple(result.shape)
            draw = draws.GlobalDraw(
                key, local if shapes is None else shapes.get(key), call.shares, self.tower, trace.towers
            )
            followed = draws.draw_as_one_tower(name, result, args, kwargs, draw)
            call.draws.append(Draw(name, script_line(), state, local, followed=followed))
        return result


def _shares_memory(result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a call's result is one of its first arguments, or a view of it."""
    if not isinstance(result, Tensor):
        return False
    memory = [memory_of(given) for given in (*args[:1], kwargs.get("out")) if isinstance(given, Tensor)]
    address = memory_of(result)
    return bool(address) and address in memory


def _writes(name: str, func: Any) -> bool:
    if name.startswith("__"):
        return name in _WRITING_OPERATORS or (name == "__set__" and func == Tensor.data.__set__)  # type: ignore[attr-defined]
    return name.endswith("_") and name not in _NO_WRITES
