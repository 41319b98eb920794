"""Parameters and buffers with their names in messages."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from towers.system.memory_layout import gradient_dtype


@dataclass(frozen=True)
class Named:
    """A parameter or buffer with its name in messages.

    Attributes:
        name: path below its outermost module, with that module first: ``"Net.conv1.weight"``.
        kind: "parameter" or "buffer".
        trainable: whether it required a gradient when it was compared. It may have been frozen or unfrozen since.
        sparse: whether its gradients are sparse tensors.
    """

    name: str
    tensor: Tensor
    kind: str
    trainable: bool = False
    sparse: bool = False

    def describe(self) -> list[object]:
        """Returns the properties that must be equal on all towers."""
        tensor = self.tensor
        layout = "sparse gradients" if self.sparse else f"strides {tensor.stride()}"
        gradients = gradient_dtype(tensor)
        dtype = str(tensor.dtype) if gradients == tensor.dtype else f"{tensor.dtype} with gradients of {gradients}"
        return [self.name, list(tensor.shape), dtype, self.kind, self.trainable, layout]
