"""The private names of torch that this project uses: all of them, and none elsewhere.

Each has the reason why no public name does, and names other projects that rely on it. All were checked against torch
2.9.1, 2.13.0, 2.14.1 and 2.15.0; ``tests/code_rules/test_torch_private.py`` uses each of them on the torch that is
installed. c10d calls some methods of a process group by private names, under which :mod:`towers.c10d.group` has to
define them; torchrun's agent is extended by the methods that its documentation leaves to subclasses
(:mod:`towers.launching.agent`).

Nothing here imports torch's compiler, which takes a second to load.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.optim import Optimizer
from torch.overrides import _pop_mode_temporarily

_Function = TypeVar("_Function", bound=Callable[..., Any])
_VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])

COMPILER = "torch._dynamo"
"""The module of torch's compiler; loaded once it is used."""

COMPILED_AUTOGRAD = f"{COMPILER}.config.compiled_autograd"
"""The option by which the compiler runs backwards; named in messages."""

TRACED_AUTOGRAD = f"{COMPILER}.config.trace_autograd_ops"
"""The option by which the compiler takes a backward into its graph; named in messages."""

# -- autograd ----------------------------------------------------------------------------------------------

DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""Within it a tensor subclass is treated as a tensor; as ``torch.Tensor`` uses it itself."""

current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that runs in this thread, -1 outside of one; as ``torch.utils.checkpoint`` uses it."""

current_autograd_node: Callable[[], Any] = torch._C._current_autograd_node
"""The node that a backward runs in this thread, None outside of one: tells a reentrant backward from another."""


def queue_callback(call: Callable[[], None]) -> None:
    """From within a backward: have ``call`` called at its end. Public since torch 2.15; DDP and FSDP use this one."""
    public = getattr(torch.autograd.graph, "queue_callback", None)
    (public or torch.autograd.Variable._execution_engine.queue_callback)(call)  # type: ignore[attr-defined]


def last_gradient_hook(parameter: Tensor) -> int:
    """The id of the hook that runs last when a gradient was accumulated; torch shows the order nowhere else."""
    last: int = next(reversed(parameter._post_accumulate_grad_hooks))  # type: ignore[attr-defined]
    return last


SAVED_FACTORS = ("_saved_other", "_saved_self")
"""Attributes of autograd's nodes for products and quotients: the factors. Autograd's documentation shows such names."""

SAVED_REDUCTION, SAVED_TARGET, SAVED_TOTAL_WEIGHT = "_saved_reduction", "_saved_target", "_saved_total_weight"
"""Attributes of the nodes of torch's losses."""

SAVED_SIZES = "_saved_self_sym_sizes"
"""The attribute of the nodes of sums and means that holds the shape of what they reduce."""

# -- tensors -----------------------------------------------------------------------------------------------

foreach_add_ = torch._foreach_add_
"""Adds many tensors to many in one call; as torch's optimizers use it."""

foreach_copy_ = torch._foreach_copy_
"""Copies many tensors to many in one call; as torch's optimizers use it."""


def storage_holders(tensor: Tensor) -> int:
    """How many tensors lie in the memory of ``tensor``; as CUDA graph trees count them."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def in_functorch_transform() -> bool:
    """Whether a transform of ``torch.func`` is at work in this thread."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_functorch_tensor(tensor: Tensor) -> bool:
    """Whether a tensor belongs to a transform of ``torch.func``, so that its memory cannot be read."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


pop_mode_temporarily = _pop_mode_temporarily
"""A context without the ``TorchFunctionMode`` that was entered last; as such modes use it for calls of their own."""

# -- modules and optimizers --------------------------------------------------------------------------------

BatchNormBase = _BatchNorm
"""What all of torch's BatchNorm layers have in common; ``nn.SyncBatchNorm.convert_sync_batchnorm`` asks for it, too."""

NormBase = _NormBase
"""What all of torch's layers with running statistics have in common."""

own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = operator.attrgetter("_buffers")
"""The buffers that a module itself holds, by name, in which they can be replaced; ``register_buffer`` refuses some."""

own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = operator.attrgetter("_parameters")
"""The parameters that a module itself holds, by name, in which they can be replaced."""

unsaved_buffers: Callable[[nn.Module], set[str]] = operator.attrgetter("_non_persistent_buffers_set")
"""The names of a module's buffers that are not in its ``state_dict``."""


def state_versions(state: Any) -> dict[str, Any]:
    """The versions beside a ``state_dict``, by which modules know how to read what older ones have saved."""
    return dict(getattr(state, "_metadata", {}))


