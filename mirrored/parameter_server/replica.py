"""A process's copies of the variables: pulled before they are used, and never written to but by an optimizer's push.

[Note: rows that are looked up] An ``nn.Embedding`` or ``nn.EmbeddingBag`` with ``sparse=True`` pulls the rows that it
looks up, in each forward; the others of its weight are not there. Its gradient has these rows only, as has the push.

[Note: what is pushed] Gradients, when an optimizer steps; what a call has added to buffers (BatchNorm's statistics),
when it ends. Servers' answers to both are waited for together, before the next pull or at the end of the call. A
parameter that a script writes to itself would be this process's alone, so that is an error, but on the chief, whose
writes count.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mirrored.parameter_server.layout import Part, PlacedVariable
from mirrored.parameter_server.server import Settings
from mirrored.parameter_server.servers import Servers
from mirrored.parameter_server.values import Values

TABLES = (nn.Embedding, nn.EmbeddingBag)

Conditions = tuple[list[Settings], list[bool], list[bool]]
"""What the chief may change between two calls: the settings of optimizers, whether each module trains, and whether each
variable requires a gradient."""


class NotYet(Exception):
    """Synchronous training: others have to give their gradients before this process may pull again."""


class Replica:
    """The variables as one process has them.

    Args:
        servers: where they are.
        publishes: whether what the script writes to variables is assigned on the servers: the chief's is.

    Attributes:
        variables, tensors: what they are, and this process's copies.
        index: of each, by the id of its tensor.
        modules: those that have them, from the outermost ones inwards.
        optimizers: whose steps are pushed.
    """

    def __init__(self, servers: Servers, publishes: bool = False) -> None:
        self._servers = servers
        self._publishes = publishes
        self.variables: list[PlacedVariable] = []
        self.tensors: list[Tensor] = []
        self.index: dict[int, int] = {}
        self.modules: list[nn.Module] = []
        self._known: dict[Part, int] = {}  # versions
        self._noted: list[int] = []  # torch's versions of the tensors, after the last pull or assignment
        self._buffers: dict[int, Tensor] = {}  # as they were pulled
        self._steps: list[dict[int, int]] = [{} for _ in servers.actors]  # of each optimizer, when they were pulled
        self._pushed: dict[int, list[int]] = {}  # of each optimizer, those that its last push was made at
        self._sent: list[dict[int, Any]] = []  # what servers have not answered yet
        self.optimizers: list[Optimizer] = []
        self._age = 0  # how often others may have changed variables
        self._pulled = self._tables_pulled = -1  # the age of what is here

    def add(self, variables: Sequence[PlacedVariable], tensors: Sequence[Tensor], models: Iterable[nn.Module]) -> None:
        """Take more variables, and watch their models.

        Before a model's forward the variables are pulled, before a table's its rows, and before a ``state_dict()`` on
        the chief everything.
        """
        self.index |= {id(tensor): index for index, tensor in enumerate(tensors, len(self.tensors))}
        self.variables += variables
        self.tensors += tensors
        self._servers.variables = self.variables
        self._known |= {part: 0 for variable in variables if not variable.table for part in variable.parts}
        self._noted += [tensor._version for tensor in tensors]
        for model in models:
            model.register_forward_pre_hook(Hook(lambda *_: self.refresh()))
            for layer in model.modules():
                self.modules.append(layer)
                if self._publishes:
                    layer.register_state_dict_pre_hook(Hook(lambda *_: self.pull_all()))
                if isinstance(layer, TABLES) and self.variables[self.index[id(layer.weight)]].table:
                    layer.register_forward_pre_hook(Hook(self._pull_rows), with_kwargs=True)

    def conditions(self) -> Conditions:
        """The conditions as they are now, on the chief."""
        settings = [settings_of(optimizer) for optimizer in self.optimizers]
        training = [module.training for module in self.modules]
        return settings, training, [tensor.requires_grad for tensor in self.tensors]

    def adopt_conditions(self, conditions: Conditions) -> None:
        """Take over the chief's conditions; what was added since then is not in them."""
        optimizers, training, trainable = conditions
        for optimizer, settings in zip(self.optimizers, optimizers, strict=False):
            for group, changed in zip(optimizer.param_groups, settings, strict=True):
                group.update(changed)
        for module, trains in zip(self.modules, training, strict=False):
            module.training = trains
        for tensor, requires_grad in zip(self.tensors, trainable, strict=False):
            tensor.requires_grad_(requires_grad)

    # -- values ------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """Pull again when variables are used next: others may have changed them."""
        self._age += 1

    def refresh(self) -> None:
        """Pull what has changed, but for tables.

        Raises:
            NotYet: see there; servers wait a second for it.
        """
        if self._publishes:
            self.assign(self.written())
        else:
            self.add_buffers()
        if self._pulled == (age := self._age):  # another thread may expire it while this one asks
            return
        self.settle()
        answers = self._servers.ask("pull", self._known, self._pushed, to_all=True)
        if None in answers.values():
            raise NotYet
        for server, (changed, versions, steps) in answers.items():
            self._steps[server] = steps
            self._known |= versions
            self._take(changed)
        self._pulled = age

    def _pull_rows(self, table: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = args[0] if args else kwargs["input"]
        rows = torch.unique(inputs).long()
        weight: Any = table.weight
        wanted = Values()
        for part in self.parts_of(weight):
            inside = rows[(rows >= part.start) & (rows < part.end)] - part.start if part.end else rows
            if len(inside):
                wanted[part] = inside
        for answer in self._servers.ask("rows", wanted).values():
            for part, found in answer.items():
                part.of(weight.data).index_copy_(0, wanted[part], found)

    def pull_all(self) -> None:
        """Pull everything, tables as well."""
        self.refresh()
        if self._tables_pulled == (age := self._age):
            return
        for variable in self.variables:  # one after the other: they are large
            for part in variable.parts if variable.table else ():
                self._take(self._servers.ask("pull", {part: 0}, {})[part.server][0])
        self._tables_pulled = age

    def _take(self, values: Values) -> None:
        for part, value in values.items():
            part.of(self.tensors[part.variable].data).copy_(value)
            if self.variables[part.variable].kind == "buffer":
                self._buffers[part.variable] = value

    def settle(self) -> None:
        """Wait until servers have taken what was pushed."""
        sent, self._sent = self._sent, []
        for answers in sent:
            self._servers.receive(answers)

    def assign(self, indices: Iterable[int]) -> None:
        """Give variables, on the servers, the values that they have here."""
        values = Values()
        for index in indices:
            values |= {part: part.of(self.tensors[index].detach()) for part in self.variables[index].parts}
            self._noted[index] = self.tensors[index]._version
        self._servers.ask("assign", values)

    def written(self) -> list[int]:
        """The variables that were written to since :meth:`assign`, or since this was made, other than by a pull."""
        return [i for i, tensor in enumerate(self.tensors) if tensor._version != self._noted[i]]

    def take_back(self) -> str | None:
        """Let the next pull take back what was written to variables here; returns the name of the first of them."""
        for index in (written := self.written()):
            self._noted[index] = self.tensors[index]._version
            self._known |= {part: -1 for part in self.variables[index].parts if part in self._known}
        return self.variables[written[0]].name if written else None

    def add_buffers(self) -> None:
        """Push what has been added to buffers since they were pulled; what is no number, as it is."""
        differences = Values()
        for index, before in self._buffers.items():
            tensor = self.tensors[index]
            self._noted[index] = tensor._version
            if torch.equal(tensor, before):
                continue
            self._buffers[index] = tensor.clone()
            (part,) = self.variables[index].parts
            if tensor.dtype != torch.bool and bool((difference := tensor - before).isfinite().all()):
                differences[part] = difference
            else:
                self.assign([index])
        self._sent.append(self._servers.send("add", differences))

    # -- optimizers --------------------------------------------------------------------------------------

    def adopt(self, optimizer: Optimizer) -> None:
        """Let an optimizer's ``step`` push gradients; its index is the number of those before."""
        index = len(self.optimizers)

        @functools.wraps(optimizer.step)  # a learning rate's schedule has left a note there
        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return self._push(index, optimizer, closure)

        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.add_param_group = _refuse_group  # type: ignore[method-assign, assignment]
        if self._publishes:  # the steps that a schedule misses here are the workers'
            warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step", UserWarning)
        self.optimizers.append(optimizer)
        self.expire()  # how many steps it has made is pulled, too

    def _push(self, index: int, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = Values({part: part.of(p.grad) for p in trained for part in self.parts_of(p)})
        steps = self._pushed[index] = [made[index] for made in self._steps]
        # A server without gradients counts the step, too.
        self._sent.append(self._servers.send("push", gradients, index, settings_of(optimizer), steps, to_all=True))
        self.expire()
        return result

    def parts_of(self, parameter: Tensor) -> tuple[Part, ...]:
        """Where a parameter lies."""
        return self.variables[self.index[id(parameter)]].parts

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of the variables."""
        return id(tensor) in self.index


def _refuse_group(group: Any) -> None:
    raise RuntimeError("an optimizer that servers step takes no more parameters: make another optimizer of them")


class Hook:
    """A hook of a model that is placed; a copy of the model has one that does nothing."""

    def __init__(self, act: Callable[..., None] | None = None) -> None:
        self._act = act

    def __call__(self, *args: Any) -> None:
        if self._act is not None:
            self._act(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, ()


def settings_of(optimizer: Optimizer) -> Settings:
    """What the groups have beside their parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
