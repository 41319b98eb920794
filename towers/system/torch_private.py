"""The private names of torch that this project uses: all of them are here, and none elsewhere.

Each has the reason why no public name suffices, or other projects that rely on it. All were checked against torch
2.9.1, 2.13.0, 2.14.1 and 2.15.0. ``tests/code_rules/test_torch_private.py`` uses each of them on the installed torch.
There are two exceptions: c10d calls some methods of a process group by private names, under which
:mod:`towers.c10d.group` must define them; and torchrun's agent is extended through the methods that its documentation
leaves to subclasses (:mod:`towers.launching.starting.agent`).

This module does not import torch's compiler, which takes a second to load.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.overrides import _pop_mode_temporarily

_Function = TypeVar("_Function", bound=Callable[..., Any])
_VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])

COMPILER = "torch._dynamo"
"""The module of torch's compiler; loaded once it is used."""

COMPILED_AUTOGRAD = f"{COMPILER}.config.compiled_autograd"
"""The option with which the compiler runs backwards; named in messages."""

TRACED_AUTOGRAD = f"{COMPILER}.config.trace_autograd_ops"
"""The option with which the compiler includes a backward in its graph; named in messages."""

# -- autograd ----------------------------------------------------------------------------------------------

DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""Inside this context, a tensor subclass is treated as a tensor. ``torch.Tensor`` uses it itself."""

set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""Switches the recording of autograd on or off. ``torch.no_grad`` uses it, and takes ten times as long."""

current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the number of the backward that runs in this thread, -1 outside of one. ``torch.utils.checkpoint`` uses it.
"""

current_autograd_node: Callable[[], Any] = torch._C._current_autograd_node
"""Returns the node that a backward runs in this thread, or None; it distinguishes a reentrant backward from another."""


queue_callback: Callable[[Callable[[], None]], None] = (
    getattr(torch.autograd.graph, "queue_callback", None) or torch.autograd.Variable._execution_engine.queue_callback
)  # type: ignore[attr-defined]
"""Schedules a call, from within a backward, for its end. Public since torch 2.15; DDP and FSDP use the older one."""


def version_of(tensor: Tensor) -> int:
    """Returns a number that every change of a tensor's values increases, also one by autograd. torch documents it."""
    return tensor._version


current_stream_of: Callable[[int], torch.Stream] = getattr(
    torch._C, "_accelerator_getStream", torch.accelerator.current_stream
)
"""Returns the current stream of an accelerator by its index, without the checks of ``torch.accelerator``."""


def address_of_current_stream(kind: str) -> Callable[[int], int] | None:
    """Returns a function for the address of the current stream of CUDA's or XPU's devices, by index; None for others.

    It takes a tenth of the time of :data:`current_stream_of`, which makes an object. Compiled models use it.
    """
    function: Callable[[int], int] | None = getattr(torch._C, f"_{kind}_getCurrentRawStream", None)
    return function


def gradient_hooks(parameter: Tensor) -> dict[int, object]:
    """Returns the hooks that follow a gradient's accumulation, by the ids of their handles, in the order of calls.

    It is always the same object, and torch shows the order nowhere else.
    """
    hooks: dict[int, object] = parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    return hooks


SAVED_FACTORS = ("_saved_other", "_saved_self")
"""Attributes of autograd's nodes for products and quotients: the factors. Autograd's documentation shows such names."""

SAVED_REDUCTION, SAVED_TARGET, SAVED_TOTAL_WEIGHT = "_saved_reduction", "_saved_target", "_saved_total_weight"
"""Attributes of the nodes of torch's losses."""

SAVED_SIZES = "_saved_self_sym_sizes"
"""The attribute of the nodes of sums and means that contains the shape of their input."""

# -- tensors -----------------------------------------------------------------------------------------------

foreach_add_ = torch._foreach_add_
"""Adds many tensors to many in one call. torch's optimizers use it."""

foreach_copy_ = torch._foreach_copy_
"""Copies many tensors to many in one call. torch's optimizers use it."""

