"""What the two processes of `bench migrate` say to each other, and how: length-prefixed msgpack, blocks as raw bytes.

Owns: the messages and the framing. Imports cluster.types. Invariant: no frame is longer than its bound, and keys and
values are never encoded: they follow their header as they are.
"""

from __future__ import annotations

import socket
import struct
import threading

import msgspec

from cluster.types import EngineState, RequestId, TokenDelta

MAX_FRAME_BYTES = 2**20
MAX_RAW_BYTES = 64 * 2**20
_LENGTH = struct.Struct("!I")


class Frame(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages; the class name is the tag."""


class Hello(Frame, frozen=True):
    """The target is warm. It repeats the token that it was started with."""

    token: str
    kv_format: str


class Begin(Frame, frozen=True):
    request_id: RequestId
    attempt: int
    kv_format: str
    blocks: int


class Blocks(Frame, frozen=True):
    """`raw_bytes` bytes follow: blocks `first`, `first` + 1, …"""

    request_id: RequestId
    attempt: int
    first: int
    raw_bytes: int


class Commit(Frame, frozen=True):
    state: EngineState
    attempt: int


class Done(Frame, frozen=True):
    """The answer to each of the three above, in their order. Empty where it was taken."""

    refusal: str


class Tokens(Frame, frozen=True):
    """What one step of the target gave."""

    deltas: tuple[TokenDelta, ...]
    prefill_tokens_total: int


class Died(Frame, frozen=True):
    why: str


ToTarget = Begin | Blocks | Commit
ToSource = Hello | Done | Tokens | Died


class Link:
    """One side of the connection. Any thread may send; one receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._sending = threading.Lock()
        self._encode = msgspec.msgpack.Encoder().encode

    def send(self, frame: Frame, raw: memoryview | None = None) -> None:
        """Send a frame, and the raw bytes that it announces."""
        body = self._encode(frame)
        with self._sending:
            self._connection.sendall(_LENGTH.pack(len(body)) + body)
            if raw is not None:
                self._connection.sendall(raw)

    def receive(self) -> memoryview | None:
        """The next frame's bytes; None at the end of the connection.

        Raises:
            ValueError: the frame is longer than the bound.
        """
        head = self._read(_LENGTH.size)
        if head is None:
            return None
        (length,) = _LENGTH.unpack(head)
        if length > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {length} bytes is longer than {MAX_FRAME_BYTES}")
        return self._read(length)

    def receive_raw(self, length: int) -> memoryview:
        """The bytes that a frame has announced.

        Raises:
            ValueError: more than the bound.
            ConnectionError: the connection ended before them.
        """
        if not 0 < length <= MAX_RAW_BYTES:
            raise ValueError(f"{length} bytes announced, at most {MAX_RAW_BYTES} are taken")
        data = self._read(length)
        if data is None:
            raise ConnectionError("the connection ended before the bytes that were announced")
        return data

    def close(self) -> None:
        self._connection.close()

    def _read(self, length: int) -> memoryview | None:
        data = memoryview(bytearray(length))
        have = 0
        while have < length:
            got = self._connection.recv_into(data[have:])
            if not got:
                return None
            have += got
        return data
