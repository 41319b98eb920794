"""The order of what is written into a bucket on an accelerator.

[Note: one bucket, several streams] Autograd computes a gradient on the stream on which the parameter's node was
made. That is another stream for a part of a model that was captured as a CUDA graph, so gradients of one bucket may
come on several. Each is therefore ordered after the one before, and the bucket is packed on the stream of the last. A
gradient whose memory is free once it was copied, but that was computed on another stream than the copy, is recorded on
the stream of the copy, or the allocator would give its memory away too early. On CPUs there is nothing to order: a
bucket there has no :class:`StreamOrder`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class StreamOrder:
    """Orders what comes for one bucket after what came before (see [Note: one bucket, several streams]).

    Args:
        device: the bucket's, an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.Stream | None = None
        self._several = False

    def advance(self) -> None:
        """Order the current stream, on which something comes now, after the one on which something came before."""
        stream, before = torch.accelerator.current_stream(self._device), self._stream
        if before is not None and before != stream:
            stream.wait_stream(before)
            self._several = True
        self._stream = stream

    def keep(self, gradients: Iterable[Tensor]) -> None:
        """See that the memory of gradients that are let go when they were copied is not used again before the copy."""
        for gradient in gradients if self._several else ():
            if not gradient.is_sparse and gradient.device.type != "tpu":  # see [Note: a TPU has one order]
                assert self._stream is not None
                gradient.record_stream(self._stream)

    def reset(self) -> None:
        """Forget the streams of a backward, which is over."""
        self._stream, self._several = None, False
