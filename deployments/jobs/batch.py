"""OpenAI's batch files through the router, at batch priority, with whatever others leave.

    ray job submit --working-dir . -- python -m deployments.jobs.batch --input in.jsonl --output out.jsonl

Owns: the command, the order of things, and how the job ends. Imports the parts in this folder. Invariants: a line is
answered once, whatever ends the job and however often it is submitted again; the input is never in memory, nor more
answers than there are requests in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from cluster.clock import SystemClock
from deployments.jobs import command
from deployments.jobs.endpoint import Routers, find_routers, find_urls
from deployments.jobs.journal import Journal, JournalError, check_regular
from deployments.jobs.lines import Ask, error_line
from deployments.jobs.pace import ClosedError, Gate, Pace
from deployments.jobs.sender import MODELS_PATH, UNREACHABLE_S, Sender, SendSettings, Sent, is_router, refusal
from deployments.jobs.survey import StrangerError, Survey, Work, look_through, work_of
from deployments.jobs.tally import Standing, Tally, duration, log_line, summary
from deployments.open_files import allow_many_connections
from deployments.settings import Environment, UsageError, checked_environment

_BEGIN_IN_FLIGHT = 4
_READ_LINES = 64
_READ_BYTES = 8 * 2**20
_LOG_EVERY_S = 5.0
_BAR_EVERY_S = 0.2
_REACH_S = 60.0
"""How long a router that does not answer yet is waited for before anything is sent."""
_REACH_PAUSE_S = 1.0
_NOT_YET = frozenset({408, 429, 500, 502, 503, 504})
"""From who may be a router, or stand before one that starts: waited for as long as later for one that has gone."""
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""A router whose machine has gone says nothing more: after a minute its lines are sent elsewhere."""
_RAYS_COPY = "runtime_resources/working_dir_files"
"""In the path of what Ray unpacks of a job's working directory."""


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """What a job is told. Times in seconds."""

    input: Path
    output: Path
    errors: Path | None
    send: SendSettings
    in_flight_max: int
    grace_s: float
    """How long a job that is stopped waits for what is in flight."""


def batch(
    input_file: Annotated[Path, typer.Option("--input", metavar="FILE", help="Requests: OpenAI's batch format.")],
    output: Annotated[
        Path, typer.Option(metavar="FILE", help="Answers; what stands there is not done again. Best on shared storage.")
    ],
    errors: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Failed lines go there. Default: into the output, with the others."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="The router.", show_default="FOREBAY_URL, or the routers of the Ray cluster of this job"
        ),
    ] = None,
    priority_class: Annotated[
        str, typer.Option("--class", metavar="NAME", help="The priority class of every request.")
    ] = "batch",
    concurrency_max: Annotated[
        int,
        typer.Option(
            min=1, max=10_000, metavar="N", help="Requests in flight, at most; how many follows what is accepted."
        ),
    ] = 256,
    timeout_s: Annotated[
        float, typer.Option(min=1, max=86_400, metavar="SECONDS", help="Of one request, waiting included.")
    ] = 3600.0,
    window_s: Annotated[
        float,
        typer.Option(min=1, metavar="SECONDS", help="A line that there was no room for so long ends as batch_expired."),
    ] = 86_400.0,
    grace_s: Annotated[
        float,
        typer.Option(
            min=0, metavar="SECONDS", help="Stopped, it waits so long for what is in flight; Ray kills after 3."
        ),
    ] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON, and all else as errors.")] = False,
) -> int:
    """Run a file of requests in OpenAI's batch format, as fast as spare capacity allows.

    Submitted again with the same files it goes on where it stopped: no line that has its answer is sent again. Lines that
    cannot be sent are answered with an error and stop nothing. FOREBAY_API_KEY is the key where the router asks for one.

    Exit code: 0 if all lines are answered, 1 if some of them failed, 2 if the job could not begin or go on (one line says
    why), 143 if it was stopped. What is answered stays in all cases.
    """
    settings = BatchSettings(
        input=input_file,
        output=output,
        errors=errors,
        send=SendSettings(priority_class, timeout_s, window_s),
        in_flight_max=concurrency_max,
        grace_s=grace_s,
    )
    out = console(stderr=as_json)
    environment = checked_environment()
    if not all("!" <= character <= "~" for character in priority_class) or not priority_class:
        raise UsageError(f"--class: {priority_class!r} must be one word of printable ASCII characters")
    _check_paths(settings, out)
    with Journal(output, errors) as journal:
        survey, failed = _look(settings, journal, out)
        tally = Tally(survey.lines, survey.lines_answered, failed, time.monotonic())
        _say(
            out,
            f"{input_file}: {survey.lines:,} lines, {survey.lines_answered:,} of them answered in {output.absolute()}",
        )
        began_s, code = time.monotonic(), 0
        if survey.lines_answered < survey.lines:
            urls, found = find_urls(url, environment)
            routers = Routers(urls, find_routers if found else None, SystemClock())
            job = Job(settings, journal, survey, tally, routers, environment, out)
            try:
                code = asyncio.run(job.run())
            except JournalError as error:
                raise UsageError(str(error)) from error
    last = tally.standing(time.monotonic(), 0, 0)
    took_s = time.monotonic() - began_s
    _say(out, f"{_ended(last, code)}, {tally.output_tokens:,} output tokens, {duration(took_s)}")
    if as_json:
        print(json.dumps(summary(last, took_s, tally.output_tokens)), flush=True)
    return code or (command.FAILED_SOME if last.failed else 0)


