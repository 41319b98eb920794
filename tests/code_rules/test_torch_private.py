"""The private names of torch that we use are there in the torch that is installed, and nowhere else in our code."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.support.jobs import ROOT
from towers.system import tensors, torch_private

PACKAGES = ("mirrored", "towers")
ELSEWHERE = {
    # of Python, NumPy, torchmetrics and Lightning, each explained where it is used
    *("_exit", "_current_frames", "_getframe", "_replace", "_SubParsersAction", "_fields"),
    *("_rand", "_bit_generator"),
    *("_accelerator_connector", "_layer_sync", "_results"),
    *("_sync_dist", "_computed", "_defaults", "_reductions", "_update_count"),
    # what torchrun's LogsSpecs keeps for its subclasses, and a count in torch's documentation of in-place operations
    *("_root_log_dir", "_version"),
    "_run_module_as_main",  # of Python's runpy: what ``python -m`` calls
    "_register_atexit",  # of Python's threading: what runs before threads are waited for, as concurrent.futures does
    *("_shutdown", "_run_exitfuncs"),  # of Python's threading and atexit: the ends of threads and of a process
    "_registry",  # of Python's weakref: the finalizers that have not run
}


def sources() -> Iterator[tuple[str, ast.AST]]:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if path.name not in ("torch_private.py", "keras_private.py"):
                yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def test_no_other_module_uses_private_names() -> None:
    trees = dict(sources())
    ours = {node.name for tree in trees.values() for node in ast.walk(tree) if hasattr(node, "name")}
    ours |= {node.id for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.Name)}
    attributes = [
        (path, node) for path, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.Attribute)
    ]
    ours |= {node.attr for _, node in attributes if isinstance(node.ctx, ast.Store)}
    assert attributes
    assert [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path, node in attributes
        if re.match(r"_[^_]", node.attr) and node.attr not in ours | ELSEWHERE
    ] == []


def test_no_other_module_imports_private_names() -> None:
    imports = [
        (path, node.module or "", alias.name)
        for path, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert imports
    assert [found for found in imports if found[1].split(".")[0] == "torch" and "._" in f".{found[1]}.{found[2]}"] == []


def test_within_a_backward() -> None:
    said: list[tuple[int, bool]] = []
    weight = nn.Parameter(torch.ones(2))

    def arrives(_: torch.Tensor) -> None:
        said.append((torch_private.current_graph_task_id(), torch_private.current_autograd_node() is None))
        torch_private.queue_callback(lambda: said.append((-2, True)))

    handle = weight.register_post_accumulate_grad_hook(arrives)
    hooks = torch_private.gradient_hooks(weight)
    later = weight.register_post_accumulate_grad_hook(lambda _: None)
    assert list(hooks) == [handle.id, later.id]
    later.remove()
    assert list(hooks) == [handle.id]
    assert torch_private.gradient_hooks(weight) is hooks
    assert torch_private.current_graph_task_id() == -1
    (weight * 3).sum().backward()
    (task, _), (end, _) = said
    assert task >= 0
    assert end == -2


def test_what_nodes_save() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    assert tuple(getattr(x.sum().grad_fn, torch_private.SAVED_SIZES)) == (2, 3)
    assert any(hasattr((x * 2).grad_fn, name) for name in torch_private.SAVED_FACTORS)
    loss = nn.functional.cross_entropy(x, torch.tensor([0, 1])).grad_fn
    assert getattr(loss, torch_private.SAVED_REDUCTION) == 1
    assert getattr(loss, torch_private.SAVED_TARGET).numel() == 2
    assert float(getattr(loss, torch_private.SAVED_TOTAL_WEIGHT)) == 2


def test_of_tensors() -> None:
    a, b = torch.zeros(4), torch.ones(4)
    alone = torch_private.storage_holders(a)
    view = a[:2]
    assert torch_private.storage_holders(a) == alone + 1
    del view
    once = torch_private.references([a])
    again = a
    assert torch_private.references([a]) == once + 1
    del again
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = a
    assert torch_private.references([a]) == once + tensors.REFERENCES_OF_A_PARAMETER
    parameter.grad = None
    assert torch_private.references([a]) == once
    torch_private.foreach_add_([a], [b])
    torch_private.foreach_copy_([b], [a * 5])
    assert b.tolist() == [5.0] * 4
    inside: list[tuple[bool, bool]] = []

    def watch(x: torch.Tensor) -> torch.Tensor:
        inside.append((torch_private.in_functorch_transform(), torch_private.is_functorch_tensor(x)))
        return x.sum()

    torch.func.grad(watch)(a)
    assert inside == [(True, True)]
    assert not torch_private.in_functorch_transform()
    assert not torch_private.is_functorch_tensor(a)


def test_of_subclasses_and_modes() -> None:
    class Mode(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.calls += 1
            return func(*args, **(kwargs or {}))

    with Mode() as mode:
        torch.ones(2)
        before = mode.calls
        with torch_private.pop_mode_temporarily():
            torch.ones(2)
        assert mode.calls == before > 0
    with torch_private.DisableTorchFunctionSubclass():
        assert torch.ones(1).item() == 1


def test_of_modules() -> None:
    norm = nn.BatchNorm1d(3)
    assert isinstance(norm, torch_private.BatchNormBase)
    assert isinstance(nn.InstanceNorm1d(3), torch_private.NormBase)
    assert set(torch_private.own_buffers(norm)) == {"running_mean", "running_var", "num_batches_tracked"}
    assert set(torch_private.own_parameters(norm)) == {"weight", "bias"}
    norm.register_buffer("beside", torch.zeros(1), persistent=False)
    assert torch_private.unsaved_buffers(norm) == {"beside"}
    state = norm.state_dict()
    versions = torch_private.state_versions(state)
    assert versions[""]["version"] == 2
    torch_private.set_state_versions(state, {})
    assert torch_private.state_versions(state) == {}


def test_of_optimizers() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    first, last = (optimizer.register_step_pre_hook(lambda *_: None) for _ in range(2))
    after = optimizer.register_step_post_hook(lambda *_: None)
    before_hooks, after_hooks = torch_private.step_hooks(optimizer)
    before_hooks.move_to_end(first.id)
    assert list(before_hooks) == [last.id, first.id]
    assert list(after_hooks) == [after.id]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    torch_private.count_as_stepped(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step()
    inner = torch.optim.lr_scheduler.ConstantLR(optimizer)
    chained = torch.optim.lr_scheduler.ChainedScheduler([inner], optimizer)
    assert torch_private.inner_schedules(chained) == [inner]
    assert torch_private.inner_schedules(chained.state_dict()) == [inner.state_dict()]


def test_of_the_compiler() -> None:
    calls: list[bool] = []

    @torch_private.disable_dynamo
    def outside() -> None:
        calls.append(torch.compiler.is_compiling())

    def function(x: torch.Tensor) -> torch.Tensor:
        outside()
        return x + 1

    assert torch.compile(function, backend="eager")(torch.zeros(1)).item() == 1
    assert calls == [False]
    assert not torch_private.compiled_autograd_runs()
    assert not torch_private.compiler_traces()
    torch_private.skip_in_compiler(["/a/module.py", "/a/package/"])
    skipped = torch._dynamo.trace_rules.SKIP_DIRS_RE.match
    assert [bool(skipped(f"/a/{name}.py")) for name in ("module", "package/one", "other")] == [True, True, False]
    assert torch_private.TRACED_AUTOGRAD.startswith(torch_private.COMPILER)
    assert hasattr(torch._dynamo.config, "compiled_autograd")
    active = torch.nn.parallel.DistributedDataParallel._get_active_ddp_module
    with torch_private.split_graphs(2**24):
        assert active().bucket_bytes_cap == 2**24
        with torch_private.split_graphs(1):  # the compiler refuses less
            assert active().bucket_bytes_cap == torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
        assert active().bucket_bytes_cap == 2**24
    assert active() is None


def test_of_the_profiler() -> None:
    assert not torch_private.profiler_runs()
    with torch.profiler.profile():
        assert torch_private.profiler_runs()


def test_of_process_groups(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    dist = torch.distributed
    assert isinstance(torch_private.is_in_bad_fork("cuda"), bool)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        assert isinstance(torch_private.default_store(), dist.Store)
        assert torch_private.backend_of(dist.group.WORLD, torch.device("cpu")) is not None
        assert torch_private.bound_device() is None
        before = torch_private.count_of_groups()
        dist.new_group([0], use_local_synchronization=True)
        assert torch_private.count_of_groups() == before + 1
        plain = dist.ProcessGroup(dist.HashStore(), 0, 1)
        torch_private.name_backend(plain, "ours")
        if torch.__version__ >= (2, 14):
            assert torch_private.backend_of(plain, torch.device("cpu")).name() == "ours"
    finally:
        dist.destroy_process_group()
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    if dist.is_nccl_available():
        assert torch_private.nccl_aborts_at_once() == (torch.__version__ >= (2, 15))
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", "0")
    assert not torch_private.nccl_aborts_at_once()
