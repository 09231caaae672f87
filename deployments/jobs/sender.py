"""One line of a batch sent until it has its answer.

Owns: what an answer of the router means for its line (`judge`, pure), and the tries of one line. Imports the gate, the
routers and the lines' forms. Invariants: a line that the router refuses for now is sent again when the router said, at the
cost of no try; one that broke has TRIES of them, and none of these is spent while no router answers anything; all ends with
the window. What is no JSON object is no answer, whatever its status. A line has one request at a time, named by its
answer's id, and none outlives this process: the router gives up what its client has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

import httpx
import msgspec
from tenacity import AsyncRetrying, RetryCallState, retry_if_result, wait_random_exponential

from cluster.ports import Clock
from deployments.jobs.endpoint import Routers
from deployments.jobs.lines import Ask, LineError, answer_line, error_line, id_of, is_object, is_success
from deployments.jobs.pace import Gate, Pace
from deployments.settings import UsageError

TRIES = 8
UNREACHABLE_S = 900.0
"""The job ends where no router has answered anything for so long; what is not answered is not given up with it."""
_PAUSE_S = 1.0
"""Where nobody says for how long."""
_LATE_S = 30.0
"""An answer that is to end after its own time is waited for a little longer: the router's word is the better one."""
_CONNECT_S = 10.0
_ASK_S = 10.0
"""Whether a router is there at all."""
_BALANCERS = (502, 503, 504)
"""A balancer says so too, whose routers may all be gone."""
_MESSAGE_CHARS = 300
MODELS_PATH = "/v1/models"
_CLASS_HEADER = "x-llm-d-inference-objective"


class Fate(Enum):
    FINAL = auto()
    REFUSED = auto()
    """Not now."""
    ELSEWHERE = auto()
    """Not there: another router can be asked."""
    BROKEN = auto()


@dataclass(frozen=True, slots=True)
class SendSettings:
    priority_class: str
    timeout_s: float
    """Of one request, waiting included."""
    window_s: float
    """Of one line, from its first request on."""
    unreachable_s: float = UNREACHABLE_S


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of one request."""

    fate: Fate
    response: httpx.Response | None = None
    error: LineError | None = None
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Sent:
    """A line's answer, as the output has it."""

    line: bytes
    failed: bool
    output_tokens: int


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Body(msgspec.Struct):
    id: str = ""
    usage: _Usage = msgspec.field(default_factory=_Usage)


class _ErrorMessage(msgspec.Struct):
    message: str = ""
    param: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorMessage = msgspec.field(default_factory=_ErrorMessage)


class _Models(msgspec.Struct):
    data: list[msgspec.Raw]


_UNREADABLE = msgspec.MsgspecError, UnicodeDecodeError, RecursionError
_body = msgspec.json.Decoder(_Body).decode
_error = msgspec.json.Decoder(_ErrorBody).decode
_models = msgspec.json.Decoder(_Models).decode


def judge(status: int, headers: Mapping[str, str]) -> tuple[Fate, float]:
    """What an answer means, and for how many seconds nothing is to be sent. `headers` by names in lower case."""
    if headers.get("x-should-retry") == "false":
        return Fate.FINAL, 0.0
    told_s = _seconds(headers.get("retry-after"))
    # With a time 504 means that it waited its longest in the queue: there is no room.
    if status in (429, 503) or (status == 504 and told_s is not None):
        return Fate.REFUSED, _PAUSE_S if told_s is None else told_s
    return (Fate.BROKEN if status in (408, 500, 502, 504) or 300 <= status < 400 else Fate.FINAL), 0.0


def _seconds(retry_after: str | None) -> float | None:
    try:
        return None if retry_after is None else max(0.0, float(retry_after))
    except ValueError:  # a date
        return None


