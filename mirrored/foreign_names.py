"""Names of TensorFlow, torch and other libraries that users may type, and their equivalents here.

They are looked up only if an attribute or a module is missing.
"""

from __future__ import annotations

import sys

_OPTIONS = "communication=mirrored.CommunicationOptions(implementation=…, algorithm=…) of the strategy"
_ITSELF = "the strategy has its methods itself: reduce, gather, run, distribute_dataset"
_PREPARED = "model and optimizer in strategy.scope(), data by strategy.distribute_dataset(…)"
_CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), …) after backward(), when gradients are averaged"
_SAVE = "mirrored.CheckpointManager(strategy, folder, {…}); torch.save under `if strategy.is_chief:`"
_EPOCHS = "iterating again is the next epoch, in a new order of (seed, epoch); nothing has to be set"

_INSTEAD = {
    "mirrored": {
        "experimental": "mirrored itself has the names that TensorFlow has there, without experimental_",
        "distribute": "from mirrored itself: mirrored.MirroredStrategy()",
        "NcclAllReduce": f"{_OPTIONS}: implementation='nccl' is the default between GPUs",
        "HierarchicalCopyAllReduce": f"{_OPTIONS}; several hosts reduce inside each host first without being asked",
        "ReductionToOneDevice": f"{_OPTIONS}; all towers reduce together",
        "CrossDeviceOps": _OPTIONS,
        "DistributedDataParallel": "no wrapper: create the model in strategy.scope(), or strategy.mirror(model)",
        "DistributedSampler": "strategy.distribute_dataset(dataset, global_batch_size)",
        "init_process_group": "the strategy makes it",
        "keras": "import mirrored.keras, before keras",
        "lightning": "import mirrored.lightning",
    },
    "Strategy": {
        "extended": _ITSELF,
        "rank": "strategy.topology.index; inside run get_replica_context().replica_id_in_sync_group",
        "local_rank": "strategy.topology.local_index; strategy.device is this tower's device",
        "world_size": "strategy.num_replicas_in_sync",
        "num_towers": "strategy.num_replicas_in_sync",
        "process_index": "strategy.topology.index",
        "global_rank": "strategy.topology.index",
        "num_processes": "strategy.num_replicas_in_sync",
        "is_main_process": "strategy.is_chief",
        "is_global_zero": "strategy.is_chief",
        "is_local_main_process": "strategy.topology.local_index == 0",
        "experimental_run_v2": "strategy.run(fn, args=(…))",
        "experimental_run": "for batch in dataset: strategy.run(fn, args=(batch,))",
        "make_dataset_iterator": "for batch in strategy.distribute_dataset(…)",
        "experimental_make_numpy_dataset": "strategy.distribute_dataset((inputs, labels), global_batch_size)",
        "prepare": _PREPARED,
        "setup": _PREPARED,
        "setup_dataloaders": "strategy.distribute_dataset(loader), with the global batch size in the loader",
        "all_reduce": 'strategy.reduce("sum", value); inside run, differentiable, get_replica_context().all_reduce',
        "all_gather": "strategy.gather(value); inside run, differentiable, get_replica_context().all_gather",
        "gather_for_metrics": "strategy.gather(value), where there is nothing to drop",
        "broadcast": "torch.distributed.broadcast; objects created in strategy.scope() are broadcast already",
        "accumulate": "strategy.no_sync() around every backward but the last one before optimizer.step()",
        "no_backward_sync": "strategy.no_sync()",
        "autocast": "torch.autocast(strategy.device.type, torch.bfloat16)",
        "clip_grad_norm_": _CLIP,
        "clip_gradients": _CLIP,
        "save": _SAVE,
        "save_state": _SAVE,
        "load": _SAVE,
        "load_state": _SAVE,
        "unwrap": "the model is not wrapped",
        "unwrap_model": "the model is not wrapped",
        "wait_for_everyone": "strategy.barrier()",
    },
    "DistributedDataset": {
        "set_epoch": _EPOCHS,
        "sampler": _EPOCHS,
        "batch_sampler": _EPOCHS,
        "with_options": "arguments of strategy.distribute_dataset",
    },
}


def missing(owner: str, name: str) -> AttributeError | ImportError:
    """Returns the error for a missing attribute, with its equivalent if there is one.

    ``from mirrored import NcclAllReduce`` asks for the attribute, drops an AttributeError, and looks for a module of
    that name. So there, the error is an ImportError.

    Args:
        owner: "mirrored", or the class without the attribute.
    """
    if (instead := _INSTEAD[owner].get(name)) is not None and owner == "mirrored" and _is_imported():
        return ImportError(f"cannot import name {name!r} from 'mirrored': {instead}", name=name)
    of = "module 'mirrored'" if owner == "mirrored" else f"{owner} object"
    return AttributeError(f"{of} has no attribute {name!r}{f': {instead}' if instead else ''}")


def _is_imported() -> bool:
    """Returns whether an import statement asks the package for the attribute."""
    return sys._getframe(3).f_code.co_name == "_handle_fromlist"
