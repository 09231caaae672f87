"""Urgent work starts at once, and what it displaced is not lost: see it on a running Forebay.

    python -m ops.examples.priority            # against FOREBAY_URL, or the newest instance on this machine

Fills every slot of every replica with `service_tier: "flex"` streams, then sends one `service_tier: "priority"` request
and measures how long its first token took, in milliseconds and in engine steps. Then it lets all streams end, and
compares each text with one undisturbed run of the same prompt at temperature 0. Where the router asks for a key it is the
one in FOREBAY_API_KEY, which must be allowed the class of urgent requests.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from dataclasses import dataclass, field

import httpx
from openai import APIError, AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from cluster import metrics
from ops.endpoint import address_of, read_environment
from ops.errors import CommandError

FLEX_PROMPT = "Count upward from one, in words: one, two, three,"
URGENT_PROMPT = "The capital of France is"
NO_KEY = "none"
"""OpenAI's client must present something."""


@dataclass
class StreamResult:
    """What one stream brought, and when (seconds, monotonic)."""

    sent_at: float
    arrivals: list[float] = field(default_factory=list)
    text: str = ""

    @property
    def ttft_seconds(self) -> float:
        return self.arrivals[0] - self.sent_at


@dataclass(frozen=True)
class PriorityResult:
    """What the demonstration saw."""

    slots: int
    urgent_ttft_ms: float
    step_ms: float
    """Median time between two tokens of the streams that filled the slots."""
    preemptions: int
    flex_ended_before_it: int
    """Streams of the fillers that had ended when the urgent one began: slots that were not taken from anybody."""
    texts_equal: int


async def stream(
    client: AsyncOpenAI, model: str, prompt: str, tier: str, max_tokens: int, first: asyncio.Event
) -> StreamResult:
    """Run one stream to its end; sets `first` at its first token, or when it fails. Raises openai.APIError."""
    result = StreamResult(time.monotonic())
    try:
        chunks = await client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            extra_body={"service_tier": tier, "ignore_eos": True},
        )
        async for chunk in chunks:
            result.arrivals.append(time.monotonic())
            first.set()
            if chunk.choices:
                result.text += chunk.choices[0].text
    finally:
        first.set()  # nobody waits for a stream that failed
    return result


def openai_client(url: str, api_key: str) -> AsyncOpenAI:
    """Without retries, which would hide what is shown here."""
    return AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=600)


async def demonstrate(
    url: str, flex_tokens: int = 120, urgent_tokens: int = 8, api_key: str = NO_KEY
) -> PriorityResult:
    """Run the demonstration.

    Raises:
        RuntimeError: there is no replica, or the slots could not be filled because other work runs.
        APIError: a stream was refused.
    """
    credentials = {"authorization": f"Bearer {api_key}"}
    async with (
        httpx.AsyncClient(base_url=url, headers=credentials, timeout=30) as plain,
        openai_client(url, api_key) as client,
    ):
        model, slots = await _model_and_slots(plain)
        before = await _preemptions(plain)
        started = [asyncio.Event() for _ in range(slots)]
        fillers = [
            asyncio.create_task(stream(client, model, FLEX_PROMPT, "flex", flex_tokens, first)) for first in started
        ]
        await asyncio.gather(*(first.wait() for first in started))
        if await _preemptions(plain) != before or any(task.done() for task in fillers):
            for task in fillers:
                task.cancel()
            ends = await asyncio.gather(*fillers, return_exceptions=True)
            for end in ends:
                if isinstance(end, APIError):
                    raise end
            raise RuntimeError("the slots are not all taken by these streams: is other work running?")
        begun = asyncio.Event()
        urgent_task = asyncio.create_task(stream(client, model, URGENT_PROMPT, "priority", urgent_tokens, begun))
        await begun.wait()
        ended = sum(task.done() for task in fillers)
        urgent = await urgent_task
        flex = await asyncio.gather(*fillers)
        after = await _preemptions(plain)
        alone = await stream(client, model, FLEX_PROMPT, "flex", flex_tokens, asyncio.Event())
    gaps = [b - a for result in flex for a, b in zip(result.arrivals, result.arrivals[1:], strict=False)]
    return PriorityResult(
        slots=slots,
        urgent_ttft_ms=urgent.ttft_seconds * 1000,
        step_ms=statistics.median(gaps) * 1000,
        preemptions=after - before,
        flex_ended_before_it=ended,
        texts_equal=sum(result.text == alone.text for result in flex),
    )


async def _model_and_slots(plain: httpx.AsyncClient) -> tuple[str, int]:
    """Of the first model that is served."""
    state = (await plain.get("/status")).raise_for_status().json()
    model = str(state["router"]["models"][0]["model"])
    replicas = state["cluster"]["replicas"] if state["cluster"] else []
    reports = [r["report"] for r in replicas if r["entry"]["model"] == model]
    slots = sum(r["load"]["slots_total"] for r in reports if r)
    if not slots:
        raise RuntimeError("no replica has reported yet")
    return model, slots


async def _preemptions(plain: httpx.AsyncClient) -> int:
    text = (await plain.get("/metrics")).raise_for_status().text
    return int(
        sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"{metrics.PREEMPTIONS.name}_total"
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="the router (default: FOREBAY_URL, or the newest instance on this machine)")
    parser.add_argument(
        "--tokens",
        type=int,
        default=120,
        help="output length of the streams that fill the slots (default: %(default)s)",
    )
    arguments = parser.parse_args()
    try:
        environment = read_environment()
        url, key = address_of(environment, arguments.url), environment.api_key
    except CommandError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"Filling every slot of {url} with flex streams, then sending one urgent request: a minute or so …")
    try:
        api_key = NO_KEY if key is None else key.get_secret_value()
        result = asyncio.run(demonstrate(url, arguments.tokens, api_key=api_key))
    except (RuntimeError, httpx.HTTPError, APIError) as error:
        why = str(error) or type(error).__name__
        print(f"could not show it: {why} ({url})", file=sys.stderr)
        return 2
    steps = result.urgent_ttft_ms / result.step_ms
    print(f"  slots taken by flex streams      {result.slots}")
    print(f"  time of one engine step          {result.step_ms:.0f} ms (median gap between two tokens of a stream)")
    print(f"  urgent request, first token      {result.urgent_ttft_ms:.0f} ms = {steps:.1f} steps")
    print(f"  requests preempted for it        {result.preemptions}")
    print(f"  flex texts equal to a run alone  {result.texts_equal} of {result.slots}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
