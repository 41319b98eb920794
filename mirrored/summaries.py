"""Events for TensorBoard, which one tower writes for all (``Strategy.summary_writer``)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any


class NoWriter:
    """Replaces a ``SummaryWriter`` on towers that do not write. Every method does nothing and returns None."""

    def __enter__(self) -> NoWriter:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def summary_writer(is_chief: bool, folder: str | os.PathLike[str], **options: Any) -> Any:
    """Returns a ``SummaryWriter`` on the chief and a :class:`NoWriter` on other towers. All towers must call it.

    Raises:
        ModuleNotFoundError: on all towers: tensorboard is not installed.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise ModuleNotFoundError("strategy.summary_writer needs tensorboard: pip install tensorboard")
    if not is_chief:
        return NoWriter()
    from torch.utils.tensorboard import SummaryWriter  # a slow import

    return SummaryWriter(os.fspath(folder), **options)
