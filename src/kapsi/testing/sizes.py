"""A watch on the sizes of tensors during a computation."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class WatchSizes(TorchDispatchMode):
    """A context that records the size of the largest new tensor, forward and backward.

    A view counts as the memory behind the view.

    Args:
        *known: tensors whose memory does not count, such as inputs and parameters.

    Attributes:
        largest: elements of the largest new tensor.
        operation: name of the operation behind this tensor.

    Example:
        >>> import torch
        >>> x = torch.ones(10, 10)
        >>> with WatchSizes(x) as watch:
        ...     y = (x.t() @ x[:, :2]).sum()
        >>> watch.largest
        20
    """

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.largest, self.operation = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and record the sizes of its results."""
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if not isinstance(tensor, Tensor) or tensor.is_meta:
                continue
            memory = tensor.untyped_storage()
            elements = memory.nbytes() // tensor.element_size()
            if elements > self.largest and memory.data_ptr() not in self.known:
                self.largest, self.operation = elements, str(func)
        return result
