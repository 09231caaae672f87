"""Linear layers of a torch model whose weights are laid out once for the CPU's vector units.

Owns: the replacement of a model's `nn.Linear` by packed ones. Imports torch. Invariant: the results are those of `F.linear`
but for the order of summation.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from cluster.engine.torch.cpu.matrices import Array, as_numpy, can_pack, multiply, pack


class PackedLinear(nn.Module):
    """x @ weight.T + bias with a packed weight. As `F.linear` it refuses an x of another dtype than the weight's."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._dtype = linear.weight.dtype
        self._matrix = pack(linear.weight)
        bias: Tensor | None = linear.bias
        self._bias: Array = np.empty(0, np.float32) if bias is None else as_numpy(bias.detach().float().clone())

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self._dtype or x.shape[-1] != self.in_features:
            raise RuntimeError(f"{x.dtype} [..., {x.shape[-1]}] times {self._dtype} weights [{self.in_features}, ...]")
        out = torch.empty((x[..., 0].numel(), self.out_features), dtype=torch.float32)
        rows = x.reshape(-1, self.in_features).contiguous()
        multiply(as_numpy(rows), self._matrix.panels, self._bias, out.numpy(), False)
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)


def pack_linears(model: nn.Module) -> int:
    """Replace every linear layer on the CPU by a packed one; returns how many.

    The weights that only they used are freed. The others are copied where they lie in a mapped file, so that the mapping
    goes with them and the process does not hold the file's pages beside the packed weights.
    """
    packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # Subclasses compute something else; a weight that is no plain CPU tensor is not ours to lay out.
            if type(child) is not nn.Linear or child.weight.device.type != "cpu":
                continue
            if can_pack(child.in_features, child.weight.dtype):
                setattr(parent, name, PackedLinear(child))
                packed += 1
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return packed