class Sender:
    """Sends lines, each as often as it takes. `client` has no base address."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        routers: Routers,
        gate: Gate,
        settings: SendSettings,
        credentials: Mapping[str, str],
        clock: Clock,
    ) -> None:
        self._client = client
        self._routers = routers
        self._gate = gate
        self._settings = settings
        self._credentials = credentials
        self._headers = {
            **credentials,
            "content-type": "application/json",
            _CLASS_HEADER: settings.priority_class,
            "x-forebay-timeout-ms": str(round(settings.timeout_s * 1000)),
        }
        self._timeout = httpx.Timeout(settings.timeout_s + _LATE_S, connect=_CONNECT_S)
        self._clock = clock
        self._heard_s = clock.monotonic()
        """Of a router, at last."""
        self._silent_s = float("-inf")
        """When one was last asked whether it is there, and was not."""
        self._silent_since_s: float | None = None
        """None while they answer."""
        self._asking = asyncio.Lock()
        self._backoff = wait_random_exponential(multiplier=1, max=30)

    async def answer(self, name: bytes, ask: Ask) -> Sent:
        """The line that answers it.

        Raises:
            ClosedError: the gate was closed first.
            UsageError: no line will be served: the key may not, or nobody has answered for long.
        """
        first_s = self._clock.monotonic()
        broken = 0

        def over(state: RetryCallState) -> bool:
            nonlocal broken
            broken += _trial_of(state).fate is Fate.BROKEN
            return broken >= TRIES or self._clock.monotonic() - first_s >= self._settings.window_s

        def pause(state: RetryCallState) -> float:
            return self._backoff(state) if _trial_of(state).fate is Fate.BROKEN else 0.0

        trial: Trial = await AsyncRetrying(
            retry=retry_if_result(lambda trial: trial.fate is not Fate.FINAL),
            stop=over,
            wait=pause,
            sleep=self._sleep,
            retry_error_callback=_trial_of,
        )(self._try, name, ask)
        return self._sent(name, ask, trial)

    async def _try(self, name: bytes, ask: Ask) -> Trial:
        sent_s = await self._gate.enter()
        trial = Trial(Fate.BROKEN)
        try:
            trial = await self._request(name, ask)
        finally:
            self._gate.leave(lambda pace: self._judged(pace, trial, sent_s))
        return trial

    def _judged(self, pace: Pace, trial: Trial, sent_s: float) -> Pace:
        match trial.fate:
            case Fate.FINAL:
                return pace.accepted(self._gate.in_flight)
            case Fate.REFUSED:
                return pace.refused(sent_s, self._clock.monotonic(), trial.pause_s, random.random())
        return pace

    async def _request(self, name: bytes, ask: Ask) -> Trial:
        url, sent_s = self._routers.next(), self._clock.monotonic()
        try:
            response = await self._client.post(
                url + ask.url,
                content=ask.body,
                headers={**self._headers, "x-request-id": id_of(name)},
                timeout=self._timeout,
            )
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return self._unreachable(url, _reason(error))
        except httpx.TimeoutException:
            why = f"No answer within {self._settings.timeout_s:g} s"
            return await self._broken(
                url, sent_s, why, LineError("request_timeout", f"{why}, {TRIES} times.", ask.custom_id)
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = _reason(error)
            message = f"The connection to the router broke {TRIES} times: {why}"
            return await self._broken(url, sent_s, why, LineError("connection_error", message, ask.custom_id))
        if (why_not := refusal(url, response)) is not None:
            raise UsageError(why_not)
        status, whole = response.status_code, is_object(response.content)
        if whole and status not in _BALANCERS:
            self._hear()
        fate, pause_s = judge(status, response.headers)
        if fate is Fate.REFUSED or (fate is Fate.FINAL and whole):
            return Trial(fate, response, pause_s=pause_s)
        if not is_success(status):
            return await self._broken(url, sent_s, f"status {status}", response)
        why = f"status {status} without a JSON object"
        message = f"Answered {TRIES} times with {why}, as no router does."
        return await self._broken(url, sent_s, why, LineError("invalid_response", message, ask.custom_id))

    async def _broken(self, url: str, sent_s: float, why: str, what: httpx.Response | LineError) -> Trial:
        """A try, or none: while no router answers anything it is not the line that breaks."""
        if not await self._answers(url, sent_s):
            return self._unreachable(url, why)
        if isinstance(what, LineError):
            return Trial(Fate.BROKEN, error=what)
        return Trial(Fate.BROKEN, what)

    async def _answers(self, url: str, sent_s: float) -> bool:
        """Whether a router has answered anything since `sent_s`. Where none has, one is asked: for all that broke till then."""
        broke_s = self._clock.monotonic()
        async with self._asking:
            if self._heard_s < sent_s and self._silent_s < broke_s:
                there = False
                with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL):
                    asked = await self._client.get(url + MODELS_PATH, headers=self._credentials, timeout=_ASK_S)
                    there = is_router(asked)
                if there:
                    self._hear()
                else:
                    self._silent_s = self._clock.monotonic()
            return self._heard_s >= sent_s

    def _hear(self) -> None:
        self._heard_s, self._silent_since_s = self._clock.monotonic(), None

    def _unreachable(self, url: str, why: str) -> Trial:
        elsewhere = self._routers.unreachable(url)
        now_s = self._clock.monotonic()
        if self._silent_since_s is None:
            self._silent_since_s = now_s
        for_s = now_s - self._silent_since_s
        if not elsewhere and for_s >= self._settings.unreachable_s:
            raise UsageError(f"no answer from {url} for {for_s:.0f} s ({why}); submit the job again when it runs")
        return Trial(Fate.ELSEWHERE) if elsewhere else Trial(Fate.REFUSED, pause_s=_PAUSE_S)

    async def _sleep(self, seconds: float) -> None:
        """Or until the gate is closed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._gate.closed.wait()

    def _sent(self, name: bytes, ask: Ask, trial: Trial) -> Sent:
        response = trial.response
        if trial.fate in (Fate.REFUSED, Fate.ELSEWHERE):
            status = "" if response is None else f", the last time with status {response.status_code}"
            message = f"There was no room for it within {self._settings.window_s:g} s{status}."
            return Sent(error_line(name, LineError("batch_expired", message, ask.custom_id)), True, 0)
        if response is None:
            error = trial.error or LineError("connection_error", "It came to nothing.", ask.custom_id)
            return Sent(error_line(name, error), True, 0)
        told = _told(response.content)
        request_id = told.id or response.headers.get("x-request-id", "")
        line = answer_line(name, ask.custom_id, response.status_code, request_id, response.content)
        return Sent(line, not is_success(response.status_code), told.usage.completion_tokens)


