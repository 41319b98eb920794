"""Variables that towers write, with the rules of TensorFlow's ``tf.Variable`` under a strategy.

[Note: writes that TensorFlow lets pass] Without an aggregation, TensorFlow writes a mirrored variable of one replica
only inside ``run``, and outside it accepts any value that a worker passes. Both let towers drift apart silently. Here
the first is an error, and so is a value that differs between towers.

[Note: a sum is divided exactly] Each tower's addend is a multiple of the sum's unit in the last place. Therefore no
partial sum is rounded, and reading returns the bits that were assigned, on any number of towers and in any order. (For
dtypes in which torch does not compute, such as uint16 and float8, tower 0 takes the whole value.) If all towers have
the same bits, an on_read mean has these bits, although adding and dividing would round.

[Note: every tower's value is saved] TensorFlow saves the value that reading returns, and divides a sum again at a
restore. The state here also contains every tower's own value, so that a run on as many towers continues with the same
bits.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import operator
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from mirrored.context import ActiveStrategy, current_replica
from mirrored.interceptor import interceptor
from towers.collectives import values
from towers.collectives.agreement import agree, announce, announce_with_body
from towers.collectives.communicator import as_bytes, from_bytes
from towers.errors import DisagreementError
from towers.system import tree as trees

_SYNCHRONIZATIONS = ("on_write", "on_read", "auto")
_AGGREGATIONS = ("sum", "mean", "only_first_replica", "none")

_numbers: weakref.WeakKeyDictionary[ActiveStrategy, itertools.count[int]] = weakref.WeakKeyDictionary()
"""The next number of each strategy's variables that were given no name."""

_Operators: Any = object
"""A base that lets type checkers know of any operator and any method; they are a tensor's."""


