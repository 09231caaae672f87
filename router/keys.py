"""The file of keys: who may use the endpoint, as what, and how much.

Owns: the form of a key and of the file, its writing, and the look-up of a key in it. Imports config and limits.
Invariants: a key's secret is nowhere but with its holder, the file has an HMAC of it; a write is whole or not at all, and
two writers at once lose nothing; a key that is unknown, revoked or malformed is looked up in the same steps.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import logging
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from cluster.config import PriorityClass
from router.limits import NO_LIMITS, Limits

ID_CHARS = 12
SECRET_BYTES = 24
"""192 bits of chance: no guess needs to be slowed down."""
KEY_CHARS = len("fb-") + ID_CHARS + len("-") + 2 * SECRET_BYTES
MAX_KEYS = 10_000
MAX_FILE_BYTES = 16 * 2**20
REVOKED_KEPT_S = 90 * 86400
"""How long the file still tells of a revoked key."""
LOCK_TIMEOUT_S = 10.0
TENANT = r"[a-z0-9][a-z0-9._-]{0,62}"

Stamp = tuple[tuple[int, int, int], ...]
"""When two files were written last, how long they are, and which they are."""

_KEY = re.compile(rf"fb-[0-9a-f]{{{ID_CHARS}}}-[0-9a-f]{{{2 * SECRET_BYTES}}}")
_PEPPER_MIN_BYTES = 32
_LOCK_POLL_S = 0.005

_log = logging.getLogger("forebay.keys")


class KeysError(Exception):
    """The file of keys cannot be used as asked; one line that says what to change."""


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the file says of one key."""

    id: Annotated[str, msgspec.Meta(pattern=rf"^[0-9a-f]{{{ID_CHARS}}}\Z")]
    tenant: Annotated[str, msgspec.Meta(pattern=rf"^{TENANT}\Z")]
    hmac_sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    created_unix_s: int
    highest_class: str | None = None
    """The most urgent class that it may use; none may use all."""
    limits: Limits = NO_LIMITS
    queue_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    """Largest part of a class's queue that its tenant may fill."""
    operator: bool = False
    """It may drain replicas."""
    note: Annotated[str, msgspec.Meta(max_length=200)] = ""
    revoked_unix_s: int | None = None


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Literal[1]
    keys: tuple[KeyRecord, ...]


@dataclass(frozen=True, slots=True)
class Identity:
    """Who asks, and what they may."""

    tenant: str
    key_id: str
    highest_class: PriorityClass | None = None
    """The most urgent class that they may use; none may use all."""
    limits: Limits = NO_LIMITS
    queue_share: float = 1.0
    operator: bool = False


# --- the file ---


