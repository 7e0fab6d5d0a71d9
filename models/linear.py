"""A linear layer whose weight is arranged once for the device it runs on."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


class Linear:
    """y = x W^T + b for x [T, in].

    On the CPU oneDNN would repack a bfloat16 weight at each call (about half the time of a small layer), so it is
    packed here; elsewhere the plain weight serves.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.bias = bias
        available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        self.packed = available and weight.device.type == "cpu" and weight.dtype == torch.bfloat16
        self.weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if self.packed else weight.contiguous()
        )

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return]
        return functional.linear(x, self.weight, self.bias)
