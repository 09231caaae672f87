"""Drawing a token from logits, against transformers' own processors and the definitions in numpy and plain Python."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cluster.engine.torch.by_chance import SORTED_CANDIDATES
from cluster.engine.torch.sampling import draw, outputs
from cluster.ports import Penalties, Row, SampleSpec, ScoreSpec

UNIFORMS = [(i + 0.5) / 997 for i in range(997)]
LARGEST_UNIFORM = math.nextafter(1.0, 0.0)


def spec(
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    uniform: float = 0.5,
    *,
    min_p: float = 0.0,
    bias: tuple[tuple[int, float], ...] = (),
    banned: tuple[int, ...] = (),
    penalties: Penalties | None = None,
    logprobs: int | None = None,
) -> SampleSpec:
    return SampleSpec(temperature, top_p, top_k, uniform, min_p, bias, banned, penalties, logprobs)


def penalise(
    presence: float = 0.0,
    frequency: float = 0.0,
    repetition: float = 1.0,
    output: tuple[int, ...] = (),
    prompt: tuple[int, ...] = (),
) -> Penalties:
    return Penalties(presence, frequency, repetition, Counter(output), prompt)


def processed(logits: Tensor, s: SampleSpec) -> Tensor:
    """[vocabulary] as transformers' processors leave it, in the order of its `generate`; -inf where not kept."""
    seen: tuple[int, ...] = ()
    steps: list[LogitsProcessor] = []
    if s.penalties is not None:
        seen = (*s.penalties.prompt_ids, *s.penalties.output_counts)
        steps.append(RepetitionPenaltyLogitsProcessor(s.penalties.repetition))
    if s.temperature > 0:
        steps.append(TemperatureLogitsWarper(s.temperature))
    if s.top_k:
        steps.append(TopKLogitsWarper(s.top_k))
    if s.top_p < 1:
        steps.append(TopPLogitsWarper(s.top_p))
    if s.min_p:
        steps.append(MinPLogitsWarper(s.min_p))
    scores = logits[None].clone()
    for step in steps:
        scores = step(torch.tensor([seen], dtype=torch.int64), scores)
    return scores[0]


def assert_draws(logits: Tensor, s: SampleSpec, expected: Tensor) -> None:
    """Uniforms all over [0, 1) draw what inverting softmax(`expected`) in token-id order gives: token for token, but
    where one is within float32's error of an edge."""
    probabilities: list[float] = expected.double().softmax(-1).tolist()
    drawn = draw(logits.expand(len(UNIFORMS), -1), [dataclasses.replace(s, uniform=u) for u in UNIFORMS])
    wanted = np.searchsorted(np.cumsum(probabilities), UNIFORMS, side="right").tolist()
    clear = [i for i, u in enumerate(UNIFORMS) if nearest_edge(probabilities, u) > 1e-5]
    assert len(clear) > 0.7 * len(UNIFORMS)
    assert [drawn[i] for i in clear] == [wanted[i] for i in clear]


def kept_distribution(logits: list[float], s: SampleSpec) -> list[float]:
    """The filtered distribution, from the definition, in Python's own floats and exact sums."""
    scaled = [x / s.temperature for x in logits]
    top = max(scaled)
    weights = [math.exp(x - top) for x in scaled]
    if 0 < s.top_k < len(weights):
        least = sorted(weights, reverse=True)[s.top_k - 1]
        weights = [w if w >= least else 0.0 for w in weights]
    if s.top_p < 1:
        needed = s.top_p * math.fsum(weights)
        ranked = sorted(weights, reverse=True)
        count = next(n for n in range(1, len(ranked) + 1) if math.fsum(ranked[:n]) >= needed or n == len(ranked))
        weights = [w if w >= ranked[count - 1] else 0.0 for w in weights]
    total = math.fsum(weights)
    return [w / total for w in weights]


def nearest_edge(probabilities: list[float], uniform: float) -> float:
    """How far `uniform` is from where the drawn token changes: there float32 may fall on either side."""
    return float(np.abs(np.cumsum([0.0, *probabilities]) - uniform).min())


def noise(*shape: int, seed: int = 0, spread: float = 2.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread


def test_temperature_zero_takes_the_most_likely_and_of_equals_the_lowest_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [-1.0, -2.0, -3.0, -0.5]])
    assert draw(logits, [spec(temperature=0.0, uniform=0.99)] * 3) == [1, 0, 3]