def console(*, stderr: bool = False) -> Console:
    """Coloured on a terminal; elsewhere, as in a job's log, plain and wide."""
    out = Console(stderr=stderr, highlight=False)
    return out if out.is_terminal else Console(stderr=stderr, highlight=False, width=160)


def _say(out: Console, line: str, style: str = "") -> None:
    """One line, never folded, and nothing in it is markup: paths are people's."""
    out.print(line, style=style, markup=False, soft_wrap=True)


def _ended(last: Standing, code: int) -> str:
    if code:
        return f"stopped: {last.done:,} of {last.lines:,} answered; submit the job again to go on"
    return f"all {last.lines:,} lines answered, {last.failed:,} of them failed"


def _check_paths(settings: BatchSettings, out: Console) -> None:
    """Raises UsageError where the input is none, or two of the files are one."""
    named = {"--input": settings.input, "--output": settings.output, "--errors": settings.errors}
    places: dict[Path, str] = {}
    for option, path in named.items():
        if path is None:
            continue
        if (other := places.setdefault(path.resolve(), option)) != option:
            raise UsageError(f"{option}: {path} is {other} too; name another file")
    check_regular(settings.input, "--input")
    try:
        with settings.input.open("rb"):
            pass
    except OSError as error:
        raise UsageError(f"--input: {settings.input} cannot be read: {error.strerror}") from error
    if _RAYS_COPY in str(settings.output.resolve()):
        _say(
            out,
            f"{settings.output} lies in the copy of your folder that Ray has made for this job, on this node alone, and Ray "
            "removes it when it needs the room: give --output a whole path on storage that stays",
            style="yellow",
        )


def _look(settings: BatchSettings, journal: Journal, out: Console) -> tuple[Survey, int]:
    """What is there to do, and how many of the answers that there are failed.

    Raises:
        UsageError: the output is not of this input.
    """
    answers, failed = journal.read()
    last_s = time.monotonic()

    def show(lines: int) -> None:
        nonlocal last_s
        if (now_s := time.monotonic()) - last_s >= _LOG_EVERY_S:
            last_s = now_s
            _say(out, f"looking through the input: {lines:,} lines so far")

    try:
        return look_through(settings.input, answers, show), failed
    except StrangerError as error:
        answer = journal.answer(error.name)
        raise UsageError(
            f"{settings.input} is not what {settings.output} answers: the line that {answer.id} answers "
            f"(custom_id {answer.custom_id!r}) was changed or taken out; give --output another file, or the old input"
        ) from error
    except OSError as error:
        raise UsageError(f"--input: {settings.input} cannot be read: {error.strerror}") from error


