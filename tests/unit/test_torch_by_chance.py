"""The batched draw by chance against the definition, row by row, bit for bit.

Where no weight is below 2**-29 of the distribution, sums in float64 are exact, so that the definition has one result,
whatever the order of its sums.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from cluster.engine.torch import by_chance
from cluster.engine.torch.by_chance import EXACT_WEIGHT, FIRST_LOOK, SORTED_CANDIDATES, draw_by_chance
from cluster.ports import SampleSpec

LONG = 2 * SORTED_CANDIDATES


def weights_of(logits: Tensor, temperature: float) -> Tensor:
    """[vocabulary] of one row, as the definition has them: a softmax in float32 of what is below the greatest."""
    return ((logits - logits.amax()) / temperature).softmax(dim=-1)


def kept_by_definition(weights: NDArray[np.float32], s: SampleSpec) -> NDArray[np.float32]:
    """By sorting whole rows; all sums are exact."""
    kept = weights
    if 0 < s.top_k < kept.shape[0]:
        kept = np.where(kept >= np.sort(kept)[-s.top_k], kept, np.float32(0))
    if s.top_p < 1:
        ranked = np.sort(kept)[::-1].astype(np.float64)
        reached = int(np.argmax(ranked.cumsum() >= kept.astype(np.float64).sum() * s.top_p))
        kept = np.where(kept >= ranked[reached], kept, np.float32(0))
    return np.where(kept >= weights.max() * np.float32(s.min_p), kept, np.float32(0))


def drawn_by_definition(logits: Tensor, s: SampleSpec) -> int:
    weights = weights_of(logits, s.temperature).numpy()
    assert weights.min() >= EXACT_WEIGHT, "else sums are not exact"
    sums = kept_by_definition(weights, s).cumsum(dtype=np.float64)
    return int(np.searchsorted(sums, sums[-1] * s.uniform, side="right"))


def batch(vocabulary: int, spreads: list[float], seed: int, *, ties: bool) -> Tensor:
    """Rows between flat and peaked; with `ties` in bfloat16's few steps, as a model in that type has them."""
    noise = torch.randn((len(spreads), vocabulary), generator=torch.Generator().manual_seed(seed)).clamp(-2.5, 2.5)
    noise[:, seed % 50 :: 97] += 4.0  # a few that are far likelier
    logits = noise * torch.tensor(spreads)[:, None]
    return logits.bfloat16().float() if ties else logits


SPECS = st.builds(
    SampleSpec,
    temperature=st.sampled_from([0.7, 1.0, 1.3]),
    top_p=st.sampled_from([1e-9, 0.2, 0.5, 0.9, 0.95, 0.999, 1.0, 1.0]),
    top_k=st.sampled_from([0, 0, 0, 1, 5, FIRST_LOOK - 1, FIRST_LOOK, FIRST_LOOK + 1, 700, 10**6]),
    uniform=st.one_of(st.floats(0, 1, exclude_max=True), st.just(1 - 2.0**-53)),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0]),
)


@settings(max_examples=60, deadline=None)
@given(
    specs=st.lists(SPECS, min_size=1, max_size=7),
    vocabulary=st.sampled_from([3, FIRST_LOOK, 1000, FIRST_LOOK * 64, LONG, LONG + 7]),
    spread=st.sampled_from([0.0, 0.05, 0.5]),
    ties=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_every_row_of_a_batch_draws_what_the_definition_draws_of_it(
    specs: list[SampleSpec], vocabulary: int, spread: float, ties: bool, seed: int
) -> None:
    logits = batch(vocabulary, [spread * (1 + i % 2) for i in range(len(specs))], seed, ties=ties)
    expected = [drawn_by_definition(row, s) for row, s in zip(logits, specs, strict=True)]
    assert draw_by_chance(logits.clone(), specs).tolist() == expected


@settings(max_examples=40, deadline=None)
@given(
    specs=st.lists(SPECS, min_size=1, max_size=5),
    vocabulary=st.sampled_from([3, 1000, LONG + 7]),
    spread=st.sampled_from([0.0, 0.2, 1.0]),
    ties=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_the_way_of_other_devices_keeps_what_the_definition_keeps(
    specs: list[SampleSpec], vocabulary: int, spread: float, ties: bool, seed: int
) -> None:
    logits = batch(vocabulary, [spread] * len(specs), seed, ties=ties)
    weights = torch.stack([weights_of(row, s.temperature) for row, s in zip(logits, specs, strict=True)])
    kept = weights * (weights >= by_chance.least_kept_weights(weights, specs))
    for row, of_row, s in zip(weights.numpy(), kept.numpy(), specs, strict=True):
        assert np.array_equal(of_row, kept_by_definition(row, s))


@pytest.mark.parametrize("top_p", [0.3, 0.95, 1.0])
def test_a_draw_is_the_same_whether_a_look_at_the_likeliest_settles_it_or_a_search(
    monkeypatch: pytest.MonkeyPatch, top_p: float
) -> None:
    """Also with weights so small that sums are not exact, as real models have them."""
    logits = batch(LONG, [6.0] * 200, seed=5, ties=False)
    specs = [SampleSpec(0.8, top_p, 40 if i % 3 == 0 else 0, i / 200, min_p=0.001 * (i % 2)) for i in range(200)]
    by_look = draw_by_chance(logits.clone(), specs).tolist()
    unsettled: list[bool] = []

    def never(*arguments: object) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        found, settled = look(*arguments)  # type: ignore[arg-type]
        unsettled.extend((~settled).tolist())
        return np.full_like(found, -1), np.zeros_like(settled)

    look = by_chance._look
    monkeypatch.setattr(by_chance, "_look", never)
    assert draw_by_chance(logits.clone(), specs).tolist() == by_look
    assert not all(unsettled), "no row was settled by a look, so nothing was compared"


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_row_of_a_batch_draws_as_it_does_alone(rows: int) -> None:
    logits = batch(LONG, [0.2 + 0.2 * (i % 9) for i in range(rows)], seed=7, ties=True)
    specs = [SampleSpec(0.9, (0.5, 0.97, 1.0)[i % 3], (0, 30)[i % 2], (i * 0.37) % 1) for i in range(rows)]
    alone = [draw_by_chance(row[None].clone(), [s]).item() for row, s in zip(logits, specs, strict=True)]
    assert draw_by_chance(logits.clone(), specs).tolist() == alone


@pytest.mark.parametrize("top_k", [0, 3])
def test_a_nucleus_ends_exactly_where_it_reaches_what_is_asked_for(top_k: int) -> None:
    """The likeliest token alone has the mass that is asked for, one unit in the last place more, or one less."""
    logits = batch(LONG, [0.5], seed=11, ties=False)
    logits[0, 10], logits[0, 500] = 8.0, 7.0
    weights = weights_of(logits[0], 1.0).numpy().astype(np.float64)
    mass = weights[10] / (np.sort(weights)[-3:].sum() if top_k else weights.sum())
    drawn = []
    for top_p in (float(np.nextafter(mass, 0)), float(mass), float(np.nextafter(mass, 1))):
        s = SampleSpec(1.0, top_p, top_k, uniform=1 - 2.0**-53)  # draws the last that is kept
        drawn.append(drawn_by_definition(logits[0], s))
        assert draw_by_chance(logits.clone(), [s]).tolist() == drawn[-1:]
    assert (drawn[0], drawn[-1]) == (10, 500)
