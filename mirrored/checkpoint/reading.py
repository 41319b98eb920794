"""Reads checkpoints without a manager: parts of a model, or weights under other names, and a table of the contents."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fnmatch
import itertools
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mirrored.checkpoint.codec import Malformed, sharded_in
from mirrored.checkpoint.errors import CheckpointError, listed, raise_first
from mirrored.checkpoint.folder import find_checkpoint
from mirrored.checkpoint.manifest import TENSORS, StoredCheckpoint
from mirrored.checkpoint.tensors import FileLayout, TensorFile
from mirrored.checkpoint.tracked import TrackedModule
from mirrored.interceptor import interceptor
from towers.collectives.agreement import announce
from towers.system.messages import printable
from towers.system.tensors import is_dtensor, part_of

_Read = Callable[[Mapping[str, Any] | None], dict[str, Tensor]]
"""Returns all tensors by name: in the layout of the given sharded ones and otherwise whole, or without data (None)."""

_MOST_ROWS = 100_000
_LONGEST = 200  # characters per path


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """The result of :func:`load_weights`.

    Attributes:
        loaded: the loaded names in the model, each with its name in the file.
        kept: names in the model whose values are unchanged.
        unused: names in the file that were not loaded.
        misfits: one sentence for each name that has another shape in the file. The model keeps these values.
    """

    loaded: dict[str, str]
    kept: tuple[str, ...]
    unused: tuple[str, ...]
    misfits: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{len(self.loaded)} loaded, {len(self.kept)} kept as they were, {len(self.unused)} in the file unused"
        ]
        lines += [f"  kept: {name}" for name in self.kept]
        lines += [f"  unused: {printable(name, 1000)}" for name in self.unused]
        return "\n".join([*lines, *(f"  does not fit: {text}" for text in self.misfits)])


def load_weights(
    module: nn.Module,
    source: str | os.PathLike[str],
    *,
    name: str = "model",
    include: str | Sequence[str] = "*",
    exclude: str | Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    skip_misfits: bool = False,
) -> LoadReport:
    """Loads parameters and buffers of a model by name. All others keep their values.

    Every tower calls it before the first ``run``, and must find the same file. A tower reads only its own parts of a
    sharded model (``strategy.shard``).

    Args:
        module: the model. Values are converted to its dtypes.
        source: a checkpoint's folder (its checksums are compared), the folder of a run, for its newest step, or a
            safetensors file.
        name: the name of the model among the checkpoint's objects.
        include, exclude: patterns (``"backbone.*"``) of names in the model, after renaming.
        rename: replaces prefixes of names in the file by prefixes of names in the model. The first entry that matches
            applies. ``{"encoder.": "backbone."}`` loads ``encoder.0.weight`` into ``backbone.0.weight``.
        skip_misfits: whether tensors that have another shape in the file (a head for other classes) are skipped.

    Returns:
        The names that were loaded, kept and unused.

    Raises:
        CheckpointError: the source cannot be read, nothing in it fits, or shapes differ. The model is unchanged.
    """
    path = pathlib.Path(source)
    own = interceptor().folder(path.parent) / path.name  # `mirrored verify` gives each run its own folder
    path = own if own.exists() else path
    if path.name != TENSORS:  # that file can be read alone
        path = find_checkpoint(path)
    here = module.state_dict()
    with _opened(path, name) as read:
        saved = read(None)
        taken: dict[str, str] = {}
        for key in saved:
            new = _renamed(key, rename or {})
            if isinstance(here.get(new), Tensor) and _matches(new, include) and not _matches(new, exclude):
                if new in taken:
                    raise CheckpointError(f"{path}: both {taken[new]} and {key} would be loaded into {new}")
                taken[new] = key
        misfits = {
            new: f"{new} has shape {tuple(here[new].shape)} here, and {tuple(saved[key].shape)} in the file"
            for new, key in taken.items()
            if not is_lazy(here[new]) and here[new].shape != saved[key].shape
        }
        if misfits and not skip_misfits:
            raise CheckpointError(f"{path} does not fit, nothing was loaded: {'; '.join(misfits.values())}")
        loaded = {new: key for new, key in taken.items() if new not in misfits}
        if not loaded:
            raise CheckpointError(
                f"{path}: none of its {len(saved)} tensors has a name that the model has (see rename)"
            )
        values = read({key: here[new] for new, key in loaded.items() if is_dtensor(here[new])})
    roll_back = TrackedModule(name, module, lambda parameter: False).rollback()
    try:
        with torch.no_grad():
            module.load_state_dict({new: values[key] for new, key in loaded.items()}, strict=False)
    except Exception as error:  # a user's module may raise anything
        roll_back()
        raise CheckpointError(f"{path} cannot be loaded, the model is as it was: {error}") from error
    used = set(loaded.values())
    return LoadReport(
        loaded,
        tuple(key for key in here if key not in loaded),
        tuple(key for key in saved if key not in used),
        tuple(misfits.values()),
    )


def save_weights(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Writes the parameters and buffers of a model to a safetensors file, which :func:`load_weights` reads.

    Other programs can read it, too (``safetensors.torch.load_file``). Tied parameters are written under each of their
    names. The file is replaced atomically: readers see the old or the new file.

    Only one tower calls it. If the model is sharded (``strategy.shard``), all towers call it, and tower 0 writes. It
    gathers one tensor at a time, so no tower holds the whole model.

    Raises:
        CheckpointError: on all towers: tower 0 cannot write a sharded model.
        OSError: this tower cannot write any other model.
    """
    path = pathlib.Path(path)
    state = {key: value for key, value in module.state_dict().items() if isinstance(value, Tensor)}
    beside = path.with_name(f".{path.name}.new")
    if any(map(is_dtensor, state.values())):
        _save_sharded(module, state, path, beside)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: value.detach().to("cpu", copy=True).contiguous() for key, value in state.items()}, beside)
    os.replace(beside, path)


