"""Watches the calls of torch that a script makes: losses, random numbers, batch norm, writes to parameters."""

from __future__ import annotations

import hashlib
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mirrored.context import current_frame
from mirrored.verification.interventions import LossFactor, batch_norm_over_towers, divisor_factors
from mirrored.verification.loss_graph import scale_terms, terms_of
from mirrored.verification.randomness import DRAWING, Place, draw_as_one_tower
from mirrored.verification.trace import Draw, LocalChange, Loss, Term, Write, has_values
from towers.system.torch_private import in_functorch_transform

if TYPE_CHECKING:
    from mirrored.verification.record import Recorder

_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)

_NO_WRITES = frozenset({"requires_grad_", "retain_grad_", "share_memory_"})

_ZEROING = frozenset({"zero_", "_foreach_zero_"})

_WRITING_OPERATORS = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"})


def script_line() -> int | None:
    """The line of the script that is being executed, if it is on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "__main__" and frame.f_code.co_filename != "<string>":
            return frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None


def in_a_graph() -> bool:
    """Whether torch follows the calls to make a graph of them (a trace, an export): what they compute is no training.

    Calls of our own would end up in that graph.
    """
    return torch.jit.is_tracing() or torch.compiler.is_compiling() or torch.compiler.is_exporting()


def _in_a_transform() -> bool:
    """Whether a transform of ``torch.func`` is at work, within which no tensor's memory can be read."""
    return in_functorch_transform()


def generator_state(device: torch.device) -> str:
    """A digest of where torch's generators stand."""
    digest = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=16)
    if device.type == "cuda":
        digest.update(torch.cuda.get_rng_state(device).numpy().tobytes())
    return digest.hexdigest()


def other_generators() -> dict[str, int]:
    """Where the generators of Python and NumPy stand."""
    numpy: Any = np.random.get_state(legacy=True)
    return {"Python's random": hash(random.getstate()), "numpy.random": hash((numpy[1].tobytes(), *numpy[2:]))}


