"""What only CUDA has: graphs that work is captured in."""

from __future__ import annotations

import torch


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream's work is captured as a CUDA graph, instead of done."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
