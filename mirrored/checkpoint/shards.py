"""Tensors that are sharded over the towers: ``torch.distributed.checkpoint`` plans who writes and reads which part.

[Note: files of shards] Each tower writes its parts into a safetensors file, with their offsets in the header as torch's
``HuggingFaceStorageReader`` reads them. (The default format of torch contains pickles, which can run code.) All files
of a checkpoint are in its folder before its manifest is written and the folder renamed, so it is complete or absent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.futures import Future

from mirrored.checkpoint.codec import MISFITS, Malformed
from mirrored.checkpoint.tensors import FileLayout, shard_file

WriteFile = Callable[[pathlib.Path, Iterable[memoryview]], tuple[int, str]]


class Shards:
    """The parts that this tower has of sharded tensors, to be written into one checkpoint by all towers together.

    Args:
        tensors: by name, the same names on all towers. While they are written, only their layout is read.
        group: a c10d group of all towers, of which another thread may use the CPU's collectives.
        write_file: writes a file, and returns its size and SHA-256.

    Attributes:
        parts: the values by name, on their devices; not copied. Copies may replace them.
        are_written: is set when this tower has written its parts, or cannot.
        is_settled: whether all towers have learned of the success or failure of the write.
        failed_elsewhere: whether the write has failed because of another tower, which reports its own error.
    """

    def __init__(self, tensors: Mapping[str, DTensor], group: Any, write_file: WriteFile) -> None:
        self._tensors, self._group, self._write_file = dict(tensors), group, write_file
        self.parts = {name: tensor.to_local().detach().contiguous() for name, tensor in tensors.items()}
        self.are_written = threading.Event()
        self.is_settled = False
        self.failed_elsewhere = False

    def write(self, folder: pathlib.Path, *, coordinates: bool) -> dict[str, dict[str, Any]]:
        """Writes the parts. All towers must call it, or :meth:`give_up`.

        Args:
            folder: on the tower that ``coordinates``: the checkpoint's unfinished folder. On the others: its parent.

        Returns:
            On the tower that ``coordinates``: size and checksum of each file by name, for the manifest.

        Raises:
            OSError, ValueError: this tower cannot write its parts.
            RuntimeError: another tower cannot, or has ended.
        """
        return self._save(_Parts(self.parts, self._write_file, folder, coordinates, self.are_written))

    def give_up(self, error: Exception) -> None:
        """Reports to the other towers that this one has failed before :meth:`write`."""
        if not self.is_settled:
            with contextlib.suppress(type(error)):
                self._save(_Failed(error, self._write_file, self.are_written))

    def _save(self, writer: _Parts) -> dict[str, dict[str, Any]]:
        self.is_settled = True
        try:
            dcp.save(dict(self._tensors), storage_writer=writer, process_group=self._group)
        except CheckpointException as error:
            own = error.failures.get(self._group.rank())
            if own is None:
                self.failed_elsewhere = True
                raise RuntimeError(f"tower {min(error.failures)} could not write its parts") from None
            raise own[0] from None
        finally:
            self.are_written.set()
        return writer.files


class _Parts(dcp.StorageWriter):
    """Writes one tower's file.

    Attributes:
        files: on the tower that coordinates, after the write: size and checksum of each file by name.
    """

    def __init__(
        self,
        parts: Mapping[str, Tensor],
        write_file: WriteFile,
        folder: pathlib.Path,
        coordinates: bool,
        are_written: threading.Event,
    ) -> None:
        self._parts, self._write_file, self._are_written = parts, write_file, are_written
        self._folder, self._coordinates = folder, coordinates
        self.files: dict[str, dict[str, Any]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        return [
            dataclasses.replace(plan, storage_data=(self._folder.name, shard_file(tower)))
            for tower, plan in enumerate(plans)
        ]

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[Any]]:
        done: Future[list[Any]] = Future()
        unfinished, name = plan.storage_data
        folder = self._folder if self._coordinates else self._folder / unfinished
        offsets = {item.index.fqn: {"saved_offsets": list(item.index.offset or [])} for item in plan.items}
        written = None
        if offsets:
            metadata = {"DCP_SHARDING_INFO": json.dumps(offsets), "format": "pt"}
            layout = FileLayout({fqn: self._parts[fqn] for fqn in offsets}, metadata)
            written = name, *self._write_file(folder / name, layout.pieces())
        self._are_written.set()
        done.set_result([dcp.storage.WriteResult(item.index, 0, written) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        for written in {result.storage_data for tower in results for result in tower}:
            name, size, checksum = written
            self.files[name] = {"bytes": size, "sha256": checksum}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class _Failed(_Parts):
    """Raises an error on all towers."""

    def __init__(self, error: Exception, write_file: WriteFile, are_written: threading.Event) -> None:
        super().__init__({}, write_file, pathlib.Path(), True, are_written)
        self._error = error

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        raise self._error


class _Reader(dcp.HuggingFaceStorageReader):
    """Reads the headers of the files once."""

    @functools.cached_property
    def metadata(self) -> Metadata:
        return super().read_metadata()

    def read_metadata(self) -> Metadata:
        return self.metadata


def _check_complete(metadata: Metadata, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        stored = metadata.state_dict_metadata.get(name)
        if not isinstance(stored, TensorStorageMetadata) or stored.size != tensor.shape:
            raise Malformed(f"no parts of {name!r} have the shape {tuple(tensor.shape)}")
        if sum(math.prod(chunk.sizes) for chunk in stored.chunks) != tensor.numel():
            raise Malformed(f"parts of {name!r} are missing")


def read_shards(folder: str, tensors: Mapping[str, Tensor]) -> None:
    """Reads sharded tensors: whole, or only this tower's part of a ``DTensor``.

    Args:
        folder: the checkpoint's folder. Its files have been checked.
        tensors: by their names in the checkpoint; they receive the values.

    Raises:
        Malformed: the files do not contain these tensors.
    """
    if not tensors:
        return
    reader = _Reader(folder)
    try:
        _check_complete(reader.metadata, tensors)
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # that nothing is communicated
            dcp.load(dict(tensors), storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        ((reason, _),) = error.failures.values()
        raise Malformed(f"the parts of sharded tensors cannot be read: {reason}") from None
    except (SafetensorError, *MISFITS) as error:
        raise Malformed(f"the parts of sharded tensors cannot be read: {error}") from None
