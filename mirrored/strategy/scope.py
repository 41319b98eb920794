"""Records the modules of a strategy's scope with registration hooks, so that they can be made equal.

[Note: recording follows modules] Registration hooks report every parameter that a module registers, but not parameters
of copies by ``copy.deepcopy`` (``nn.TransformerEncoder`` copies its layer). The registration of a child module
therefore records everything in it. Recording does not extend the lifetime of objects. The order of modules never
depends on addresses. Modules that the compiler makes are not recorded: one tower alone may compile again, for a share
of another size.

[Note: garbage in models] A dropped module that is part of a reference cycle exists until garbage is collected. Some
towers collect earlier than others, so their models may seem to differ. In this case, all towers collect their garbage
and compare again. They do not collect for every model, because a collection takes a quarter to half a second of a core
(measured with ``tests/attached/test_every_metric.py``): torch and its compiler have a million objects. A dropped module
that still exists on all towers is mirrored until it is collected.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from towers.errors import MirrorError
from towers.system.messages import class_name
from towers.system.tensors import Named, is_dtensor
from towers.system.torch_private import NormBase, own_buffers, own_parameters, unsaved_buffers

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


class Recorder:
    """Records every parameter that is registered in a module while recording is on.

    It holds weak references only, so objects that the script deletes are forgotten. It uses only the global
    registration hooks of ``torch.nn``, and only inside the scope. Modules are changed only by the function that
    ``start`` receives.
    """

    def __init__(self) -> None:
        self._modules: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self._parameters: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self._mirrored: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self._awaited: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._scopes: list[Callable[[nn.Module], None] | None] = []
        self._hooks: list[Any] = []
        # Ids, because torch cannot convert sharded parameters (``module.to()``) that have weak references.
        self._sharded: set[int] = set()
        self._sharded_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.accumulated: set[int] = set()  # ids of sharded parameters that may have gradients that are not reduced
        self._replaced: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self._class_names: Counter[str] = Counter()
        self._roots: list[tuple[str, weakref.ref[nn.Module]]] = []
        self.pending = False

    def start(self, adopt: Callable[[nn.Module], None] | None = None) -> None:
        """Starts recording. Calls may be nested.

        Args:
            adopt: is called with every module that is recorded inside, possibly more than once. Default: the function
                of the outer ``start``.
        """
        self._scopes.append(adopt or (self._scopes[-1] if self._scopes else None))
        if len(self._scopes) == 1:
            self._hooks = [
                register_module_parameter_registration_hook(_unless_compiling(self._on_parameter)),
                register_module_buffer_registration_hook(_unless_compiling(self._on_buffer)),
                register_module_module_registration_hook(_unless_compiling(self._on_child)),
            ]

    @property
    def adopts(self) -> bool:
        """Whether recorded modules are currently passed to a function of ``start``."""
        return bool(self._scopes) and self._scopes[-1] is not None

    def stop(self) -> None:
        """Ends the recording of the matching :meth:`start`."""
        self._scopes.pop()
        if not self._scopes:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    def _on_parameter(self, module: nn.Module, name: str, parameter: torch.Tensor | None) -> None:
        self._remember(module)
        if parameter is not None and not self.is_mirrored(parameter) and not self.is_sharded(parameter):
            self._parameters[id(parameter)] = parameter

    def _on_buffer(self, module: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
        self._remember(module)

    def _on_child(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        self._remember(module)
        if child is not None:
            self.add(child)  # it may be a copy: see [Note: recording follows modules]

    def _remember(self, module: nn.Module) -> None:
        self._modules[id(module)] = module  # at the end, or at its old position; a freed module leaves no entry
        self.pending = True
        if self._scopes and (adopt := self._scopes[-1]) is not None:
            adopt(module)

    def add(self, module: nn.Module) -> None:
        """Records an existing module, with everything in it."""
        for layer in module.modules():
            self._remember(layer)
            for name, parameter in own_parameters(layer).items():  # Keras' named_parameters() would change the layer
                self._on_parameter(layer, name, parameter)

    def forget(self, module: nn.Module) -> None:
        """Forgets a module that was recorded and not yet taken, with everything in it."""
        for layer in module.modules():
            self._modules.pop(id(layer), None)
            for parameter in own_parameters(layer).values():
                self._parameters.pop(id(parameter), None)
        self.pending = bool(self._modules)

    def add_sharded(self, module: nn.Module, originals: Mapping[str, torch.Tensor]) -> None:
        """Adds a module, as one that was taken, whose parameters are sharded.

        Args:
            originals: the parameters before.
        """
        [(name, _)] = self._name_roots([module])
        self._class_names[class_name(module)] += 1
        self._roots.append((name, weakref.ref(module)))
        self._sharded_models.add(module)
        sharded = {id(parameter) for parameter in module.parameters()}
        self._sharded |= sharded
        weakref.finalize(module, self._sharded.difference_update, sharded).atexit = False
        self.note_replaced(originals, module)

    def note_replaced(self, originals: Mapping[str, torch.Tensor], module: nn.Module) -> None:
        """Records the earlier parameters of a module that has others now."""
        now = {id(parameter) for parameter in module.parameters()}
        self._replaced.update((id(p), p) for p in originals.values() if id(p) not in now)

    def is_sharded(self, parameter: torch.Tensor) -> bool:
        """Returns whether a tower holds only a part of ``parameter``."""
        return id(parameter) in self._sharded and is_dtensor(parameter)

    def was_replaced(self, parameter: torch.Tensor) -> bool:
        """Returns whether sharding has replaced ``parameter`` by another one."""
        return self._replaced.get(id(parameter)) is parameter

    def note_accumulated(self) -> None:
        """Records that backwards of sharded parameters may have reduced no gradients."""
        self.accumulated.update(self._sharded)

    def sharded_models(self) -> Iterator[Any]:
        """Yields the models with sharded parameters, in the order in which they were sharded."""
        return (root for _, root in self.roots() if root in self._sharded_models)

    def is_mirrored(self, parameter: torch.Tensor) -> bool:
        """Returns whether ``parameter`` was recorded and taken."""
        return self._mirrored.get(id(parameter)) is parameter

    def others(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Returns those of ``parameters`` that are not mirrored, in order."""
        mirrored = self._mirrored
        return [parameter for parameter in parameters if mirrored.get(id(parameter)) is not parameter]

    def __contains__(self, parameter: torch.Tensor) -> bool:
        """Returns whether ``parameter`` was recorded and not yet taken."""
        return self._parameters.get(id(parameter)) is parameter

    def knows(self, parameter: torch.Tensor) -> bool:
        """Returns whether ``parameter`` was recorded, taken or not."""
        return self.is_mirrored(parameter) or parameter in self

    def untaken(self) -> list[torch.Tensor]:
        """Returns the parameters that were recorded, have values and were not yet taken."""
        return [parameter for parameter in self._parameters.values() if not is_lazy(parameter)]

    def take(self, make_equal: Callable[[list[Named]], None]) -> tuple[list[Named], list[nn.Module]]:
        """Returns all recorded parameters and buffers that have values, named, in order of creation.

        They count as mirrored from now on. It also returns lazy modules that have not received a batch yet, each only
        once.

        Args:
            make_equal: makes the tensors equal on all towers. If it raises a MirrorError, it is called once more after
                a garbage collection; see [Note: garbage in models].

        Raises:
            MirrorError: the towers have not recorded the same tensors.
        """
        found = None
        with contextlib.suppress(MirrorError):
            found = self._find(make_equal)
        if found is None:
            gc.collect()
            found = self._find(make_equal)
        modules, roots, tensors = found
        self._class_names.update(type(module).__name__ for _, module in roots)
        self._roots = [entry for entry in self._roots if entry[1]() is not None]
        self._roots += [(name, weakref.ref(module)) for name, module in roots]
        lazy = [module for module in modules if has_uninitialized(module)]
        awaited = [p for m in lazy for p in m.parameters(recurse=False) if is_lazy(p) and p in self]
        self._modules = weakref.WeakValueDictionary({id(module): module for module in lazy})
        self._parameters = weakref.WeakValueDictionary({id(parameter): parameter for parameter in awaited})
        self.pending = False
        for entry in tensors:
            if entry.kind == "parameter":
                self._mirrored[id(entry.tensor)] = entry.tensor
        newly_awaited = [module for module in lazy if module not in self._awaited]
        self._awaited.update(newly_awaited)
        return tensors, newly_awaited

    def _find(
        self, make_equal: Callable[[list[Named]], None]
    ) -> tuple[list[nn.Module], list[tuple[str, nn.Module]], list[Named]]:
        """Returns the recorded modules, the outermost of them with names, and their tensors, made equal."""
        modules = list(self._modules.values())
        roots = self._name_roots(modules)
        named: dict[int, Named] = {}
        sparse = {id(m.weight) for m in modules if isinstance(m, _EMBEDDINGS) and m.sparse}
        for name, root in roots:
            for path, parameter in root.named_parameters():
                if parameter in self and not is_lazy(parameter):
                    trainable = parameter.requires_grad
                    entry = Named(f"{name}.{path}", parameter, "parameter", trainable, id(parameter) in sparse)
                    named.setdefault(id(parameter), entry)
            recorded = {id(module) for module in modules}
            for path, module in root.named_modules():
                for key, buffer in module.named_buffers(recurse=False) if id(module) in recorded else ():
                    if not is_lazy(buffer):
                        full = ".".join(filter(None, (name, path, key)))
                        named.setdefault(id(buffer), Named(full, buffer, "buffer"))
        tensors = list(named.values())
        make_equal(tensors)
        return modules, roots, tensors

    def _name_roots(self, modules: list[nn.Module]) -> list[tuple[str, nn.Module]]:
        """Returns the outermost recorded modules with names: their classes, numbered if a class recurs."""
        children = {id(child) for module in modules for child in module.children()}
        numbers = self._class_names.copy()
        roots = []
        for module in modules:
            if id(module) in children:
                continue
            name = class_name(module)
            number = numbers[name]
            numbers[name] += 1
            roots.append((f"{name}[{number}]" if number else name, module))
        return roots

    def unmirrored(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields parameters, with names, that a script has put into a mirrored module after it was taken."""
        for name, root in self.roots():
            for path, parameter in root.named_parameters():
                known = self.knows(parameter) or self.is_sharded(parameter)
                if not known and not is_lazy(parameter):
                    yield f"{name}.{path}", parameter

    def name_of(self, parameter: torch.Tensor) -> str:
        """Returns a parameter's name for messages: its path in a mirrored model, otherwise in its own module."""
        not_taken = ((type(module).__name__, module) for module in self._modules.values())
        for name, module in (*self.roots(), *not_taken):
            for path, candidate in module.named_parameters(remove_duplicate=False):
                if candidate is parameter:
                    return f"{name}.{path}"
        return f"a parameter of shape {tuple(parameter.shape)} that is in no mirrored model"

    def modules_with_buffers(self) -> list[tuple[str, nn.Module]]:
        """Returns the existing modules with buffers that were taken, named, ordered by creation of the outermost."""
        named: dict[int, tuple[str, nn.Module]] = {}
        for name, module in self._living():
            if own_buffers(module):
                named.setdefault(id(module), (name, module))
        return list(named.values())

    def computed_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the saved buffers that forwards compute, named, except statistics of normalisations and Keras' layers.

        DDP broadcasts buffers before every forward; here, each tower keeps its own.
        """
        for name, module in self.modules_with_buffers():
            if isinstance(module, NormBase) or type(module).__module__.partition(".")[0] == "keras":
                continue
            for key, buffer in own_buffers(module).items():
                if buffer is not None and key not in unsaved_buffers(module):
                    yield (f"{name}.{key}" if name else key), buffer

    def name_of_module(self, module: nn.Module) -> str | None:
        """Returns a module's name for messages: its path in a mirrored model, or None if it is in none."""
        return next((name for name, candidate in self._living() if candidate is module), None)

    def _living(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields all modules that were taken and still exist, with names, ordered by creation of the outermost."""
        for name, root in self.roots():
            for path, module in root.named_modules():
                yield f"{name}.{path}" if path else name, module

    def roots(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields the outermost modules that were taken and still exist, with their names."""
        for name, reference in self._roots:
            if (root := reference()) is not None:
                yield name, root

    def models(self) -> Iterator[nn.Module]:
        """Yields the outermost modules that were taken, and all that were recorded and not yet taken."""
        for _, root in self.roots():
            yield root
        yield from self._modules.values()

    def only_evaluates(self) -> bool:
        """Returns whether there are :meth:`models`, and all of them are in eval mode."""
        for _, reference in self._roots:  # without generators, because it is asked in every run
            if (root := reference()) is not None and root.training:
                return False
        models = list(self.models())
        return bool(models) and not any(model.training for model in models)


def has_uninitialized(module: nn.Module) -> bool:
    """Returns whether a lazy module has not received a batch yet."""
    tensors = [*own_parameters(module).values(), *own_buffers(module).values()]
    return any(tensor is not None and is_lazy(tensor) for tensor in tensors)


def in_first_forward(module: nn.Module, ready: Callable[[nn.Module], None]) -> None:
    """Calls ``ready`` once, in the first forward of a lazy module, when its parameters have shapes.

    The hook is a function, which copies of the module (``copy.deepcopy``) share, so that copying a model does not copy
    the strategy.
    """

    def hook(module: nn.Module, inputs: object) -> None:
        handle.remove()
        ready(module)

    handle = module.register_forward_pre_hook(hook)


def _unless_compiling(hook: Callable[[nn.Module, str, Any], None]) -> Callable[[nn.Module, str, Any], None]:
    def on_registration(module: nn.Module, name: str, value: Any) -> None:
        if not torch.compiler.is_compiling():
            hook(module, name, value)

    return on_registration