class Watcher(TorchFunctionMode):
    """While it is entered, tells a recorder what the script does, and does what the recorder's repairs ask for.

    So that one tower and several compute the same, dropout is left out (where it would have drawn is noted), and other
    random numbers in ``run`` are this tower's part of those of the global batch.

    Attributes:
        drawn: where torch's generators stood after the last draw in ``run`` that was noticed.
    """

    drawn = ""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if in_a_graph():
            return func(*args, **given)
        name = getattr(func, "__name__", "")
        if func is Tensor.backward:
            return self._backward(*args, **given)
        if func is F.batch_norm:
            return self._batch_norm(func, args, given)
        if func in _DROPOUTS:
            return self._dropout(func, args, given)
        if func is F.scaled_dot_product_attention:
            return self._attention(func, args, given)
        recorder = self._recorder
        if name in DRAWING and recorder.run is not None and not _in_a_transform():
            return self._random(name, func, args, given)
        if args and _writes(name, func) and not recorder.stepping:
            if isinstance(args[0], Tensor) and recorder.pointers:
                self._note_write(args[0])
            if recorder.accumulated and name not in _ZEROING and recorder.hold_gradients(args[0]):
                self._note_local_change(name)
                if recorder.repairs.local_changes:
                    return args[0]
        if func is Tensor.register_hook and args[0].is_leaf and args[0].requires_grad:
            self._note_local_change(name)
            if recorder.repairs.local_changes:
                return func(args[0], lambda gradient: None)
        return func(*args, **given)

    def _backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        recorder = self._recorder
        bound = inspect.signature(Tensor.backward).bind(loss, *args, **kwargs).arguments
        bound.pop("self")
        if recorder.run is not None:
            recorder.run.trained = True
        terms = terms_of(loss)
        whole, factors = self._factors(terms)
        if loss.numel() == 1:
            value = float(loss.detach().double().real)
            if factors:
                whole = factors[0] if len(terms) == len(factors) == 1 else None
            recorder.losses.append(Loss(_times(value, whole), terms, script_line(), recorder.share()))
        scaled = scale_terms(loss, factors)
        try:
            with self:  # what backward computes anew (checkpoints) is watched, too
                torch.autograd.backward(
                    loss if factors or whole in (1.0, None) else loss * whole,
                    grad_tensors=bound.get("gradient"),
                    retain_graph=bound.get("retain_graph"),
                    create_graph=bound.get("create_graph", False),
                    inputs=bound.get("inputs"),
                )
        finally:
            for handle in scaled:
                handle.remove()
        frame = current_frame()
        recorder.accumulated = frame is not None and frame.strategy.accumulates

    def _factors(self, terms: Sequence[Term]) -> tuple[float | None, dict[int, float]]:
        """What this run multiplies a loss by: the whole of it, or some of its summands."""
        recorder, frame = self._recorder, current_frame()
        repair, replica = recorder.repairs.loss, frame.replica if frame is not None else None
        if replica is None or recorder.run is None or repair is LossFactor.NONE:
            return 1.0, {}
        if repair is LossFactor.DIVISOR:
            return None, divisor_factors(replica, [term.divisor for term in terms])
        factor = repair.of(recorder.seen.towers, *recorder.share())
        part = recorder.repairs.terms if factor != 1.0 else frozenset()
        return (None, dict.fromkeys(part, factor)) if part else (factor, {})

    def _batch_norm(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = inspect.signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        frame = current_frame()
        replica = frame.replica if frame is not None else None
        if not bound.arguments["training"] or replica is None or replica.num_replicas_in_sync == 1:
            return func(*args, **kwargs)
        if self._recorder.repairs.global_statistics:
            return batch_norm_over_towers(replica, *bound.args)
        layer = self._recorder.module_name()
        self._recorder.batch_norms[layer] = None
        try:
            return func(*args, **kwargs)
        except ValueError:  # a share of one example has no variance
            self._recorder.seen.refused_by = layer
            raise

    def _dropout(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = inspect.signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.arguments["training"] and bound.arguments["p"] > 0 and not self._recorder.seen.virtual:
            self.note_dropout(func.__name__, bound.arguments["input"])
            bound.arguments["training"] = False
        return func(*bound.args, **bound.kwargs)

    def _attention(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        place = 4  # of dropout_p among the arguments
        probability = args[place] if len(args) > place else kwargs.get("dropout_p", 0.0)
        if probability > 0 and not self._recorder.seen.virtual:
            self.note_dropout(func.__name__, args[0] if args else kwargs["query"])
            if len(args) > place:
                args = (*args[:place], 0.0, *args[place + 1 :])
            else:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)

    def note_dropout(self, by: str, value: Tensor) -> None:
        """A dropout on ``value`` is left out."""
        self._recorder.seen.dropouts += 1
        if self._recorder.run is not None and not _in_a_transform():
            state = generator_state(value.device)
            examples = len(value) if value.dim() else 0
            self._recorder.run.draws.append(Draw(by, script_line(), state, examples, dropout=True))

    def _random(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = self._recorder
        assert recorder.run is not None
        state = generator_state(recorder.device())
        result = func(*args, **kwargs)
        if (
            isinstance(result, Tensor)
            and has_values(result)
            and kwargs.get("generator") is None
            and not recorder.seen.virtual
        ):
            if state == self.drawn:  # else something before it has drawn, too
                self.drawn = generator_state(recorder.device())
            number = len(recorder.seen.runs) - 1, len(recorder.run.draws)
            shape = recorder.shapes.get(number) if recorder.shapes is not None else tuple(result.shape)
            place = Place(number, shape, recorder.run.shares, recorder.tower, recorder.seen.towers)
            followed = draw_as_one_tower(name, result, args, kwargs, place)
            examples = len(result) if result.dim() else 0
            drawn = Draw(name, script_line(), state, examples, followed=followed, shape=tuple(result.shape))
            recorder.run.draws.append(drawn)
        return result

    def _note_write(self, target: Tensor) -> None:
        if target.layout != torch.strided or not has_values(target):
            return
        name = self._recorder.pointers.get(target.untyped_storage().data_ptr())
        if name is not None:
            self._recorder.seen.writes.append(Write(name, script_line(), len(self._recorder.seen.steps)))

    def _note_local_change(self, by: str) -> None:
        seen = self._recorder.seen
        seen.local_changes.append(LocalChange(by, script_line(), len(seen.steps)))

    def before_module(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Leave out the dropout that a module's forward hands to torch inside other calls."""
        if (
            isinstance(module, (nn.MultiheadAttention, nn.RNNBase))
            and module.dropout
            and not self._recorder.seen.virtual
        ):
            if module.training and inputs and isinstance(inputs[0], Tensor):
                self.note_dropout(type(module).__name__, inputs[0])
            module.dropout = 0.0


def _writes(name: str, func: Any) -> bool:
    if name.startswith("__"):
        return name in _WRITING_OPERATORS or (name == "__set__" and func == Tensor.data.__set__)  # type: ignore[attr-defined]
    return name.endswith("_") and name not in _NO_WRITES


def _times(value: float, factor: float | None) -> float | None:
    """Nothing of a loss that is not a number is nothing: the mean over an empty share."""
    return None if factor is None else value * factor if factor else 0.0
