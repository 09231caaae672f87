"""Packed linear layers compute what the layers that they replace compute."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cluster.engine.torch.packing import PackedLinear, pack_linears


class Doubled(nn.Linear):
    """A subclass with a meaning of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    embedding = nn.Embedding(40, 32)
    tied = nn.Linear(32, 40, bias=False)
    tied.weight = embedding.weight
    return nn.Sequential(
        embedding, nn.Linear(32, 72), nn.Sequential(nn.Linear(72, 32, bias=False)), Doubled(32, 32), tied
    ).to(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("tokens", [1, 5, 64, 129])
def test_packed_layers_give_what_they_replace(dtype: torch.dtype, tolerance: float, tokens: int) -> None:
    model = net(dtype)
    token_ids = torch.arange(tokens)[None] % 40
    with torch.inference_mode():
        before = model(token_ids)
        assert pack_linears(model) == 3
        after = model(token_ids)
    assert [type(m) for m in model.modules()].count(PackedLinear) == 3
    torch.testing.assert_close(after, before, atol=tolerance, rtol=tolerance)


def test_subclasses_and_tied_embeddings_are_kept() -> None:
    model = net(torch.float32)
    embedding = model.get_parameter("0.weight").clone()
    pack_linears(model)
    assert type(model.get_submodule("3")) is Doubled
    assert torch.equal(model.get_parameter("0.weight"), embedding)


def test_layers_that_cannot_be_packed_are_left_as_they_are() -> None:
    assert pack_linears(net(torch.float64)) == 0
    assert pack_linears(nn.Sequential(nn.Linear(33, 8)).to(torch.bfloat16)) == 0, "pairs need an even depth"
    assert pack_linears(nn.Sequential(nn.Linear(33, 8))) == 1


def test_numbers_of_another_type_or_size_are_refused_as_torch_refuses_them() -> None:
    """The kernel reads them by address, and would make something of any bytes."""
    linear = PackedLinear(nn.Linear(32, 8).to(torch.bfloat16))
    for x in (torch.zeros(2, 32), torch.zeros(2, 30, dtype=torch.bfloat16)):
        with torch.inference_mode(), pytest.raises(RuntimeError, match="times"):
            linear(x)
