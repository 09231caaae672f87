"""How many tokens a request will put out: learned from what like requests put out before.

Owns: the histograms of output lengths and what is expected from them. Imports nothing of ours. Invariants: what it
knows is bounded in memory; equal calls in equal order give equal answers; nothing here decides how long anybody runs.

The estimate. A request is like others of its (tenant, class, prompt length to a power of two), less so like those of
its (class, prompt length), of its class, and like all. Each of these four has a histogram; before anything is known
all lengths up to `max_tokens` are taken to be equally likely. They are mixed, the nearest first: a histogram with the
weight of n observations gets n / (n + PRIOR_OBSERVATIONS) of what the nearer ones left, the prior gets the rest. An
observation weighs 1 and fades with each later one in its histogram by a factor of 1 - 1 / MEMORY_OBSERVATIONS, so that
n stays below MEMORY_OBSERVATIONS and a change of traffic is followed.

The mixture is one distribution of the whole length, so what is expected of a request that has made k tokens already is
read from its part above k, and can only grow with k. Lengths were cut by the `max_tokens` of their own requests; they
are taken as they came.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from itertools import accumulate, pairwise
from operator import mul

PRIOR_OBSERVATIONS = 8.0
"""What is known in general counts as much as so many observations of the special."""
MEMORY_OBSERVATIONS = 512
MAX_KEYS = 1024
"""Histograms that are kept, a few KB each; the one that has learned nothing for longest leaves."""

_LONGEST = 2**20


def _bin_edges() -> tuple[int, ...]:
    """Bin k holds the lengths edges[k] + 1 … edges[k + 1]: four bins to a doubling, single lengths at first."""
    edges = [0, 1]
    while edges[-1] < _LONGEST:
        edges.append(max(edges[-1] + 1, round(edges[-1] * 2**0.25)))
    return tuple(edges)


EDGES = _bin_edges()
_MEANS = tuple((low + 1 + high) / 2 for low, high in pairwise(EDGES))


def first_bin_above(tokens: int) -> int:
    """The first bin whose lengths are all above `tokens`; asked for once, and used for several histograms."""
    return bisect_left(EDGES, tokens)


Key = tuple[str | int, ...]


class Histogram:
    """Lengths with fading weights. Within a bin all lengths are taken to be equally likely."""

    __slots__ = ("_counts", "_mass_above", "_sum_above", "longest", "weight")

    def __init__(self) -> None:
        self.weight = 0.0
        """The sum of all weights, below MEMORY_OBSERVATIONS."""
        self._counts: list[float] = []
        """Of the bins up to the longest that there was; there is nothing above."""
        self._mass_above: list[float] = []
        """At k: weight of all bins from k on; made anew when it is next asked for."""
        self._sum_above: list[float] = []
        """The same of weight x length."""
        self.longest = 0
        """Nothing is above that."""

    def observe(self, length: int) -> None:
        keep = 1 - 1 / MEMORY_OBSERVATIONS
        counts = self._counts = [count * keep for count in self._counts]
        above = first_bin_above(min(max(length, 1), _LONGEST))
        if above > len(counts):
            counts.extend([0.0] * (above - len(counts)))
            self.longest = EDGES[above]
        counts[above - 1] += 1
        self.weight = self.weight * keep + 1
        self._mass_above = []

    def above(self, tokens: int, first_bin: int) -> tuple[float, float]:
        """Of all lengths > `tokens`: the share of the weight, and that times their mean. `first_bin`: above `tokens`."""
        mass_above = self._mass_above
        if not mass_above:
            mass_above = self._mass_above = [*accumulate(reversed(self._counts), initial=0.0)][::-1]
            parts = map(mul, self._counts, _MEANS)
            self._sum_above = [*accumulate(reversed([*parts]), initial=0.0)][::-1]
        total = mass_above[0]
        if tokens <= 0:
            return 1.0, self._sum_above[0] / total
        if tokens >= self.longest:
            return 0.0, 0.0
        mass, summed, edge = mass_above[first_bin], self._sum_above[first_bin], EDGES[first_bin]
        if edge > tokens:
            rest = self._counts[first_bin - 1] * (edge - tokens) / (edge - EDGES[first_bin - 1])
            mass += rest
            summed += rest * (tokens + 1 + edge) / 2
        return mass / total, summed / total


Mixture = tuple[list[tuple[float, Histogram]], float]
"""(share, histogram), nearest first, and the share of the prior. The shares add up to 1."""


class LengthPredictor:
    """Output lengths of one engine's requests. Not safe for several threads."""

    __slots__ = ("_histograms", "_mixtures")

    def __init__(self) -> None:
        self._mixtures: dict[Key, Mixture] = {}
        """Those that have been asked for since something was learned."""
        self._histograms: OrderedDict[Key, Histogram] = OrderedDict()
        """The one that has learned nothing for longest is first."""

    def __len__(self) -> int:
        """Histograms that are kept."""
        return len(self._histograms)

    def predict(
        self,
        tenant: str,
        priority_class: str,
        prompt_tokens: int,
        *,
        max_tokens: int,
        made: int = 0,
        stated: int | None = None,
    ) -> float:
        """Expected output tokens in all of a request that has made `made` of at most `max_tokens` and goes on.

        What its client has `stated` is believed until it is exceeded.

        Returns:
            A number > made and <= max_tokens; max_tokens if that has been made.
        """
        if made >= max_tokens:
            return float(max_tokens)
        if stated is not None and stated > made:
            return float(min(stated, max_tokens))
        parts, share_of_prior = self._mixture(tenant, priority_class, prompt_tokens)
        bin_above_made = first_bin_above(made)
        mass = summed = 0.0
        for share, histogram in parts:
            above_made, sum_made = histogram.above(made, bin_above_made)
            if max_tokens < histogram.longest:  # else nothing is above it
                above_max, sum_max = histogram.above(max_tokens, first_bin_above(max_tokens))
                sum_made = sum_made - sum_max + max_tokens * above_max
            mass += share * above_made
            summed += share * sum_made
        above_made, sum_made = _prior_above(made, max_tokens)
        mass += share_of_prior * above_made
        summed += share_of_prior * sum_made
        return min(max(summed / mass, made + 1.0), float(max_tokens))

    def quantile(
        self, q: float, tenant: str, priority_class: str, prompt_tokens: int, *, max_tokens: int, made: int = 0
    ) -> int:
        """The fewest output tokens in all that such a request does not exceed with probability `q`, 0 < q <= 1."""
        parts, share_of_prior = self._mixture(tenant, priority_class, prompt_tokens)

        def mass_above(tokens: int) -> float:
            above = first_bin_above(tokens)
            seen = sum(share * histogram.above(tokens, above)[0] for share, histogram in parts)
            return seen + share_of_prior * _prior_above(tokens, max_tokens)[0]

        if made >= max_tokens:
            return max_tokens
        allowed = (1 - q) * mass_above(made)
        low, high = made + 1, max_tokens
        while low < high:
            middle = (low + high) // 2
            if mass_above(middle) <= allowed:
                high = middle
            else:
                low = middle + 1
        return low

    def observe(self, tenant: str, priority_class: str, prompt_tokens: int, output_tokens: int) -> None:
        """A request has ended by itself after so many output tokens."""
        self._mixtures.clear()
        for key in _keys(tenant, priority_class, prompt_tokens):
            histogram = self._histograms.get(key)
            if histogram is None:
                histogram = self._histograms[key] = Histogram()
                if len(self._histograms) > MAX_KEYS:
                    self._histograms.popitem(last=False)
            self._histograms.move_to_end(key)
            histogram.observe(output_tokens)

    def _mixture(self, tenant: str, priority_class: str, prompt_tokens: int) -> Mixture:
        asked = tenant, priority_class, prompt_tokens.bit_length()
        known = self._mixtures.get(asked)
        if known is not None:
            return known
        if len(self._mixtures) >= MAX_KEYS:
            self._mixtures.clear()
        parts: list[tuple[float, Histogram]] = []
        left = 1.0
        for key in _keys(tenant, priority_class, prompt_tokens):
            histogram = self._histograms.get(key)
            if histogram is not None:
                share = left * histogram.weight / (histogram.weight + PRIOR_OBSERVATIONS)
                parts.append((share, histogram))
                left -= share
        mixture = self._mixtures[asked] = parts, left
        return mixture


def _keys(tenant: str, priority_class: str, prompt_tokens: int) -> tuple[Key, ...]:
    """Nearest first."""
    bucket = prompt_tokens.bit_length()
    return (tenant, priority_class, bucket), (priority_class, bucket), (priority_class,), ()


def _prior_above(tokens: int, max_tokens: int) -> tuple[float, float]:
    """`Histogram.above` of the prior: lengths 1 … max_tokens, equally likely."""
    mass = (max_tokens - tokens) / max_tokens
    return mass, mass * (tokens + 1 + max_tokens) / 2
