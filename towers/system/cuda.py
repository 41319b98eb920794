"""Features of CUDA only: graphs that capture work."""

from __future__ import annotations

import torch


def is_capturing(device: torch.device) -> bool:
    """Returns whether the current stream's work is captured as a CUDA graph, instead of executed."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