class Variable(_Operators):  # type: ignore[misc]
    """A value that towers write and read. :meth:`mirrored.Strategy.variable` creates it, on all towers.

    The rules are those of ``OnWritePolicy`` and ``OnReadPolicy`` (tensorflow/python/distribute/values.py):

    | | on_write: one value for all towers | on_read: one value per tower |
    |---|---|---|
    | inside ``run`` | a write aggregates the towers' values | writes and reads use this tower's value |
    | outside | all towers write the same value | a read aggregates; ``assign`` divides a sum among the towers |

    Operators, conversions, torch's functions and the methods of tensors compute with :meth:`value`. Pass :meth:`value`
    to ``torch.tensor``, ``divmod`` and ``round``. A variable is not a tensor, has no gradient, and is not a parameter
    of an optimizer. ``copy.deepcopy`` creates another variable of the same strategy. Pickling uses :meth:`state_dict`.

    Args:
        strategy, check_here: passed by :meth:`mirrored.Strategy.variable`.
        value: the initial value of tower 0: a tensor, array or number. Like :meth:`assign`, an on_read sum divides it
            among the towers, so that reading returns it on any number of towers (TensorFlow gives it to each replica).
        synchronization: "on_write" (the meaning of "auto") or "on_read".
        aggregation: how the towers' values become one: "sum", "mean", "only_first_replica" (tower 0's) or "none". With
            "none", an on_write variable can be written only outside ``run``, and an on_read variable can be used only
            inside.
        dtype: default: the value's dtype; for Python's numbers int64, bool or torch's default dtype.
        name: for messages. Default: a number.

    Attributes:
        name: the variable's name in messages.
        synchronization: "on_write" or "on_read".
        aggregation: "sum", "mean", "only_first_replica" or "none".
        shape, dtype, device: those of its value, which do not change.

    Raises:
        ValueError: on all towers: an unknown option; a sum of booleans or a mean of integers; or virtual towers, except
            for on_write without an aggregation, because the values that towers write depend on their number.
        DisagreementError: on all towers, if shapes, dtypes, synchronization or aggregation differ.
    """

    def __init__(
        self,
        strategy: ActiveStrategy,
        check_here: Callable[[str], None],
        value: Any,
        synchronization: object,
        aggregation: object,
        *,
        dtype: torch.dtype | None = None,
        name: str | None = None,
    ) -> None:
        self.name = name or f"Variable_{next(_numbers.setdefault(strategy, itertools.count()))}"
        call = f"strategy.variable() of {self.name!r}"
        check_here(call)
        self._check_here, self._comm = check_here, strategy.communicator
        try:
            self.synchronization = _choice("synchronization", synchronization, _SYNCHRONIZATIONS)
            self.aggregation = _choice("aggregation", aggregation, _AGGREGATIONS)
            local = _dense(value, dtype, strategy.device)
            self.shape, self.dtype, self.device = local.shape, local.dtype, local.device
            integral = not (self.dtype.is_floating_point or self.dtype.is_complex)
            if (self.aggregation == "mean" and integral) or (self.aggregation == "sum" and self.dtype == torch.bool):
                raise ValueError(f"a {self.aggregation} of {self.dtype} has another dtype: give dtype=torch.float32")
            if strategy.virtual_towers is not None and (self.synchronization, self.aggregation) != ("on_write", "none"):
                raise ValueError("with virtual_towers, write it outside strategy.run, with aggregation='none'")
        except Exception as error:
            announce(self._comm, call, error=error)  # an error on all towers
            raise
        fixed = ("synchronization", "aggregation", "shape", "dtype")
        agree(self._comm, call, {option: str(getattr(self, option)) for option in fixed})
        self._local = self._addend_of(self._of_first_tower(call, local))

    # -- reading and writing -----------------------------------------------------------------------------

    def value(self) -> Tensor:
        """Returns the current value as a new tensor without a graph, on this tower's device.

        Outside ``run``, reading an on_read variable aggregates the towers' values, and all towers must call it.

        Raises:
            ValueError: an on_read variable without an aggregation, outside ``run``.
            DisagreementError: on all towers, if some make another call.
        """
        call = f"value() of variable {self.name!r}"
        self._check_here(call)
        if self.synchronization == "on_write" or current_replica() is not None:
            return self._local.clone()
        if self.aggregation == "none":
            raise ValueError(f"{call} outside strategy.run: you must specify an aggregation, or read it inside")
        return self._aggregated(call, self._local)

    read_value = value

    def assign(self, value: Any) -> Tensor:
        """Replaces the value, and returns :meth:`value`.

        Args:
            value: a tensor, array, number or variable of this variable's shape, with a dtype that ``torch.can_cast``
                can cast to this variable's. It is copied without its graph.

        Raises:
            ValueError: another shape; an on_write variable without an aggregation, inside ``run``; or an on_read
                variable without an aggregation, outside. If towers aggregate, all of them raise it.
            TypeError: another dtype; if towers aggregate, on all of them.
            DisagreementError: on all towers, if some make another call or, outside ``run``, pass another value.
        """
        return self._write("assign", value, lambda before, after: after)

    def assign_add(self, value: Any) -> Tensor:
        """Adds to the value; see :meth:`assign`. Inside ``run``, each tower adds to its own value of an on_read sum."""
        return self._write("assign_add", value, torch.add)

    def assign_sub(self, value: Any) -> Tensor:
        """Subtracts from the value; see :meth:`assign_add`."""
        return self._write("assign_sub", value, torch.sub)

    def _write(self, method: str, value: Any, update: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        call = f"{method}() of variable {self.name!r}"
        self._check_here(call)
        in_replica, on_read = current_replica() is not None, self.synchronization == "on_read"
        if in_replica and on_read:
            self._local = update(self._local, self._converted(value))
            return self.value()
        if on_read and (self.aggregation == "none" or (self.aggregation == "sum" and method != "assign")):
            raise ValueError(f"{call} outside strategy.run does not name the tower whose value changes: call it inside")
        if in_replica and self.aggregation == "none":
            raise ValueError(
                f"{call} inside strategy.run: you must specify an aggregation to update an on_write variable there, "
                "such as strategy.variable(…, aggregation='sum'), 'mean' or 'only_first_replica'; or update it outside"
            )
        try:
            incoming = self._converted(value)
        except Exception as error:
            announce(self._comm, call, error=error)  # an error on all towers
            raise
        incoming = self._aggregated(call, incoming) if in_replica else self._of_first_tower(call, incoming, same=True)
        self._local = update(self._local, self._addend_of(incoming))
        return self.value()

    def _converted(self, value: Any) -> Tensor:
        """Returns a copy of ``value`` with this variable's dtype and device.

        Raises:
            ValueError, TypeError: it has another shape, or a dtype that cannot be cast.
        """
        value = _plain(value)
        natural = _dense(value, None, self.device)
        if natural.shape != self.shape:
            raise ValueError(f"a value of shape {tuple(natural.shape)} for a variable of shape {tuple(self.shape)}")
        if not torch.can_cast(natural.dtype, self.dtype):
            raise TypeError(f"a value of {natural.dtype} for a variable of {self.dtype}: convert it first")
        return _dense(value, self.dtype, self.device).clone()

    # -- towers ------------------------------------------------------------------------------------------

    def _aggregated(self, call: str, local: Tensor) -> Tensor:
        if self.aggregation == "only_first_replica":
            result = self._of_first_tower(call, local)
        elif self.aggregation == "mean" and self.synchronization == "on_read" and self._is_equal(call, local):
            result = local.clone()
        else:
            result = values.reduce(self._comm, self.aggregation, local, call=call).to(self.dtype)
        interceptor().returned(call, result)
        return result

    def _is_equal(self, call: str, local: Tensor) -> bool:
        """Returns whether all towers have the same bits."""
        digest = hashlib.sha256(as_bytes(local.cpu()).numpy().tobytes()).digest()
        return len({announced.body for announced in announce_with_body(self._comm, call, body=digest)}) == 1

    def _of_first_tower(self, call: str, local: Tensor, same: bool = False) -> Tensor:
        """Returns tower 0's value.

        Args:
            same: whether all towers must have this value; see [Note: writes that TensorFlow lets pass].
        """
        body = as_bytes(local.cpu()).numpy().tobytes() if same or self._comm.index == 0 else b""
        bodies = [announced.body for announced in announce_with_body(self._comm, call, body=body)]
        if same and len(set(bodies)) > 1:
            raise DisagreementError(
                f"{call} outside strategy.run: the towers pass different values; reduce them first, or write inside run"
            )
        return from_bytes(bodies[0]).view(self.dtype).view(self.shape).to(self.device)

    def _addend_of(self, value: Tensor) -> Tensor:
        """Returns this tower's part of ``value``; see [Note: a sum is divided exactly]."""
        towers, unit = self._comm.size, torch.ones_like(value)
        if self.synchronization == "on_write" or self.aggregation != "sum":
            return value
        if value.is_complex():
            return torch.complex(self._addend_of(value.real), self._addend_of(value.imag))
        try:
            if value.is_floating_point():  # a unit in the last place; where it under- or overflows, tower 0 takes all
                unit = torch.ldexp(unit * torch.finfo(value.dtype).eps / 2, torch.frexp(value).exponent)
            addend = torch.div(value, unit * towers, rounding_mode="trunc").mul(unit)
            addend = addend.nan_to_num(0, 0, 0).to(value.dtype)
            return addend if self._comm.index else value - addend * (towers - 1)
        except NotImplementedError:
            return torch.zeros_like(value) if self._comm.index else value

    # -- state -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the value outside ``run`` ("value") and, for on_read, every tower's value ("of_each_tower").

        All towers must call it, and receive the same. "of_each_tower" has a row for each tower. Without an aggregation,
        "value" is missing.
        """
        if self.synchronization == "on_write":
            return {"value": self._local.clone()}
        call = f"state_dict() of variable {self.name!r}"
        value = {} if self.aggregation == "none" else {"value": self._aggregated(call, self._local)}
        return {**value, "of_each_tower": values.gather(self._comm, self._local.unsqueeze(0))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a state of a variable of either synchronization. All towers load the same; the call is not collective.

        On the number of towers that saved it, each on_read value returns to its tower. On another number, the value is
        assigned, so that reading returns the same.

        Raises:
            ValueError, TypeError: it is not such a state; it has another shape, or a dtype that cannot be cast; or it
                was saved on a different number of towers without an aggregation.
        """
        each = _dense(state.get("of_each_tower", ()) if self.synchronization == "on_read" else (), None, self.device)
        rows = len(each) if each.dim() else 0
        if rows == self._comm.size:
            self._local = self._converted(each[self._comm.index])
        elif "value" in state:
            self._local = self._addend_of(self._converted(state["value"]))
        elif rows:
            raise ValueError(
                f"{self.name!r} was saved on a different number of towers and has no aggregation, so it cannot be "
                f"restored on {self._comm.size}"
            )
        else:
            raise ValueError(f"{self.name!r} needs a state with 'value', but that one has {[*state]}")

    def __copy__(self) -> Variable:
        other = object.__new__(Variable)
        other.__dict__.update(self.__dict__)  # values are replaced, never changed in place
        return other

    def __deepcopy__(self, memo: object) -> Variable:
        return copy.copy(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self.name!r} is a variable, which cannot be pickled: save its state_dict()")

    # -- as its value ------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        in_place = name.endswith("_") and not name.endswith("__")
        written = [kwargs.get("out"), *[*args, *kwargs.values()][:in_place]]
        if any(isinstance(leaf, Variable) for leaf in trees.leaves(written)):
            _refuse_in_place()
        return func(*trees.map_leaves(_plain, args), **trees.map_leaves(_plain, kwargs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name.endswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"a variable has no {name!r}; assign, assign_add and assign_sub write it")
        if callable(getattr(Tensor, name)):  # is to read when it is called, not where it is passed to run
            return lambda *args, **kwargs: getattr(self.value(), name)(*args, **kwargs)
        return getattr(self.value(), name)

    def __array__(self, dtype: object = None, copy: object = None) -> Any:
        return self.value().cpu().numpy()  # NumPy converts it

    def __repr__(self) -> str:
        return f"<{self.name!r} ({self.synchronization}, {self.aggregation}), tower {self._comm.index}: {self._local}>"


def variables_in(module: nn.Module) -> dict[str, Variable]:
    """Returns the variables that are attributes of a model's layers, by path. ``state_dict()`` leaves them out."""
    return {
        f"{path}.{name}" if path else name: value
        for path, layer in module.named_modules()
        for name, value in vars(layer).items()
        if isinstance(value, Variable)
    }


def _plain(value: Any) -> Any:
    return value.value() if isinstance(value, Variable) else value


def _dense(value: Any, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """Returns a value as a tensor without a graph.

    Raises:
        TypeError: it is a sparse tensor, or torch cannot convert it.
    """
    tensor = torch.as_tensor(_plain(value), dtype=dtype, device=device).detach()
    if tensor.layout != torch.strided:
        raise TypeError(f"a value of layout {tensor.layout}: make it dense first")
    return tensor


def _on_values(op: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that calls ``op`` with the values of variables."""
    return lambda *operands: op(*map(_plain, operands))


def _refuse_in_place(*_: object) -> NoReturn:
    raise TypeError("a variable is not changed in place: write it by assign, assign_add or assign_sub")


_BITWISE = ("and", "or", "xor", "lshift", "rshift")
for _name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", *_BITWISE):
    _op = getattr(operator, f"__{_name}__")
    setattr(Variable, f"__{_name}__", _on_values(_op))
    setattr(Variable, f"__r{_name}__", _on_values(lambda right, left, op=_op: op(left, right)))
    setattr(Variable, f"__i{_name}__", _refuse_in_place)
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs", "invert", "index", "getitem"):
    setattr(Variable, f"__{_name}__", _on_values(getattr(operator, f"__{_name}__")))
for _name in ("data", "grad", "requires_grad"):
    setattr(Variable, _name, property(_on_values(operator.attrgetter(_name)), _refuse_in_place))
for _kind in (float, int, bool, complex, len, iter, format):
    setattr(Variable, f"__{_kind.__name__}__", _on_values(_kind))


def _choice(name: str, chosen: object, choices: tuple[str, ...]) -> str:
    """Returns one of ``choices``, from a string in any case or TensorFlow's enumeration. "auto" is the first choice.

    Raises:
        ValueError: it is not one of them.
    """
    text = str(getattr(chosen, "name", chosen)).lower()
    if text not in choices:
        raise ValueError(f"{name} is {chosen!r}, but must be one of {', '.join(choices)}")
    return choices[0] if text == "auto" else text