def test_temperature_zero_breaks_ties_by_id_in_a_large_vocabulary() -> None:
    """Vectorised reductions go through a row in strides; a tie must not be settled by them."""
    logits = torch.zeros((4, 49_152))
    for row, ids in enumerate([(49_151, 17), (40_000, 20_000, 30_000), (1, 0), (48_000, 47_999)]):
        logits[row, list(ids)] = 7.0
    assert draw(logits, [spec(temperature=0.0)] * 4) == [17, 20_000, 0, 47_999]


@pytest.mark.parametrize(
    ("uniform", "token_id"), [(0.0, 0), (0.2499, 0), (0.25, 1), (0.4999, 1), (0.5, 2), (0.75, 3), (0.999, 3)]
)
def test_the_draw_inverts_the_distribution_in_token_order(uniform: float, token_id: int) -> None:
    """Four equal tokens: the edges are exact, and a number on an edge belongs to the token above it."""
    assert draw(torch.full((1, 4), 1.5), [spec(uniform=uniform)]) == [token_id]


def test_the_largest_uniform_draws_the_last_token_that_has_weight() -> None:
    largest = math.nextafter(1.0, 0.0)
    assert draw(torch.tensor([[0.3, 1.2, 0.7, -math.inf]]), [spec(uniform=largest)]) == [2]
    assert draw(torch.zeros((1, 49_152)), [spec(uniform=largest)]) == [49_151]


def test_tokens_without_weight_are_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]])
    draws = [draw(logits, [spec(uniform=u)])[0] for u in (0.0, 0.25, 0.75, math.nextafter(1.0, 0.0))]
    assert draws == [1, 1, 3, 3]


def test_ties_at_the_edge_of_the_kept_set_are_all_kept() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 0.5]])
    uniforms = [i / 200 for i in range(200)]
    assert {draw(logits, [spec(top_k=2, uniform=u)])[0] for u in uniforms} == {1, 2, 3}
    # Token 1 alone has 0.42 of the mass, 1 and 2 together 0.58: with its equal, token 3, it is 0.73.
    assert {draw(logits, [spec(top_p=0.5, uniform=u)])[0] for u in uniforms} == {1, 2, 3}


def test_a_row_of_equal_tokens_is_kept_whole_however_large() -> None:
    logits = torch.full((1, 49_152), -3.25)
    assert draw(logits, [spec(top_p=0.1, uniform=0.75)]) == [36_864]


def test_the_most_likely_token_is_kept_even_by_the_strictest_filter() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    assert {draw(logits, [spec(top_p=1e-9, uniform=u / 50)])[0] for u in range(50)} == {1}
    assert {draw(logits, [spec(top_k=1, uniform=u / 50)])[0] for u in range(50)} == {1}


def test_a_tiny_temperature_is_as_good_as_greedy() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.9999]])
    for temperature in (1e-5, 1e-30, 5e-324):
        assert draw(logits, [spec(temperature=temperature, uniform=0.999)]) == [1]


@pytest.mark.parametrize("spoilt", [[math.nan], [math.inf], [math.nan, -math.inf], [-math.inf] * 5_000])
@pytest.mark.parametrize(
    "s", [spec(temperature=0.0), spec(), spec(top_p=0.9), spec(top_k=5), spec(top_k=5, top_p=0.9)], ids=str
)
def test_nothing_is_drawn_from_what_is_no_number_and_other_rows_are_drawn_all_the_same(
    spoilt: list[float], s: SampleSpec
) -> None:
    logits = torch.randn((3, 5_000), generator=torch.Generator().manual_seed(4))
    first, _, last = draw(logits, [s] * 3)
    logits[1, 3 : 3 + len(spoilt)] = torch.tensor(spoilt)[:4_997]
    logits[1, :3] = -math.inf
    assert draw(logits, [s] * 3) == [first, None, last]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocabulary=st.sampled_from([2, 7, 100, SORTED_CANDIDATES + 1000]),
    spread=st.sampled_from([0.05, 1.0, 5.0]),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 1.7]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.99, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 40, 10_000]),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_a_draw_equals_the_definition(
    seed: int, vocabulary: int, spread: float, temperature: float, top_p: float, top_k: int, uniform: float
) -> None:
    rng = random.Random(seed)
    logits = torch.tensor([[rng.gauss(0, spread) for _ in range(vocabulary)]])
    s = spec(temperature, top_p, top_k, uniform)
    probabilities = kept_distribution(logits[0].tolist(), s)
    token_id = draw(logits, [s])[0]
    if nearest_edge(probabilities, uniform) > 1e-5:
        assert token_id == int(np.searchsorted(np.cumsum(probabilities), uniform, side="right"))