class Job:
    """One run. `run` is called once."""

    def __init__(
        self,
        settings: BatchSettings,
        journal: Journal,
        survey: Survey,
        tally: Tally,
        routers: Routers,
        environment: Environment,
        out: Console,
    ) -> None:
        self._settings = settings
        self._journal = journal
        self._survey = survey
        self._tally = tally
        self._routers = routers
        self._credentials = environment.credentials
        self._out = out
        self._clock = SystemClock()
        begin = min(_BEGIN_IN_FLIGHT, settings.in_flight_max)
        self._gate = Gate(Pace(float(begin), settings.in_flight_max), self._clock)
        self._lines: set[asyncio.Task[None]] = set()
        self._signal = 0

    async def run(self) -> int:
        """0 when every line is answered, 128 and a signal's number where one came before.

        Raises:
            UsageError: nobody serves it, or the input changed.
            JournalError: the output cannot be written.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop, number)
        allow_many_connections()
        transport = httpx.AsyncHTTPTransport(
            limits=httpx.Limits(max_connections=self._settings.in_flight_max),
            socket_options=_KEEPALIVE,
            trust_env=False,
        )
        try:
            async with httpx.AsyncClient(transport=transport, trust_env=False) as client:
                with contextlib.suppress(ClosedError):
                    await self._reach(client)
                    sender = Sender(
                        client, self._routers, self._gate, self._settings.send, self._credentials, self._clock
                    )
                    await self._answer_all(sender)
        except ExceptionGroup as group:
            raise group.exceptions[0] from group
        finally:
            await self._journal.flushed()
            await self._routers.close()
        stopped = self._signal and self._tally.done < self._tally.lines
        return command.INTERRUPTED + self._signal if stopped else 0

    def _stop(self, number: int) -> None:
        self._signal = number
        self._gate.close()
        asyncio.get_running_loop().call_later(self._settings.grace_s, self._give_up)

    def _give_up(self) -> None:
        for line in self._lines:
            line.cancel()

    async def _reach(self, client: httpx.AsyncClient) -> None:
        """Wait until a router answers.

        Raises:
            ClosedError: the job was stopped first.
            UsageError: none does, or not to this key, or what answers is none.
        """
        began_s = self._clock.monotonic()
        while True:
            url = self._routers.next()
            try:
                answer = await client.get(url + MODELS_PATH, headers=self._credentials)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                self._routers.unreachable(url)
                why, wait_s = f"no answer from {url}: {str(error) or type(error).__name__}", _REACH_S
                if isinstance(error, httpx.InvalidURL):
                    raise UsageError(why) from error
            else:
                if is_router(answer):
                    return
                status = answer.status_code
                why = (
                    refusal(url, answer)
                    or f"{url} is no router: {url}{MODELS_PATH} answers {status} and no list of models"
                )
                wait_s = UNREACHABLE_S if status in _NOT_YET else 0.0
            if self._clock.monotonic() - began_s >= wait_s:
                raise UsageError(why)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gate.closed.wait(), _REACH_PAUSE_S)
            if self._gate.closed.is_set():
                raise ClosedError

    async def _answer_all(self, sender: Sender) -> None:
        async with asyncio.TaskGroup() as group:
            shown = group.create_task(self._show(), name="progress")
            works = work_of(self._settings.input, self._survey)
            with contextlib.suppress(ClosedError):
                while some := await asyncio.to_thread(_some, works):
                    for work in some:
                        await self._gate.begin()
                        line = group.create_task(self._answer(sender, work), name="line")
                        self._lines.add(line)
                        line.add_done_callback(self._lines.discard)
            while self._lines:
                await asyncio.wait(self._lines)
            shown.cancel()

    async def _answer(self, sender: Sender, work: Work) -> None:
        try:
            if isinstance(work.what, Ask):
                sent = await sender.answer(work.name, work.what)
            else:
                sent = Sent(error_line(work.name, work.what), failed=True, output_tokens=0)
            keeping = asyncio.create_task(self._keep(sent), name="answer")
            try:
                await asyncio.shield(keeping)
            finally:
                await keeping  # also where the line is given up just now: what is written is counted
        except ClosedError:
            pass  # the next run does it
        finally:
            self._gate.end()

    async def _keep(self, sent: Sent) -> None:
        await self._journal.add(sent.line, failed=sent.failed)
        self._tally.add(failed=sent.failed, output_tokens=sent.output_tokens)

    async def _show(self) -> None:
        """Until it is cancelled: a bar on a terminal, a line now and then in a log."""
        if not self._out.is_terminal:
            while True:
                await asyncio.sleep(_LOG_EVERY_S)
                _say(self._out, log_line(self._standing()))
        with Progress(
            TextColumn("{task.fields[said]}"), BarColumn(), console=self._out, transient=True, auto_refresh=False
        ) as bar:
            task = bar.add_task("", total=self._tally.lines, said="")
            while True:
                now = self._standing()
                bar.update(task, completed=now.done, said=log_line(now), refresh=True)
                await asyncio.sleep(_BAR_EVERY_S)

    def _standing(self) -> Standing:
        return self._tally.standing(self._clock.monotonic(), self._gate.in_flight, self._gate.limit)


def _some(works: Iterator[Work]) -> list[Work]:
    """The next few; none at the end. In a thread: a disk may be far away. Raises UsageError where it cannot be read."""
    taken: list[Work] = []
    size = 0
    try:
        while len(taken) < _READ_LINES and size < _READ_BYTES and (work := next(works, None)) is not None:
            taken.append(work)
            size += len(work.what.body) if isinstance(work.what, Ask) else 0
    except OSError as error:
        raise UsageError(f"--input: it cannot be read any more: {error.strerror}") from error
    return taken


def main() -> None:
    sys.exit(command.run("deployments.jobs.batch", batch))


if __name__ == "__main__":
    main()
