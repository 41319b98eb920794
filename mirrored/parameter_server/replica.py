"""A process's copies of the variables. They are pulled before use, and changed only through an optimizer's push.

[Note: rows that are looked up] An ``nn.Embedding`` or ``nn.EmbeddingBag`` with ``sparse=True`` pulls the rows that it
looks up, in each forward. The other rows of its weight are not pulled. Its gradient has only these rows, and so has the
push.

[Note: what is pushed] When an optimizer steps, gradients are pushed, with the values that the forward has added to
buffers (BatchNorm's statistics). So a step with the mean of several gradients takes the mean of these values, too.
Values that are added without a step are pushed when the call ends. Servers' answers to both are awaited together,
before the next pull or at the end of the call. A parameter that a script writes on a worker would change in that
process only, so this is an error. On the chief, such writes are assigned on the servers.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mirrored.parameter_server.layout import Part, PlacedVariable, Values
from mirrored.parameter_server.servers import Reference, Request, ServedOptimizer, Servers, Settings, libraries
from towers.system.torch_private import count_as_stepped, disable_dynamo

TABLES = (nn.Embedding, nn.EmbeddingBag)

Conditions = tuple[list[Settings], list[bool], list[bool]]
"""The properties that the chief may change between two calls: the settings of optimizers, whether each module trains,
and whether each variable requires a gradient.
"""


Call = tuple[int, int]
"""The number of a call of a scheduled function, and that of the first unfinished one."""


class Replica:
    """The variables in one process.

    Args:
        servers: the servers that store the variables.
        worker: the index of this process's worker; None for the chief, whose writes are assigned on servers.

    Attributes:
        variables, tensors: the variables' descriptions, and this process's copies.
        references: the references that replace tensors and modules in pickled functions, by their ids.
        modules: the modules with variables, from the outermost ones inwards.
        optimizers: the optimizers whose steps are pushed.
    """

    def __init__(self, servers: Servers, worker: int | None = None) -> None:
        self._servers = servers
        self._worker = worker
        self.variables: list[PlacedVariable] = []
        servers.variables = self.variables
        self.tensors: list[Tensor] = []
        self.references: dict[int, Reference] = {}
        self.modules: list[nn.Module] = []
        self._known: dict[Part, int] = {}  # versions
        self._places: list[tuple[nn.Module, str, Tensor]] = []  # the attributes of modules that are variables
        self._noted: list[int] = []  # torch's versions of the tensors, after the last pull or assignment
        self._buffers: dict[int, Tensor] = {}  # the values that a worker has pulled
        self._steps: list[dict[int, int]] = [{} for _ in servers.actors]  # of each optimizer, at the time of the pull
        self._sent: list[dict[int, Any]] = []  # requests without an answer yet
        self._call: Call | None = None
        self._requests = 0  # of this call
        self.optimizers: list[Optimizer] = []
        self._age = 0  # the number of times that others may have changed variables
        self._pulled = self._tables_pulled = -1  # the age of the local values

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles a replica without variables, because the hooks of a copied model must not pull."""
        return Replica, (Servers(()),)

    def add(self, variables: Sequence[PlacedVariable], tensors: Collection[Tensor]) -> None:
        """Adds variables. On the chief, they count as written."""
        self.references |= {id(tensor): ("variable", i) for i, tensor in enumerate(tensors, len(self.tensors))}
        self.variables += variables
        self.tensors += tensors
        self._known |= {part: 0 for variable in variables if not variable.table for part in variable.parts}
        self._noted += [-1 if self._worker is None else tensor._version for tensor in tensors]

    def watch(self, models: Iterable[nn.Module]) -> None:
        """Adds hooks that pull variables before a model's forward, and rows before a table's.

        On the chief, all are pulled before ``state_dict()``.
        """
        for model in models:
            for library in libraries:
                library.watch(model.modules(), self.refresh)
            for layer in model.modules():
                self.references[id(layer)] = ("module", len(self.modules))
                self.modules.append(layer)
                if self._worker is None:
                    layer.register_state_dict_pre_hook(self.pull_all)
                if layer is model or self._worker is not None:  # a function may call only a part of a model
                    layer.register_forward_pre_hook(self.refresh)
                tensors = *layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)
                self._places += [(layer, name, tensor) for name, tensor in tensors]
                if isinstance(layer, TABLES) and self.variables[self.references[id(layer.weight)][1]].table:
                    layer.register_forward_pre_hook(self._pull_rows, with_kwargs=True)

    def conditions(self) -> Conditions:
        """Returns the chief's current conditions."""
        settings = [settings_of(optimizer) for optimizer in self.optimizers]
        training = [module.training for module in self.modules]
        return settings, training, [tensor.requires_grad for tensor in self.tensors]

    def adopt_conditions(self, conditions: Conditions) -> None:
        """Sets the chief's conditions. They do not include objects that were added later."""
        optimizers, training, trainable = conditions
        for optimizer, settings in zip(self.optimizers, optimizers, strict=False):
            for group, changed in zip(optimizer.param_groups, settings, strict=True):
                group.update(changed)
        for module, trains in zip(self.modules, training, strict=False):
            module.training = trains
        for tensor, requires_grad in zip(self.tensors, trainable, strict=False):
            tensor.requires_grad_(requires_grad).grad = None
        self._note_steps()

    def _note_steps(self) -> None:
        for optimizer in self.optimizers if self._worker is not None else ():
            if isinstance(optimizer, ServedOptimizer):
                optimizer.note_steps(self.steps_of(optimizer))

    # -- values ------------------------------------------------------------------------------------------

    def begin(self, call: Call) -> None:
        """Starts a call of a scheduled function with the servers' values."""
        self._call, self._requests = call, 0
        self.expire()
        self.refresh()

    def steps_of(self, optimizer: Optimizer) -> int:
        """Returns the number of an optimizer's steps on the servers at the last pull."""
        index = self.optimizers.index(optimizer)
        return max((made.get(index, 0) for made in self._steps), default=0)

    def _request(self) -> Request | None:
        """Returns the identity of the next request of a call, by which servers count it once."""
        if self._call is None:
            return None
        self._requests += 1
        return *self._call, self._requests

    def expire(self) -> None:
        """Makes the next use of variables pull again, because others may have changed them."""
        self._age += 1

    @disable_dynamo
    def refresh(self, *_: object) -> None:
        """Pulls changed variables, except tables. In synchronous training, it waits for other workers' gradients."""
        if self._worker is None:
            self.assign(self.written())
        if self._pulled == (age := self._age):  # another thread may expire it during the pull
            return
        self.add_buffers()
        self.settle()
        answers = self._servers.ask("pull", self._known, self._worker, to_all=True)
        for server, (changed, versions, steps) in answers.items():
            self._steps[server] = steps
            self._known |= versions
            self._take(changed)
        self._pulled = age
        self._note_steps()

    @disable_dynamo
    def _pull_rows(self, table: nn.Module, args: Any, kwargs: Any) -> None:
        self.refresh()  # on the chief, which may call only a table after writing to it
        rows = torch.unique(args[0] if args else kwargs["input"]).long()
        weight: Any = table.weight
        wanted = Values()
        for part in self.parts_of(weight):
            inside = rows[(rows >= part.start) & (rows < part.end)] - part.start if part.end else rows
            if len(inside):
                wanted[part] = inside
        for answer in self._servers.ask("rows", wanted).values():
            for part, found in answer.items():
                part.of(weight.data).index_copy_(0, wanted[part], found)

    def pull_all(self, *_: object) -> None:
        """Pulls all variables, including tables."""
        self.refresh()
        if self._tables_pulled == (age := self._age):
            return
        for variable in self.variables:  # one by one, because they are large
            for part in variable.parts if variable.table else ():
                self._take(self._servers.ask("pull", {part: 0}, None)[part.server][0])
        self._tables_pulled = age

    def _take(self, values: Values) -> None:
        for part, value in values.items():
            part.of(self.tensors[part.variable].data).copy_(value)
            if self._worker is not None and not self.variables[part.variable].trained:
                self._buffers[part.variable] = value

    def settle(self) -> None:
        """Waits until the servers have received all pushed values."""
        while self._sent:
            self._servers.receive(self._sent.pop(0))

    def assign(self, indices: Iterable[int]) -> None:
        """Sets variables on the servers to their values in this process."""
        values = Values()
        for index in indices:
            values |= {part: part.of(self.tensors[index].detach()) for part in self.variables[index].parts}
            self._noted[index] = self.tensors[index]._version
        self._servers.ask("assign", values)

    def written(self) -> list[int]:
        """Returns the variables that were written since :meth:`assign` or :meth:`add`, other than by a pull."""
        return [i for i, tensor in enumerate(self.tensors) if tensor._version != self._noted[i]]

    @torch.no_grad()
    def rebind(self) -> None:
        """Copies tensors that have replaced variables as attributes into them (``self.count = self.count + 1``)."""
        for module, name, variable in self._places:
            if (other := getattr(module, name)) is not variable:
                setattr(module, name, variable.copy_(other))

    def take_back(self) -> str | None:
        """Makes the next pull overwrite variables that were written here. Returns the name of the first, or None."""
        for index in (written := self.written()):
            self._noted[index] = self.tensors[index]._version
            self._known |= {part: -1 for part in self.variables[index].parts if part in self._known}
        return self.variables[written[0]].name if written else None

    def add_buffers(self) -> None:
        """Pushes the values added to buffers since the pull or the last push."""
        self._sent.append(self._servers.send("add", self._added(), self._request()))

    def _added(self) -> Values:
        """Returns the values added to buffers since the pull or the last push.

        Boolean or non-finite changes are assigned instead. Numbers of batches are floats: a step takes their mean.
        """
        differences = Values()
        for index, before in self._buffers.items():
            tensor = self.tensors[index]
            self._noted[index] = tensor._version
            if torch.equal(tensor, before):
                continue
            self._buffers[index] = tensor.clone()
            (part,) = self.variables[index].parts
            if tensor.dtype != torch.bool and bool((difference := tensor - before).isfinite().all()):
                is_count = self.variables[index].name.endswith("num_batches_tracked")
                differences[part] = difference.double() if is_count else difference
            else:
                self.assign([index])
        return differences

    # -- optimizers --------------------------------------------------------------------------------------

    def adopt(self, optimizer: Optimizer) -> None:
        """Makes an optimizer's ``step`` push gradients. Its index is the number of optimizers before it."""
        index = len(self.optimizers)

        @functools.wraps(optimizer.step)  # a learning-rate schedule has set an attribute on it
        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            with torch.enable_grad():
                result = None if closure is None else closure()
            self._push(index, optimizer)
            return result

        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.add_param_group = _refuse_group  # type: ignore[method-assign, assignment]
        count_as_stepped(optimizer)  # workers step it
        self.optimizers.append(optimizer)
        self.expire()  # its number of steps must be pulled, too

    def _push(self, index: int, optimizer: Optimizer) -> None:
        self.rebind()
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        values = Values({part: part.of(p.grad) for p in trained for part in self.parts_of(p)})
        values |= (added := self._added())
        steps = [made[index] for made in self._steps]
        others = index, settings_of(optimizer), steps, self._worker, set(added), self._request()
        # A server without gradients also counts the step.
        self._sent.append(self._servers.send("push", values, *others, to_all=True))
        self.expire()

    def parts_of(self, tensor: Tensor) -> tuple[Part, ...]:
        """Returns the parts of a variable, or () for other tensors."""
        return self.variables[self.references[id(tensor)][1]].parts if id(tensor) in self.references else ()


def _refuse_group(group: Any) -> None:
    raise RuntimeError("an optimizer that servers step takes no more parameters: make another optimizer of them")


def settings_of(optimizer: Optimizer) -> Settings:
    """Returns the settings of an optimizer's groups, without parameters."""
    if isinstance(optimizer, ServedOptimizer):
        optimizer.update_settings()
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