FILTERS = {
    "temperature": spec(0.7),
    "top_k": spec(1.3, top_k=25),
    "top_p": spec(0.8, top_p=0.9),
    "top_p of most": spec(1.5, top_p=0.995),
    "min_p": spec(1.1, min_p=0.08),
    "top_k and top_p": spec(1.0, top_p=0.7, top_k=50),
    "all": spec(0.9, top_p=0.95, top_k=40, min_p=0.15),
}


@pytest.mark.parametrize("s", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("vocabulary", [801, 12_288])
def test_the_filtered_distribution_is_that_of_transformers(s: SampleSpec, vocabulary: int) -> None:
    logits = noise(vocabulary, seed=1)
    assert_draws(logits, s, processed(logits, s))


@pytest.mark.parametrize("s", FILTERS.values(), ids=FILTERS)
def test_the_kept_set_is_that_of_transformers(s: SampleSpec) -> None:
    logits = noise(800, seed=1)
    expected = processed(logits, s)
    probabilities = expected.double().softmax(-1)
    kept = (probabilities > 1e-6).nonzero()[:, 0].tolist()
    # The middle of each kept token's share of [0, 1) must draw that token.
    middles = (probabilities.cumsum(0) - probabilities / 2)[kept].tolist()
    rows = logits.expand(len(kept), -1)
    assert draw(rows, [dataclasses.replace(s, uniform=u) for u in middles]) == kept


@pytest.mark.parametrize("repetition", [1.3, 0.8])
@pytest.mark.parametrize("s", [FILTERS["temperature"], FILTERS["all"]], ids=["temperature", "all"])
def test_the_repetition_penalty_is_that_of_transformers_over_prompt_and_output(
    repetition: float, s: SampleSpec
) -> None:
    """Both signs of logits occur among the seen tokens, some of which are in prompt and output, or come repeatedly."""
    logits = noise(300, seed=6)
    seen = penalise(repetition=repetition, prompt=tuple(range(0, 200, 3)) * 2, output=(*range(100, 160), 120, 120))
    assert {bool(x > 0) for x in logits[:200:3]} == {True, False}
    changed = dataclasses.replace(s, penalties=seen)
    assert_draws(logits, changed, processed(logits, changed))
    greedy = dataclasses.replace(changed, temperature=0.0)
    assert draw(logits[None], [greedy]) == [int(processed(logits, spec(1.0, penalties=seen)).argmax())]


def test_presence_is_taken_off_once_and_frequency_as_often_as_the_token_came_out() -> None:
    """OpenAI: mu[j] - c[j] * frequency - (c[j] > 0) * presence; the prompt does not count."""
    logits = noise(60, seed=7)
    output = (3, 3, 3, 8, 8, 20, 59)
    s = spec(penalties=penalise(presence=0.7, frequency=-0.4, output=output, prompt=(1, 2, 3)))
    expected = torch.tensor(
        [x - output.count(j) * -0.4 - (0.7 if j in output else 0.0) for j, x in enumerate(logits.tolist())]
    )
    assert_draws(logits, s, expected)


def test_changes_come_in_order_bias_then_bans_then_repetition_then_frequency_and_presence() -> None:
    """Each token's expected logit, by hand: any other order gives another number."""
    logits = torch.tensor([1.0, 1.0, -1.0, 2.0, 0.5, 3.0])
    s = spec(
        bias=((0, -2.0), (2, 3.0), (3, 0.5), (5, 100.0)),
        banned=(5,),
        penalties=penalise(presence=0.25, frequency=0.5, repetition=2.0, output=(0, 2, 2, 5), prompt=(3,)),
    )
    expected = torch.tensor(
        [
            (1.0 - 2.0) * 2.0 - 0.5 - 0.25,  # bias made it negative, so it is multiplied
            1.0,
            (-1.0 + 3.0) / 2.0 - 2 * 0.5 - 0.25,  # bias made it positive, so it is divided
            (2.0 + 0.5) / 2.0,  # of the prompt: repetition alone
            0.5,
            -math.inf,  # no bias lifts a ban
        ]
    )
    assert_draws(logits, s, expected)


def test_greedy_obeys_bias_bans_and_penalties() -> None:
    logits = torch.tensor([[1.0, 4.0, 3.0, 3.5]])
    greedy = dataclasses.replace(spec(0.0), uniform=0.9)
    for s, token_id in [
        (greedy, 1),
        (dataclasses.replace(greedy, bias=((0, 3.5),)), 0),
        (dataclasses.replace(greedy, bias=((0, 2.0), (0, 1.5))), 0),
        (dataclasses.replace(greedy, banned=(1, 3)), 2),
        (dataclasses.replace(greedy, penalties=penalise(presence=0.75, output=(1,))), 3),
        (dataclasses.replace(greedy, penalties=penalise(frequency=0.3, output=(1, 1, 3))), 1),
        (dataclasses.replace(greedy, penalties=penalise(frequency=0.3, output=(1, 1, 1, 3))), 3),
        (dataclasses.replace(greedy, penalties=penalise(repetition=2.0, prompt=(1, 3))), 2),
        (dataclasses.replace(greedy, bias=((2, 0.5), (3, -9.0)), banned=(1,)), 2),
        (dataclasses.replace(greedy, penalties=penalise()), 1),
    ]:
        assert draw(logits, [s]) == [token_id], s


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_every_token_is_banned_nothing_is_drawn(temperature: float) -> None:
    logits = noise(2, 5)
    assert draw(logits, [spec(temperature, banned=(0, 1, 2, 3, 4)), spec(temperature, banned=(0, 1, 2, 3))]) == [
        None,
        4,
    ]


def test_many_uniforms_reproduce_the_distribution() -> None:
    """Chi-square over 20,000 draws; beyond the 99.9999 % point of 11 degrees of freedom (49.4) once in a million seeds."""
    rng = random.Random(11)
    logits = [rng.gauss(0, 1.5) for _ in range(12)]
    draws = 20_000
    specs = [spec(temperature=1.2, uniform=rng.random()) for _ in range(draws)]
    drawn = Counter(draw(torch.tensor([logits]).expand(draws, -1), specs))
    counts = np.array([drawn[token_id] for token_id in range(12)])
    expected = np.array(kept_distribution(logits, specs[0])) * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 49.4


def test_min_p_one_keeps_the_likeliest_and_its_equals_alone() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.9999, 2.0]])
    assert {draw(logits, [spec(min_p=1.0, uniform=u / 50)])[0] for u in range(50)} == {1, 3}