class KeyFile:
    """The file of keys and, in a file of its own, the secret that they are hashed with (the pepper)."""

    def __init__(self, path: Path, pepper_path: Path | None = None) -> None:
        """`pepper_path`: none takes the one beside `path`, of the same name with `.pepper` behind it."""
        self.path = path.expanduser()
        beside = self.path.with_name(f"{self.path.name}.pepper")
        self.pepper_path = beside if pepper_path is None else pepper_path.expanduser()

    def records(self) -> tuple[KeyRecord, ...]:
        """All that the file tells of, oldest first. Raises KeysError."""
        return self._read(absent_is_empty=False)

    def pepper(self) -> bytes:
        """Raises KeysError where it cannot be read or is too short to be a secret."""
        try:
            pepper = self.pepper_path.read_bytes().strip()
        except OSError as error:
            raise self._unreadable(error) from error
        if len(pepper) < _PEPPER_MIN_BYTES:
            raise KeysError(f"{self.pepper_path} holds {len(pepper)} bytes; it needs at least {_PEPPER_MIN_BYTES}")
        return pepper

    def stamp(self) -> Stamp:
        """Differs once one of the two files was replaced or written. Raises KeysError where one is missing."""
        try:
            stats = [path.stat() for path in (self.path, self.pepper_path)]
        except OSError as error:
            raise self._unreadable(error) from error
        return tuple((s.st_mtime_ns, s.st_size, s.st_ino) for s in stats)

    def create(
        self,
        tenant: str,
        *,
        highest_class: str | None = None,
        limits: Limits = NO_LIMITS,
        queue_share: float = 1.0,
        operator: bool = False,
        note: str = "",
    ) -> tuple[KeyRecord, str]:
        """Add a key; returns what the file says of it and the key itself, which nothing says again.

        Raises:
            KeysError: a value does not fit, or the files cannot be read or written.
        """
        key_id, secret = secrets.token_hex(ID_CHARS // 2), secrets.token_hex(SECRET_BYTES)
        key = f"fb-{key_id}-{secret}"
        with self._changing() as (records, save):
            if len(records) >= MAX_KEYS:
                raise KeysError(f"{self.path} holds {len(records)} keys already, as many as there may be; revoke some")
            if any(record.id == key_id for record in records):
                raise KeysError("the id that was drawn is in use, which is one chance in 10^10; try again")
            pepper = self.pepper() if records or self.pepper_path.exists() else self._make_pepper()
            record = KeyRecord(
                id=key_id,
                tenant=tenant,
                hmac_sha256=_digest(pepper, key.encode()).hex(),
                created_unix_s=int(time.time()),
                highest_class=highest_class,
                limits=limits,
                queue_share=queue_share,
                operator=operator,
                note=note,
            )
            save((*records, checked(record)))
        return record, key

    def revoke(self, key_id: str) -> KeyRecord:
        """A key that is revoked already stays so. Raises KeysError where there is no such key."""
        with self._changing() as (records, save):
            index = next((i for i, record in enumerate(records) if record.id == key_id), None)
            if index is None:
                raise KeysError(f"{self.path} has no key with this id; `forebay keys list` shows them")
            record = records[index]
            if record.revoked_unix_s is None:
                record = msgspec.structs.replace(record, revoked_unix_s=int(time.time()))
                save((*records[:index], record, *records[index + 1 :]))
        return record

    def _read(self, *, absent_is_empty: bool) -> tuple[KeyRecord, ...]:
        try:
            with self.path.open("rb") as file:
                raw = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            if absent_is_empty and isinstance(error, FileNotFoundError):
                return ()
            raise self._unreadable(error) from error
        if len(raw) > MAX_FILE_BYTES:
            raise KeysError(f"the file of keys is larger than {MAX_FILE_BYTES} bytes: {self.path}")
        try:
            return msgspec.json.decode(raw, type=_Document).keys
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise KeysError(f"{self.path} is no file of keys: {error}") from error

    def _unreadable(self, error: OSError) -> KeysError:
        if error.filename == str(self.pepper_path):
            return KeysError(
                f"the secret that the keys in {self.path} are hashed with cannot be read: {self.pepper_path}: "
                f"{error.strerror}"
            )
        if isinstance(error, FileNotFoundError):
            return KeysError(
                f"there is no file of keys at {self.path}; `forebay keys create --tenant NAME --file {self.path}` makes it"
            )
        return KeysError(f"the file of keys cannot be read: {self.path}: {error.strerror}")

    @contextlib.contextmanager
    def _changing(self) -> Iterator[tuple[tuple[KeyRecord, ...], Callable[[tuple[KeyRecord, ...]], None]]]:
        """What the file says, and how to replace that; nobody else changes it meanwhile."""
        try:
            # A link is followed, so that what it points to is replaced and not the link.
            path = Path(os.path.realpath(self.path))
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _locked(path.with_name(f"{path.name}.lock")):
                yield self._read(absent_is_empty=True), partial(_save, path)
        except OSError as error:
            raise KeysError(f"{error.filename or self.path} cannot be written: {error.strerror}") from error

    def _make_pepper(self) -> bytes:
        pepper = secrets.token_hex(_PEPPER_MIN_BYTES)
        _replace(self.pepper_path, pepper.encode() + b"\n")
        return pepper.encode()


def _save(path: Path, records: tuple[KeyRecord, ...]) -> None:
    told_since_s = time.time() - REVOKED_KEPT_S
    kept = tuple(r for r in records if r.revoked_unix_s is None or r.revoked_unix_s >= told_since_s)
    _replace(path, msgspec.json.format(msgspec.json.encode(_Document(1, kept)), indent=1) + b"\n")


def checked(record: KeyRecord) -> KeyRecord:
    """The record, where its values are of the form that the file allows. Raises KeysError that names what is not."""
    try:
        return msgspec.convert(msgspec.to_builtins(record), KeyRecord)
    except msgspec.ValidationError as error:
        if "$.tenant" in str(error):
            raise KeysError(
                f"tenant {record.tenant[:80]!r}: 1 to 63 of a-z, 0-9, '.', '_' and '-', the first a letter or a digit"
            ) from error
        raise KeysError(f"this key cannot be kept: {error}") from error


def _replace(path: Path, raw: bytes) -> None:
    """Write a file whole or not at all, so that it outlives a power cut; for its owner alone unless it was otherwise."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            # An administrator who changes the file of a service's account leaves it to that account.
            with contextlib.suppress(FileNotFoundError):
                before = path.stat()
                os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
                if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(descriptor, before.st_uid, before.st_gid)
            file.write(raw)
            file.flush()
            os.fsync(descriptor)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that ends with this process. Raises KeysError where somebody else keeps it for too long."""
    with path.open("wb") as file:
        path.chmod(0o600)
        deadline_s = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    message = f"another command has held {path} for {LOCK_TIMEOUT_S:.0f} s; try again when it is done"
                    raise KeysError(message) from None
            time.sleep(_LOCK_POLL_S)
        yield


# --- the look-up ---


class KeyTable:
    """The keys that are in force, by id."""

    def __init__(self, records: Sequence[KeyRecord], pepper: bytes, classes: Sequence[PriorityClass]) -> None:
        """A key whose class is not one of `classes` is left out: what it may use is not known."""
        by_name = {c.name: c for c in classes}
        self._pepper = pepper
        self._nobody = secrets.token_bytes(32)
        self._keys: dict[bytes, tuple[bytes, Identity]] = {}
        for record in records:
            if record.revoked_unix_s is not None:
                continue
            name = record.highest_class
            if name is not None and name not in by_name:
                _log.error("key %s is not taken: this router has no class %r", record.id, name)
                continue
            highest = None if name is None else by_name[name]
            identity = Identity(record.tenant, record.id, highest, record.limits, record.queue_share, record.operator)
            self._keys[record.id.encode()] = (bytes.fromhex(record.hmac_sha256), identity)

    def __len__(self) -> int:
        return len(self._keys)

    def identify(self, key: bytes) -> Identity | None:
        """Whose key this is. Takes as long for one that is none."""
        presented = key[: KEY_CHARS + 1]  # one more than a key has: a key with something behind it is none
        expected, identity = self._keys.get(key[3 : 3 + ID_CHARS], (self._nobody, None))
        return identity if hmac.compare_digest(_digest(self._pepper, presented), expected) else None


class KeyRing:
    """The keys of a running router, which follow the file."""

    def __init__(self, file: KeyFile, classes: Sequence[PriorityClass]) -> None:
        """Raises KeysError where the file cannot be read."""
        self._file = file
        self._classes = tuple(classes)
        self._failure = ""
        self._stamp, self._table = self._load()
        if not len(self._table):
            _log.warning("%s has no key that is in force: every request is refused", file.path)

    def identify(self, key: bytes) -> Identity | None:
        return self._table.identify(key)

    def refresh(self) -> None:
        """Read the file again if it has changed. Where it cannot be read the keys that were read last stay in force, and
        the log says so. May be called from another thread than `identify`."""
        try:
            if self._file.stamp() == self._stamp:
                return
            self._stamp, self._table = self._load()
        except KeysError as error:
            if str(error) != self._failure:
                _log.error("the keys are as they were read last, for they cannot be read: %s", error)
            self._failure = str(error)
        else:
            self._failure = ""
            _log.info("read the keys again: %d in force", len(self._table))

    def _load(self) -> tuple[Stamp, KeyTable]:
        stamp = self._file.stamp()  # first: what changes while it is read is read again
        return stamp, KeyTable(self._file.records(), self._file.pepper(), self._classes)


def holds_key(text: str) -> bool:
    """Whether something in `text` has the form of a key, and so must not be logged."""
    return _KEY.search(text) is not None


def _digest(pepper: bytes, key: bytes) -> bytes:
    return hmac.digest(pepper, key, "sha256")
