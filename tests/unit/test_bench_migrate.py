"""The laws of `bench migrate`: what is sent arrives, what does not belong is refused, and a moved request goes on exactly."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from cluster.clock import SystemClock
from cluster.config import DType, EngineConfig
from cluster.engine.runner import EngineRunner
from cluster.engine.torch.build import build_engine
from cluster.model import ModelFolder
from cluster.types import EngineState, Request, RequestId, Sampling
from ops.bench.migrate import MigrateSettings, Move, Source, build_report, measure, target_process
from ops.bench.migrate_wire import MAX_FRAME_BYTES, Begin, Blocks, Commit, Link, ToTarget


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a TCP connection on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    with here, there:
        yield here, there


def move(gap_ms: float, step_ms: float, differ: int = 0) -> Move:
    return Move(
        gap_ms=gap_ms,
        stop_and_copy_ms=5.0,
        source_step_ms=step_ms,
        target_step_ms=step_ms,
        tail_blocks=1,
        tail_bytes=100,
        streamed_bytes=1000,
        prefill_tokens=0,
        tokens_that_differ=differ,
    )


def test_frames_and_raw_bytes_arrive_as_they_were_sent() -> None:
    request = Request(
        request_id=RequestId("r"),
        tenant="t",
        priority=1,
        priority_class="c",
        arrived_unix_s=1.5,
        prompt_ids=(1, 2, 3),
        sampling=Sampling(max_tokens=4, seed=5),
        emitted_ids=(9,),
    )
    state = EngineState(request=request, computed_tokens=3, kv_format="f")
    raw = memoryview(bytes(range(256)) * 4096)
    sent: list[Begin | Blocks | Commit] = [
        Begin(RequestId("r"), 1, "f", 7),
        Blocks(RequestId("r"), 1, 0, raw.nbytes),
        Commit(state, 1),
    ]
    with connected() as (here, there):
        sender, receiver = Link(here), Link(there)

        def send() -> None:
            for frame in sent:
                sender.send(frame, raw if isinstance(frame, Blocks) else None)
            here.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=send)
        thread.start()
        received = []
        while (frame := receiver.receive()) is not None:
            message = msgspec.msgpack.decode(frame, type=ToTarget)
            received.append(message)
            if isinstance(message, Blocks):
                assert receiver.receive_raw(message.raw_bytes) == raw
        thread.join()
    assert received == sent


def test_a_frame_beyond_the_bound_is_refused_before_it_is_read() -> None:
    with connected() as (here, there):
        here.sendall((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
        with pytest.raises(ValueError, match="longer than"):
            Link(there).receive()


def test_pause_is_what_the_move_adds_to_a_step() -> None:
    """A gap of 75 ms where a step takes 50 ms is half a step too long; one of 50 ms is none."""
    assert move(75.0, 50.0).pause_over_step == pytest.approx(0.5)
    assert move(50.0, 50.0).pause_over_step == 0.0


def test_report_has_the_medians_and_counts_every_token_that_differs(tiny_model: ModelFolder) -> None:
    moves = [move(75.0, 50.0, 1), move(100.0, 50.0, 2), move(500.0, 50.0)]
    report = build_report(moves, MigrateSettings(1024, 4, 3, 0), tiny_model, EngineConfig())
    assert report.value("pause_over_step") == pytest.approx(1.0)
    assert report.value("tokens_that_differ") == 3


@pytest.mark.slow
def test_request_moved_to_another_process_goes_on_exactly_and_computes_nothing_again(tiny_model: ModelFolder) -> None:
    config = EngineConfig(dtype=DType.FLOAT32)
    runner = EngineRunner(build_engine(tiny_model, config), SystemClock())
    source = Source(runner)
    settings = MigrateSettings(kv_tokens=256, chunk_blocks=4, rounds=2, seed=0)
    try:
        with target_process(tiny_model, config.dtype) as target:
            moves = measure(source, target, tiny_model.vocab_size, settings, lambda: None)
    finally:
        runner.stop()
    assert len(moves) == 2
    for one in moves:
        assert one.tokens_that_differ == 0
        assert one.prefill_tokens == 0
        assert one.streamed_bytes >= (256 - 16) * one.tail_bytes / (16 * one.tail_blocks)


@pytest.mark.slow
def test_target_that_cannot_load_its_model_is_an_error_and_not_a_wait(tiny_model: ModelFolder) -> None:
    broken = dataclasses.replace(tiny_model, path=tiny_model.path / "missing")
    with pytest.raises(RuntimeError, match="before it was warm"), target_process(broken, DType.FLOAT32):
        raise AssertionError("there is no target")