def test_draws_in_bfloat16_are_those_of_the_same_numbers_in_float32() -> None:
    logits = noise(4, 1_000).bfloat16()
    specs = [spec(0.0), spec(0.0, bias=((4, 1.0),)), spec(0.9, 0.9, uniform=0.3), spec(1.0, uniform=0.8, logprobs=3)]
    rows = [Row((1,), 0, (0,), s) for s in specs]
    assert outputs(logits, rows) == outputs(logits.float(), rows)


# --- what a step reports ---


def row(sample: SampleSpec | None, targets: tuple[int, ...] = (), top: int = 0) -> Row:
    score = ScoreSpec(targets, top) if targets else None
    return Row((1,) * max(1, len(targets)), 0, (0,), sample, score)


def test_logprobs_are_those_of_the_raw_logits_whatever_was_drawn_from() -> None:
    logits = noise(2, 5_000, seed=8)
    wanted = torch.log_softmax(logits.double(), dim=-1)
    bent = spec(
        0.3,
        top_p=0.5,
        uniform=0.7,
        bias=((7, 50.0),),
        banned=(int(logits[1].argmax()),),
        penalties=penalise(presence=1.0, output=(7,)),
        logprobs=4,
    )
    plain, other = outputs(logits, [row(spec(0.0, logprobs=3)), row(bent)])
    for place, (output, count) in enumerate([(plain, 3), (other, 4)]):
        assert output.logprob is not None
        assert output.token_id is not None
        assert output.logprob.logprob == pytest.approx(float(wanted[place, output.token_id]), abs=1e-5)
        best = wanted[place].topk(count)
        assert [token_id for token_id, _ in output.logprob.top] == best.indices.tolist()
        assert [x for _, x in output.logprob.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert other.token_id == 7


def test_of_equally_likely_tokens_the_lowest_ids_are_reported_first() -> None:
    logits = torch.zeros((3, 49_152))
    logits[1, [40_000, 17, 30_000]] = 2.0
    logits[2, [5, 49_151]] = torch.tensor([1.0, 2.0])
    tops = [o.logprob.top for o in outputs(logits, [row(spec(0.0, logprobs=5))] * 3) if o.logprob is not None]
    assert [[token_id for token_id, _ in top] for top in tops] == [
        [0, 1, 2, 3, 4],
        [17, 30_000, 40_000, 0, 1],
        [49_151, 5, 0, 1, 2],
    ]


@pytest.mark.parametrize(("asked", "length"), [(0, 0), (1, 1), (7, 7), (100, 7)])
def test_as_many_of_the_likeliest_are_reported_as_asked_for_or_as_there_are(asked: int, length: int) -> None:
    output = outputs(noise(1, 7), [row(spec(logprobs=asked))])[0]
    assert output.logprob is not None
    assert len(output.logprob.top) == length
    assert sum(math.exp(x) for _, x in output.logprob.top) <= 1 + 1e-6


def test_each_row_gets_its_own_scores_and_token_from_the_positions_laid_out_for_it() -> None:
    """Scored positions of a row come first, then the one that it draws after."""
    logits = noise(9, 70, seed=9)
    wanted = torch.log_softmax(logits.double(), dim=-1)
    rows = [
        row(None, targets=(3, 4, 5), top=2),
        row(spec(0.0)),
        row(None),
        row(spec(0.0, logprobs=0), targets=(9, 8), top=0),
        row(spec(0.0)),
        row(None, targets=(6,), top=1),
    ]
    got = outputs(logits, rows)
    places = [[0, 1, 2], [], [], [4, 5], [], [8]]
    for r, output, at in zip(rows, got, places, strict=True):
        targets = r.score.targets if r.score else ()
        assert [s.logprob for s in output.scores] == pytest.approx(
            [float(wanted[p, t]) for p, t in zip(at, targets, strict=True)], abs=1e-5
        )
        for score, p in zip(output.scores, at, strict=True):
            assert r.score is not None
            assert [t for t, _ in score.top] == wanted[p].topk(r.score.top).indices.tolist()
    assert [o.token_id for o in got] == [None, *(int(logits[p].argmax()) if p else None for p in (3, 0, 6, 7, 0))]
    assert [o.logprob is not None for o in got] == [False, False, False, True, False, False]


def test_too_many_or_too_few_positions_are_an_error() -> None:
    for positions in (2, 4):
        with pytest.raises(ValueError, match="3 are asked for"):
            outputs(noise(positions, 5), [row(spec(), targets=(1, 2))])


def test_where_logits_are_no_numbers_there_are_no_scores_and_others_have_theirs() -> None:
    logits = noise(5, 2_000, seed=10)
    rows = [row(None, targets=(1, 2)), row(None, targets=(3, 4)), row(spec(0.0, logprobs=1))]
    first, _, last = outputs(logits, rows)
    logits[2, 77] = math.nan
    assert outputs(logits, rows)[0] == first
    assert outputs(logits, rows)[1].scores == ()
    assert outputs(logits, rows)[2] == last
    logits[4] = -math.inf
    assert outputs(logits, rows)[2].logprob is None


def mixed_rows() -> list[Row]:
    seen = penalise(0.5, 0.2, 1.2, output=(4, 4, 9, 100), prompt=(7, 8, 9))
    specs = [
        spec(0.0),
        spec(0.0, logprobs=2),
        spec(0.0, penalties=seen, banned=(3,)),
        spec(0.7, uniform=0.11),
        spec(1.5, top_p=0.8, uniform=0.43, logprobs=5),
        spec(1.0, top_k=30, min_p=0.05, uniform=0.77),
        spec(0.9, bias=((11, 4.0),), penalties=seen, uniform=0.99),
    ]
    return [row(s, targets=(5, 6)[: i % 3], top=i) for i, s in enumerate(specs)]


def test_a_row_is_drawn_and_scored_the_same_whatever_the_other_rows_are() -> None:
    rows = mixed_rows()
    counts = [1 + (len(r.score.targets) if r.score else 0) for r in rows]
    parts = torch.split(noise(sum(counts), 5_000, seed=2, spread=3), counts)
    together = outputs(torch.cat(parts), rows)
    assert together == [outputs(part, [r])[0] for part, r in zip(parts, rows, strict=True)]
    order = [3, 0, 6, 2, 5, 1, 4]
    assert outputs(torch.cat([parts[i] for i in order]), [rows[i] for i in order]) == [together[i] for i in order]


def test_logits_and_settings_are_left_as_they_were() -> None:
    rows = mixed_rows()
    logits = noise(sum(1 + (len(r.score.targets) if r.score else 0) for r in rows), 300, seed=3)
    before = logits.clone()
    outputs(logits, rows)
    assert torch.equal(logits, before)
    assert rows == mixed_rows()


@pytest.mark.parametrize("vocabulary", [5, 300, 1024])
def test_where_no_row_draws_there_is_no_token(vocabulary: int) -> None:
    assert draw(torch.empty(0, vocabulary), []) == []