def _save_sharded(module: nn.Module, state: dict[str, Tensor], path: pathlib.Path, unfinished: pathlib.Path) -> None:
    from mirrored.fully_sharded import communicator_of  # it is slow to import

    comm = communicator_of(module)
    announce(comm, "saves the weights of a sharded model")
    pieces, problem = FileLayout(state, {"format": "pt"}).pieces(), ""
    if comm.index == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(unfinished, "wb") as file:
                file.writelines(pieces)
            os.replace(unfinished, path)
        except OSError as error:
            problem = f"{path} cannot be written: {error.strerror}"
    collections.deque(pieces, maxlen=0)  # the collectives that gather the tensors
    raise_first(comm, "has saved the weights of a sharded model", problem)


@contextlib.contextmanager
def _opened(path: pathlib.Path, name: str) -> Iterator[_Read]:
    """Opens a file of tensors, or the model of this name in a checkpoint."""
    if path.is_file():
        try:
            file = TensorFile(str(path), {})
        except Malformed as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
        with contextlib.closing(file):
            yield lambda places: _tensors_of(path, file, places)
        return
    with contextlib.closing(StoredCheckpoint(path)) as stored:
        yield lambda places: _model_of(path, stored, name, places)


def _tensors_of(path: pathlib.Path, file: TensorFile, places: Mapping[str, Any] | None) -> dict[str, Tensor]:
    try:
        if places is None:
            return {key: file.describe(key) for key in file.names}
        return {key: part_of(file.read(key), places[key]) if key in places else file.read(key) for key in file.names}
    except Malformed as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def _model_of(
    path: pathlib.Path, stored: StoredCheckpoint, name: str, places: Mapping[str, Any] | None
) -> dict[str, Tensor]:
    state = stored.state(name, data=places is not None, places=sharded_in(dict(places or {}), name))
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: {name} is not a model")
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


def _renamed(key: str, rename: Mapping[str, str]) -> str:
    for old, new in rename.items():
        if key.startswith(old):
            return new + key[len(old) :]
    return key


def _matches(key: str, patterns: str | Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in ([patterns] if isinstance(patterns, str) else patterns))


def inspect(path: str | os.PathLike[str]) -> str:
    """Returns a table of a checkpoint, or of the newest in a folder. It reads the whole file and compares its checksum.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    with contextlib.closing(StoredCheckpoint(find_checkpoint(pathlib.Path(path)))) as stored:
        return "\n".join(_lines(stored))


def _lines(stored: StoredCheckpoint) -> Iterator[str]:
    manifest = stored.manifest
    files = manifest["files"]
    checksums = "" if len(files) > 1 else f"SHA-256 {printable(files[TENSORS]['sha256'], 64)}, "
    shards = f" in {len(files)} files" if len(files) > 1 else ""
    virtual = f" ({manifest['virtual_towers']} virtual)" if manifest["virtual_towers"] else ""
    versions = listed(f"{name} {version}" for name, version in manifest["versions"].items())
    saved = f"step {manifest['step']}, saved {printable(manifest['saved'], 40)} by {manifest['towers']} towers{virtual}"
    yield f"{printable(str(stored.path))}: {saved}"
    yield f"{sum(file['bytes'] for file in files.values()):,} bytes of tensors{shards}, {checksums}whole; {versions}"
    yield ""
    yield f"{'name':<44} {'dtype':<10} {'shape':<18} {'bytes':>12}"
    rows = _rows((name, stored.state(name, data=False)) for name in manifest["objects"])
    for path, kind, shape, count in itertools.islice(rows, _MOST_ROWS):
        yield f"{path:<44} {kind:<10} {shape:<18} {count:>12}".rstrip()
    if more := sum(1 for _ in rows):
        yield f"and {more:,} more"
    if different := sorted(stored.of_each_tower()):
        yield ""
        yield f"separate on each tower: {listed(different)}"


def _rows(objects: Iterable[tuple[object, Any]]) -> Iterator[tuple[str, str, str, str]]:
    """Yields the path, type, shape or value, and bytes of every entry of named objects, depth first."""
    stack = [("", iter(objects))]
    while stack:
        above, entries = stack[-1]
        try:
            key, value = next(entries)
        except StopIteration:
            stack.pop()
            continue
        path = (above + printable(str(key), _LONGEST))[:_LONGEST]
        if hasattr(value, "nbytes") and hasattr(value, "shape"):
            yield path, str(value.dtype).removeprefix("torch."), _brief(tuple(value.shape)), f"{value.nbytes:,}"
        elif isinstance(value, dict):
            stack.append((f"{path}/", iter(value.items())))
        elif isinstance(value, (list, tuple)) and any(
            isinstance(entry, (dict, list, tuple)) or hasattr(entry, "nbytes") for entry in value
        ):
            stack.append((f"{path}/", iter(enumerate(value))))
        else:
            yield path, type(value).__name__, _brief(value), ""


def _brief(value: Any) -> str:
    """Returns a value in at most 60 printable characters."""
    text = repr(value[:61] if isinstance(value, (str, bytes, list, tuple)) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."
