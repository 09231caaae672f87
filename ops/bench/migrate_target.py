"""The process that `bench migrate` moves requests to: an engine of its own, behind one connection.

Started as `python -m ops.bench.migrate_target PORT MODEL DTYPE`, with a token on its standard input that it repeats on
the connection. It ends when the connection does.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import msgspec

from cluster.clock import SystemClock
from cluster.config import DType, EngineConfig
from cluster.engine.runner import EngineRunner
from cluster.engine.torch.build import build_engine, prepare_process
from cluster.model import ModelFolder
from cluster.ports import StepResult
from ops.bench.migrate_wire import Begin, Blocks, Commit, Died, Done, Hello, Link, Tokens, ToTarget


def serve(link: Link, runner: EngineRunner) -> None:
    """Carry out what comes, one message after another, until the connection ends."""
    decode = msgspec.msgpack.Decoder(ToTarget).decode
    while (frame := link.receive()) is not None:
        message: ToTarget = decode(frame)
        match message:
            case Begin(request_id, attempt, kv_format, blocks):
                refusal = runner.moves.import_begin(request_id, attempt, kv_format, blocks).result()
            case Blocks(request_id, attempt, first, raw_bytes):
                data = link.receive_raw(raw_bytes)
                refusal = runner.moves.import_blocks(request_id, attempt, first, data).result()
            case Commit(state, attempt):
                refusal = runner.moves.import_commit(state, attempt).result()
        link.send(Done("" if refusal is None else refusal.value))


def main(port: int, model: Path, dtype: DType, token: str) -> None:
    prepare_process()
    config = EngineConfig(dtype=dtype)
    engine = build_engine(ModelFolder.open(model), config)
    runner = EngineRunner(engine, SystemClock())
    link = Link(socket.create_connection(("127.0.0.1", port)))

    def on_result(result: StepResult) -> None:
        if result.deltas:
            link.send(Tokens(result.deltas, result.load.prefill_tokens_total))

    runner.start(on_result, lambda why: link.send(Died(why)))
    try:
        link.send(Hello(token, runner.moves.kv_format))
        serve(link, runner)
    finally:
        runner.stop()
        link.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), DType(sys.argv[3]), sys.stdin.readline().strip())
