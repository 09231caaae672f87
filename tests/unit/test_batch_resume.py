"""What a batch job finds when it begins again: whatever cut its output, every line is answered once."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.jobs.journal import AnswerFile, Journal, JournalError
from deployments.jobs.lines import Ask, answer_line, error_line, read_answer
from deployments.jobs.survey import StrangerError, Work, look_through, names_of, work_of
from deployments.settings import UsageError


def request(custom_id: str) -> str:
    return json.dumps(
        {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": custom_id}}
    )


LINES = st.lists(
    st.sampled_from(
        [request("a"), request("b"), request("ü"), request("c") + " ", "junk", "{}", '{"custom_id": "d"}', ""]
    )
    | st.text('abc{}"', max_size=4)
    | st.integers(0, 10**6).map(lambda number: request(str(number))),
    max_size=12,
)


def answer(work: Work) -> tuple[bytes, bool]:
    if isinstance(work.what, Ask):
        return answer_line(work.name, work.what.custom_id, 200, "r", b'{"x": 1}'), False
    return error_line(work.name, work.what), True


def run(folder: Path, *, errors: bool, at_most: int | None = None) -> int:
    """One run of a job: returns how many lines it answered."""

    async def answer_all() -> int:
        into = folder / "in.jsonl"
        with Journal(folder / "out.jsonl", folder / "errors.jsonl" if errors else None) as journal:
            survey = look_through(into, journal.read()[0], lambda _: None)
            works = list(work_of(into, survey))[:at_most]
            assert survey.lines - survey.lines_answered >= len(works)
            await asyncio.gather(*(journal.add(line, failed=failed) for line, failed in map(answer, works)))
            return len(works)

    return asyncio.run(answer_all())


def blank(line: str) -> bool:
    return not line.encode().strip()


@settings(max_examples=50)
@given(LINES, st.floats(0, 1), st.booleans(), st.data())
def test_an_output_that_was_cut_anywhere_is_finished_with_each_line_once(
    lines: Sequence[str], part: float, errors: bool, data: st.DataObject
) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in.jsonl").write_text("\n".join(lines), "utf-8")
        expected = sum(not blank(line) for line in lines)
        assert run(folder, errors=errors, at_most=round(part * expected)) == round(part * expected)
        whole = 0
        for file in [folder / "out.jsonl", *([folder / "errors.jsonl"] if errors else [])]:
            content = file.read_bytes()
            cut = data.draw(st.integers(0, len(content)))
            file.write_bytes(content[:cut])
            whole += content[:cut].count(b"\n")
        assert run(folder, errors=errors) == expected - whole
        answers = [read_answer(line) for file in folder.glob("[oe]*.jsonl") for line in file.read_bytes().splitlines()]
        assert len(answers) == expected
        assert len({told.id for told in answers}) == expected
        assert run(folder, errors=errors) == 0


def test_every_byte_at_which_a_small_output_can_be_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # no power fails here, and there are hundreds of cuts
    lines = [request("a"), "junk", request("a")]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    output = tmp_path / "out.jsonl"
    run(tmp_path, errors=False)
    whole = output.read_bytes()
    for cut in range(len(whole)):
        output.write_bytes(whole[:cut])
        assert run(tmp_path, errors=False) == 3 - whole[:cut].count(b"\n")
        assert sorted(output.read_bytes().splitlines()) == sorted(whole.splitlines())


@pytest.mark.parametrize("changed", [request("b"), request("a").replace("prompt", "Prompt"), ""])
def test_an_input_that_no_longer_has_what_was_answered_is_refused(changed: str, tmp_path: Path) -> None:
    into = tmp_path / "in.jsonl"
    into.write_text(request("a"))
    run(tmp_path, errors=False)
    into.write_text(changed + "\n" + request("c"))
    with pytest.raises(StrangerError):
        run(tmp_path, errors=False)


def test_lines_may_be_added_to_an_input_and_put_in_another_order(tmp_path: Path) -> None:
    into = tmp_path / "in.jsonl"
    into.write_text("\n".join(map(request, "abc")))
    assert run(tmp_path, errors=False) == 3
    into.write_text("\n".join(map(request, "cadb")))
    assert run(tmp_path, errors=False) == 1


@settings(max_examples=100)
@given(LINES, LINES, st.floats(0, 1), st.data())
def test_whatever_lines_are_added_and_however_they_are_put_none_is_answered_again_and_no_custom_id_served_twice(
    lines: Sequence[str], more: Sequence[str], part: float, data: st.DataObject
) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in.jsonl").write_text("\n".join(lines), "utf-8")
        done = run(folder, errors=False, at_most=round(part * len(lines)))
        anew = data.draw(st.permutations([*lines, *more]))
        (folder / "in.jsonl").write_text("\n".join(anew), "utf-8")
        before = (folder / "out.jsonl").read_bytes()
        assert run(folder, errors=False) == sum(not blank(line) for line in anew) - done
        output = (folder / "out.jsonl").read_bytes()
        assert output.startswith(before)
        answers = [read_answer(line) for line in output.splitlines()]
        assert len({told.id for told in answers}) == len(answers)
        served = [told.custom_id for told in answers if not told.failed]
        assert len(set(served)) == len(served)


def test_a_run_without_a_file_of_failed_lines_between_two_with_it_leaves_each_line_one_answer_that_counts(
    tmp_path: Path,
) -> None:
    (tmp_path / "in.jsonl").write_text("\n".join(["junk", request("a"), "{}"]))
    assert run(tmp_path, errors=True, at_most=2) == 2  # junk's answer is in errors.jsonl
    assert run(tmp_path, errors=False) == 2  # and now in the output too
    assert run(tmp_path, errors=True) == 0
    with Journal(tmp_path / "out.jsonl", tmp_path / "errors.jsonl") as journal:
        names, failed = journal.read()
    assert (len(names), failed) == (3, 2)


def test_an_input_that_changes_between_the_passes_is_told(tmp_path: Path) -> None:
    into = tmp_path / "in.jsonl"
    for later in ([request("x"), request("b")], [request("a")], [*map(request, "abc")]):
        into.write_text("\n".join(map(request, "ab")))
        survey = look_through(into, names_of(b""), lambda _: None)
        into.write_text("\n".join(later))
        with pytest.raises(UsageError, match="while it was read"):
            list(work_of(into, survey))


def test_an_output_of_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(request("a"))
    output = tmp_path / "out.jsonl"
    for content in ("notes\n", '{"id": "batch_req_1", "custom_id": null}\n', '{"id": "x", "custom_id": "a"}\n'):
        output.write_text(content)
        with pytest.raises(UsageError, match="line 1 is no answer"):
            run(tmp_path, errors=False)
        assert output.read_text() == content


@pytest.mark.parametrize("name", ["out.jsonl", "errors.jsonl"])
@pytest.mark.parametrize("foreign", [b"notes", b"notes\n{", b"\x00\xff", b'{"id":"batch_req_x', b'{"name": "mine"}'])
@pytest.mark.parametrize("ours", [False, True])
def test_a_file_of_something_else_that_ends_without_a_newline_is_left_as_it_is(
    name: str, foreign: bytes, ours: bool, tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text(request("a") + "\njunk")
    if ours:
        run(tmp_path, errors=True)
    file = tmp_path / name
    content = (file.read_bytes() if ours else b"") + foreign
    file.write_bytes(content)
    with pytest.raises(UsageError, match=f"{name}: line {2 if ours else 1} is no answer"):
        run(tmp_path, errors=True)
    assert file.read_bytes() == content


def test_an_output_that_answers_a_line_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(request("a"))
    run(tmp_path, errors=False)
    output = tmp_path / "out.jsonl"
    output.write_bytes(output.read_bytes() * 2)
    with pytest.raises(UsageError, match="answers a line twice"):
        run(tmp_path, errors=False)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("option", ["--output", "--errors"])
def test_a_pipe_or_a_device_is_no_file_of_answers_and_is_not_waited_for(option: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path(os.devnull), tmp_path):
        with pytest.raises(UsageError, match=f"{option}: {path} is no regular file"):
            Journal(*((path, None) if option == "--output" else (tmp_path / "out.jsonl", path)))


def test_one_job_at_a_time_has_an_output(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with Journal(output, None):
        with pytest.raises(UsageError, match="--output: another job writes"):
            Journal(output, None)
        with pytest.raises(UsageError, match="--errors: another job writes"):
            Journal(tmp_path / "else.jsonl", output)
    with Journal(tmp_path / "else.jsonl", output):  # neither is kept by who could not begin
        pass


async def test_after_a_write_that_failed_nothing_more_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal(tmp_path / "out.jsonl", None) as journal:
        await journal.add(b"1\n", failed=False)

        def full(self: AnswerFile, lines: bytes) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(AnswerFile, "append", full)
            with pytest.raises(JournalError, match="No space left on device; what is in it stays"):
                await journal.add(b"2\n", failed=False)
        with pytest.raises(JournalError, match="No space left"):
            await journal.add(b"3\n", failed=False)
    assert (tmp_path / "out.jsonl").read_bytes() == b"1\n"


async def test_who_is_cancelled_while_a_line_is_written_takes_no_line_with_it(tmp_path: Path) -> None:
    with Journal(tmp_path / "out.jsonl", None) as journal:
        adding = [asyncio.create_task(journal.add(b"%d\n" % number, failed=False)) for number in range(20)]
        await asyncio.sleep(0)
        for task in adding[::2]:
            task.cancel()
        await asyncio.wait(adding)
        await journal.flushed()
    assert sorted(map(int, (tmp_path / "out.jsonl").read_text().split())) == list(range(20))


def test_names_that_end_with_zeros_are_told_apart() -> None:
    names = names_of(b"a" * 15 + b"\0" + b"a" * 14 + b"\0\0" + b"\0" * 16)
    assert len(np.unique(names)) == 3