foreach_mul_ = torch._foreach_mul_
"""Multiplies many tensors by a number in one call. torch's optimizers use it."""


def storage_holders(tensor: Tensor) -> int:
    """Returns how many tensors share the memory of ``tensor``, as CUDA graph trees count them."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def references(tensors: Sequence[Tensor]) -> int:
    """Returns the sum of the numbers of references to some tensors, in Python and in C++, as CUDA graph trees count."""
    return sum(map(sys.getrefcount, tensors)) + sum(map(Tensor._use_count, tensors))  # type: ignore[attr-defined]


def in_functorch_transform() -> bool:
    """Returns whether a transform of ``torch.func`` is active in this thread."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_functorch_tensor(tensor: Tensor) -> bool:
    """Returns whether a tensor belongs to a transform of ``torch.func``, so that its memory cannot be read."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


pop_mode_temporarily = _pop_mode_temporarily
"""A context without the ``TorchFunctionMode`` that was entered last. Such modes use it for their own calls."""

# -- modules and optimizers --------------------------------------------------------------------------------

BatchNormBase = _BatchNorm
"""The common base class of torch's BatchNorm layers, which ``nn.SyncBatchNorm.convert_sync_batchnorm`` checks for, too.
"""

NormBase = _NormBase
"""The common base class of torch's layers with running statistics."""

own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = operator.attrgetter("_buffers")
"""Returns a module's own buffers, by name, so that they can be replaced; ``register_buffer`` refuses some."""

own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = operator.attrgetter("_parameters")
"""Returns a module's own parameters, by name, so that they can be replaced."""

unsaved_buffers: Callable[[nn.Module], set[str]] = operator.attrgetter("_non_persistent_buffers_set")
"""Returns the names of a module's buffers that are not in its ``state_dict``."""


def move_own(module: nn.Module, device: torch.device) -> None:
    """Moves a module's own tensors to a device, and not those of its children."""
    module._apply(lambda tensor: tensor.to(device), recurse=False)


def state_versions(state: Any) -> dict[str, Any]:
    """Returns the versions of a ``state_dict``, with which modules read the states that older versions have saved."""
    return dict(getattr(state, "_metadata", {}))


def set_state_versions(state: Any, versions: dict[str, Any]) -> None:
    """Attaches versions to a ``state_dict``, where ``nn.Module.load_state_dict`` reads them."""
    state._metadata = versions


def inner_schedules(schedule: Any) -> list[Any]:
    """Returns the schedules in a ``SequentialLR`` or ``ChainedScheduler``, or in the state of one."""
    schedules: list[Any] = (
        schedule.get("_schedulers", []) if isinstance(schedule, dict) else getattr(schedule, "_schedulers", [])
    )
    return schedules


def step_hooks(optimizer: Optimizer) -> tuple[Any, Any]:
    """Returns an optimizer's hooks before and after its step, by id, in order; torch has no public order of them."""
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks


def count_as_stepped(optimizer: Optimizer) -> None:
    """Records for schedules of the learning rate that an optimizer has stepped elsewhere; otherwise they warn."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


# -- the compiler ------------------------------------------------------------------------------------------


def disable_dynamo(function: _Function) -> _Function:
    """Decorates a function that the compiler ignores. ``torch.compiler.disable`` would load the compiler at once."""
    wrapped: Any = torch._disable_dynamo(function)
    return cast(_Function, wrapped)


def skip_in_compiler(files: Sequence[str]) -> None:
    """Makes the compiler, which is loaded, neither compile nor trace the functions of modules.

    The compiler builds a regular expression of all entries at each ``add``, which takes 1 ms. So ``add`` is called
    once, for this module.

    Args:
        files: full paths of modules, and of packages with a slash at the end.
    """
    from torch._dynamo import trace_rules

    trace_rules.SKIP_DIRS += files
    trace_rules.add(__name__)


class _GraphSplit(NamedTuple):
    """The attribute that the compiler reads from the DDP module that runs."""

    bucket_bytes_cap: int


@contextlib.contextmanager
def split_graphs(bucket_bytes: int) -> Iterator[None]:
    """Makes the compiler split graphs that it compiles inside at the boundaries of gradient buckets.

    The backward of a compiled graph is one node of autograd: all its gradients arrive when it is done. The compiler
    splits graphs (``DDPOptimizer``) while a DDP module runs the model, unless ``torch._dynamo.config.optimize_ddp`` is
    false.
    """
    before = DistributedDataParallel._active_ddp_module
    split: Any = _GraphSplit(max(bucket_bytes, dist._DEFAULT_FIRST_BUCKET_BYTES))
    DistributedDataParallel._active_ddp_module = split
    try:
        yield
    finally:
        DistributedDataParallel._active_ddp_module = before


def compiled_autograd_runs() -> bool:
    """Returns whether compiled autograd runs the backward of this thread."""
    module = sys.modules.get(f"{COMPILER}.compiled_autograd")
    return module is not None and bool(module.in_compiled_autograd_region)


def compiler_traces() -> bool:
    """Returns whether the compiler is tracing now. ``torch.compiler.is_compiling`` reports that within a graph only."""
    return torch._guards.CompileContext.try_get() is not None


# -- the profiler ------------------------------------------------------------------------------------------

profiler_runs: Callable[[], bool] = torch.autograd._profiler_enabled
"""Returns whether a profiler records this thread, in 0.05 µs. torch's RPC uses it, too. A range without one costs 6 µs.
"""

# -- processes ---------------------------------------------------------------------------------------------


def is_in_bad_fork(kind: str) -> bool:
    """Returns whether this process was forked from one that uses a kind of accelerator, and cannot use it itself."""
    asks = getattr(torch.get_device_module(kind), "_is_in_bad_fork", None)  # every accelerator's module has it
    return asks is not None and bool(asks())


def load_compiler() -> None:
    """Loads torch's compiler, as the first optimizer of a process does."""
    import torch._dynamo  # noqa: F401


def start_agents_processes_by(start: Callable[..., Any]) -> None:
    """Makes torch's agent in this process call ``start`` instead of ``subprocess.Popen``; it has no such argument."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.Popen = start  # type: ignore[assignment, misc]


def default_store() -> dist.Store:
    """Returns the store with which the default group was formed. torch's own device meshes and checkpoints use it."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def count_of_groups() -> int:
    """Returns the number of this process's groups, which c10d puts into the name of a group that its ranks make alone.

    If it differs between them, they wait for each other in groups of different names. No public name tells it.
    """
    return len(dist.distributed_c10d._world.pg_names)


def recorded_collectives() -> list[dict[str, Any]]:
    """Returns the records of torch's flight recorder on collectives of NCCL and Gloo, in the order of the calls.

    ``torch.distributed.flight_recorder`` analyses the same records, from files that each rank has written.
    """
    texts = [
        dump()
        for dump in (getattr(torch._C._distributed_c10d, f"_dump_{name}_trace_json", None) for name in ("nccl", "fr"))
        if dump is not None
    ]
    return [record for text in texts for record in json.loads(text).get("entries", ())]


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Returns the object that runs a group's collectives on a device, which for NCCL reports errors."""
    return group._get_backend(device)


def name_backend(group: dist.ProcessGroup, name: str) -> None:
    """Sets the backend's name of a process group written in Python, so that c10d's own hooks can be attached to it.

    Torch 2.15 attaches a flight recorder and a health check to every group, and queries the group's default backend for
    both. A backend in Python, which torch supports since 2.14, is registered as that. It runs no collectives.
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
    """Returns whether ``"nccl"`` is the engine that ends the process at an error at once: the default since 2.15."""
    wanted = os.environ.get("TORCH_DIST_USE_NCCL2", "1" if _VERSION >= (2, 15) else "0")
    return hasattr(dist, "ProcessGroupNCCL2") and wanted != "0"


def bound_device() -> torch.device | None:
    """Returns the device that the default group is bound to. NCCL's engine of torch 2.15 chooses one by default."""
    device: torch.device | None = getattr(dist.group.WORLD, "bound_device_id", None)
    return device