def _trial_of(state: RetryCallState) -> Trial:
    assert state.outcome is not None, "tenacity asks after a try"
    trial = state.outcome.result()
    assert isinstance(trial, Trial)
    return trial


def refusal(url: str, response: httpx.Response) -> str | None:
    """What to do where an endpoint would refuse every line like this one: the key, or the class, is wrong. None elsewhere."""
    status = response.status_code
    if status not in (httpx.codes.BAD_REQUEST, httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        return None
    try:
        error = _error(response.content).error
    except _UNREADABLE:
        error = _ErrorMessage()
    if status == httpx.codes.BAD_REQUEST and error.param != _CLASS_HEADER:
        return None
    said = error.message[:_MESSAGE_CHARS] or "no reason given."
    return f"{url} answers {status}: {said} Set FOREBAY_API_KEY to a key that may send this, or name another --class"


def is_router(response: httpx.Response) -> bool:
    """Whether what MODELS_PATH was answered with is a router's list of models."""
    if response.status_code != httpx.codes.OK:
        return False
    try:
        _models(response.content)
    except _UNREADABLE:
        return False
    return True


def _told(content: bytes) -> _Body:
    """Nothing of what is no answer of a router."""
    try:
        return _body(content)
    except _UNREADABLE:
        return _Body()


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:_MESSAGE_CHARS]