def set_state_versions(state: Any, versions: dict[str, Any]) -> None:
    """Put versions beside a ``state_dict``; ``nn.Module.load_state_dict`` reads them there."""
    state._metadata = versions


def inner_schedules(schedule: Any) -> list[Any]:
    """The schedules that a ``SequentialLR`` or ``ChainedScheduler`` is made of; those of its state if there is one."""
    schedules: list[Any] = (
        schedule.get("_schedulers", []) if isinstance(schedule, dict) else getattr(schedule, "_schedulers", [])
    )
    return schedules


def step_hooks(optimizer: Optimizer) -> tuple[Any, Any]:
    """An optimizer's hooks before and after its step, by id, in ordered dicts: torch has no way to say who is last."""
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks


def count_as_stepped(optimizer: Optimizer) -> None:
    """Tell schedules of the learning rate that an optimizer has stepped, elsewhere; else they warn of their order."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


# -- the compiler ------------------------------------------------------------------------------------------


def disable_dynamo(function: _Function) -> _Function:
    """Decorator: the compiler leaves a function alone. ``torch.compiler.disable`` would load the compiler at once."""
    wrapped: Any = torch._disable_dynamo(function)
    return cast(_Function, wrapped)


def skip_in_compiler(files: Sequence[str]) -> None:
    """Let the compiler, which is loaded, neither compile nor trace what modules define.

    It makes a regular expression of all at each ``add``, which takes 1 ms: so that is called once, for this module.

    Args:
        files: full paths of modules, and of packages with a slash at the end.
    """
    from torch._dynamo import trace_rules

    trace_rules.SKIP_DIRS += files
    trace_rules.add(__name__)


def compiled_autograd_runs() -> bool:
    """Whether compiled autograd runs the backward of this thread."""
    module = sys.modules.get(f"{COMPILER}.compiled_autograd")
    return module is not None and bool(module.in_compiled_autograd_region)


def compiler_traces() -> bool:
    """Whether the compiler traces at this moment; ``torch.compiler.is_compiling`` says so within a graph only."""
    return torch._guards.CompileContext.try_get() is not None


# -- the profiler ------------------------------------------------------------------------------------------

profiler_runs: Callable[[], bool] = torch.autograd._profiler_enabled
"""Whether a profiler records this thread, in 0.05 µs; torch's RPC asks so, too. A range costs 6 µs where none does."""

# -- processes ---------------------------------------------------------------------------------------------


def is_in_bad_fork(kind: str) -> bool:
    """Whether this process was forked from one that uses a kind of accelerator, and cannot use it itself."""
    asks = getattr(torch.get_device_module(kind), "_is_in_bad_fork", None)  # of every accelerator's module
    return asks is not None and bool(asks())


def load_compiler() -> None:
    """Load torch's compiler, as the first optimizer of a process does."""
    import torch._dynamo  # noqa: F401


def start_agents_processes_by(start: Callable[..., Any]) -> None:
    """Let torch's agent in this process call ``start`` in place of ``subprocess.Popen``; it takes no such argument."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.Popen = start  # type: ignore[assignment, misc]


def default_store() -> dist.Store:
    """The store by which the default group was formed; torch's own device meshes and checkpoints ask for it so."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The object that makes a group's collectives on a device: NCCL's tells of errors there."""
    return group._get_backend(device)


def name_backend(group: dist.ProcessGroup, name: str) -> None:
    """Say which backend a process group written in Python is, so that c10d's own hooks can be attached to it.

    Torch 2.15 attaches a flight recorder and a health check to every group, and asks the group's default backend for
    both. A backend in Python, which torch has since 2.14, is registered as that; it makes no collectives.
    """
    if _VERSION < (2, 14):
        return

    class Named(torch._C._distributed_c10d.Backend):  # type: ignore[misc]
        def getBackendName(self) -> str:
            return name

    kind = dist.ProcessGroup.BackendType.CUSTOM
    group._register_backend(torch.device("cpu"), kind, Named(group.rank(), group.size()))
    group._set_default_backend(kind)


def nccl_aborts_at_once() -> bool:
    """Whether ``"nccl"`` is the engine that ends the process as soon as it finds an error: the default since 2.15."""
    wanted = os.environ.get("TORCH_DIST_USE_NCCL2", "1" if _VERSION >= (2, 15) else "0")
    return hasattr(dist, "ProcessGroupNCCL2") and wanted != "0"


def bound_device() -> torch.device | None:
    """The device that the default group is bound to; NCCL's engine of torch 2.15 chooses one where none is named."""
    device: torch.device | None = getattr(dist.group.WORLD, "bound_device_id", None)
    return device
