"""The order of writes into a bucket on an accelerator.

[Note: one bucket, several streams] Autograd computes a gradient on the stream on which the parameter's node was made.
That is another stream for a part of a model that was captured as a CUDA graph, so gradients of one bucket may arrive on
several streams. Each gradient is therefore ordered after the one before, and the bucket is packed on the stream of the
last. The memory of a gradient may be freed after the copy. If that gradient was computed on another stream than the
copy, it is recorded on the stream of the copy; otherwise, the allocator would reuse its memory too early. On CPUs, no
order is needed, and a bucket has no :class:`StreamOrder`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from towers.system.torch_private import current_stream_of


class StreamOrder:
    """Orders writes into one bucket (see [Note: one bucket, several streams]).

    Args:
        device: the bucket's, an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._index = device.index
        self._stream: torch.Stream | None = None
        self._several = False

    def advance(self) -> None:
        """Orders the current stream, on which a write happens now, after the stream of the previous write."""
        stream, before = current_stream_of(self._index), self._stream
        if before is not None and before != stream:
            stream.wait_stream(before)
            self._several = True
        self._stream = stream

    def keep(self, gradients: Iterable[Tensor]) -> None:
        """Ensures that the memory of gradients that are dropped after their copy is not used again before the copy."""
        for gradient in gradients if self._several else ():
            if not gradient.is_sparse and gradient.device.type != "tpu":  # see [Note: a TPU has one order]
                assert self._stream is not None
                gradient.record_stream(self._stream)

    def reset(self) -> None:
        """Forgets the streams of a backward that is over."""
        self._stream, self._several = None, False
