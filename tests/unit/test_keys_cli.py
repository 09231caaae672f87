"""The laws of the file of keys and of `forebay keys`: shown once, hashed at rest, written whole, nothing lost."""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import logging
import os
import re
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.config import DEFAULT_CLASSES
from ops import cli
from router import keys as keys_module
from router.keys import KeyFile, KeyRing, KeysError, KeyTable, holds_key
from router.limits import Limits

KEY_FORM = re.compile(r"fb-([0-9a-f]{12})-([0-9a-f]{48})")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def forebay(capsys: pytest.CaptureFixture[str], path: Path) -> Callable[..., tuple[int, str, str]]:
    """Exit code, standard output and standard error of `forebay keys …` on a file of its own."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.run(("keys", *arguments, "--file", str(path)))
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


Forebay = Callable[..., tuple[int, str, str]]


def create(forebay: Forebay, *arguments: str) -> str:
    code, out, _ = forebay("create", *arguments)
    assert code == 0
    return out.strip()


# --- a key, from its making to its end ---


def test_key_is_printed_alone_and_once_and_only_its_hash_is_kept(forebay: Forebay, path: Path) -> None:
    code, out, err = forebay("create", "--tenant", "acme")
    assert code == 0
    found = KEY_FORM.fullmatch(out.strip())
    assert found, "standard output is the key, so that a script can take it"
    key, key_id, secret = found.group(0), found.group(1), found.group(2)
    assert len(bytes.fromhex(secret)) * 8 >= 160
    assert key_id in err
    assert secret not in err
    said = "".join(forebay("list")[1:]) + "".join(forebay("list", "--json")[1:])
    kept = "".join(file.read_text() for file in path.parent.iterdir())
    assert secret not in said + kept
    # What is kept is the HMAC of the whole key by the secret beside the file, as RFC 2104 has it.
    pepper = path.with_name("keys.json.pepper").read_bytes().strip()
    (record,) = json.loads(path.read_text())["keys"]
    assert record["hmac_sha256"] == hmac.new(pepper, key.encode(), hashlib.sha256).hexdigest()
    assert record["hmac_sha256"] not in said


def test_two_keys_are_never_alike(forebay: Forebay) -> None:
    assert len({create(forebay, "--tenant", "acme") for _ in range(20)}) == 20


def test_files_are_their_owner_s_alone(forebay: Forebay, path: Path) -> None:
    create(forebay, "--tenant", "acme")
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    assert modes == {"keys.json": 0o600, "keys.json.pepper": 0o600, "keys.json.lock": 0o600}


def test_mode_that_an_operator_gave_the_file_outlives_a_write(forebay: Forebay, path: Path) -> None:
    create(forebay, "--tenant", "acme")
    path.chmod(0o640)
    create(forebay, "--tenant", "acme")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.skipif(os.geteuid() != 0, reason="only an administrator writes another account's file")
def test_file_of_another_account_stays_its_own(forebay: Forebay, path: Path) -> None:
    create(forebay, "--tenant", "acme")
    os.chown(path, 12345, 12345)
    create(forebay, "--tenant", "acme")
    assert (path.stat().st_uid, path.stat().st_gid) == (12345, 12345)


def test_link_to_the_file_stays_one(forebay: Forebay, path: Path, tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    path.symlink_to(tmp_path / "volume" / "real.json")
    create(forebay, "--tenant", "acme")
    create(forebay, "--tenant", "acme")
    assert path.is_symlink()
    assert len(json.loads((tmp_path / "volume" / "real.json").read_text())["keys"]) == 2


def test_list_shows_what_was_set(forebay: Forebay) -> None:
    options = {
        "--highest-class": "standard",
        "--requests-per-s": "2.5",
        "--tokens-per-min": "60000",
        "--max-streams": "8",
        "--queue-share": "0.25",
        "--note": "the [bold]web app",
    }
    key = create(forebay, "--tenant", "acme", "--operator", *(part for pair in options.items() for part in pair))
    create(forebay, "--tenant", "acme")
    code, out, _ = forebay("list")
    assert code == 0
    head, first, second = out.splitlines()
    assert head.split("  ")[0] == "id"
    assert first.split()[:8] == [key[3:15], "acme", "standard", "2.5", "60,000", "8", "25%", "yes"]
    assert first.rstrip().endswith("the [bold]web app")
    assert second.split()[1:8] == ["acme", "all", "-", "-", "-", "100%", "-"]
    code, out, _ = forebay("list", "--json")
    listed = json.loads(out)[0]
    assert {name: listed[name] for name in listed if name not in {"id", "created_unix_s"}} == {
        "tenant": "acme",
        "highest_class": "standard",
        "queue_share": 0.25,
        "operator": True,
        "note": "the [bold]web app",
        "revoked_unix_s": None,
        "requests_per_s": 2.5,
        "tokens_per_min": 60000,
        "max_streams": 8,
    }


def test_revoked_key_is_nobody_s_and_the_others_stay(forebay: Forebay, path: Path) -> None:
    first, second = create(forebay, "--tenant", "acme"), create(forebay, "--tenant", "acme")
    code, out, _ = forebay("revoke", first[3:15])
    assert code == 0
    assert first[3:15] in out
    assert forebay("revoke", first[3:15])[0] == 0, "again is no error"
    file = KeyFile(path)
    table = KeyTable(file.records(), file.pepper(), DEFAULT_CLASSES)
    assert table.identify(first.encode()) is None
    identity = table.identify(second.encode())
    assert identity is not None
    assert (identity.tenant, identity.key_id) == ("acme", second[3:15])
    assert [record["revoked_unix_s"] is None for record in json.loads(forebay("list", "--json")[1])] == [False, True]


def test_long_revoked_keys_leave_the_file(forebay: Forebay, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = create(forebay, "--tenant", "acme")
    forebay("revoke", first[3:15])
    now_s = time.time()
    monkeypatch.setattr("router.keys.time.time", lambda: now_s + keys_module.REVOKED_KEPT_S + 2)
    second = create(forebay, "--tenant", "acme")
    assert [record.id for record in KeyFile(path).records()] == [second[3:15]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["create"], "Missing option '--tenant'"),
        (["create", "--tenant", "A"], "tenant 'A': 1 to 63 of a-z"),
        (["create", "--tenant", ""], "tenant ''"),
        (["create", "--tenant", "-a"], "tenant '-a'"),
        (["create", "--tenant", "a" * 64], "1 to 63"),
        (["create", "--tenant", "a\n"], "tenant"),
        (["create", "--tenant", "a/b"], "tenant 'a/b'"),
        (["create", "--tenant", "a", "--highest-class", "gold"], "interactive, standard, batch"),
        (["create", "--tenant", "a", "--requests-per-s", "0"], "requests_per_s"),
        (["create", "--tenant", "a", "--requests-per-s", "nan"], "requests_per_s"),
        (["create", "--tenant", "a", "--requests-per-s", "inf"], "requests_per_s"),
        (["create", "--tenant", "a", "--tokens-per-min", "-5"], "tokens_per_min"),
        (["create", "--tenant", "a", "--max-streams", "0"], "max_streams"),
        (["create", "--tenant", "a", "--queue-share", "1.5"], "queue_share"),
        (["create", "--tenant", "a", "--queue-share", "0"], "queue_share"),
        (["create", "--tenant", "a", "--note", "x" * 201], "note"),
        (["create", "--tenant", "a", "--profile", "nowhere"], "no profile 'nowhere'"),
        (["list"], "`forebay keys create --tenant NAME"),
        (["revoke", "0123456789ab"], "no key with this id"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_writes_nothing(
    forebay: Forebay, path: Path, arguments: list[str], said: str
) -> None:
    code, out, err = forebay(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("forebay: ")
    assert err.count("\n") == 1
    assert said in err
    assert not path.exists()


def test_id_that_is_a_whole_key_is_not_repeated(forebay: Forebay) -> None:
    key = create(forebay, "--tenant", "acme")
    code, out, err = forebay("revoke", key)
    assert code == 2
    assert key[16:] not in out + err


def test_file_that_is_none_is_left_as_it_is(forebay: Forebay, path: Path) -> None:
    for content in (b"", b"{}", b'{"version": 2, "keys": []}', b'{"version": 1, "keys": [{"id": "x"}]}', b"\xff\xfe"):
        path.write_bytes(content)
        code, out, err = forebay("create", "--tenant", "acme")
        assert (code, out) == (2, "")
        assert "is no file of keys" in err
        assert path.read_bytes() == content


def test_lost_pepper_is_an_error_and_never_made_anew(forebay: Forebay, path: Path) -> None:
    """A new one would silently end every key that there is."""
    create(forebay, "--tenant", "acme")
    path.with_name("keys.json.pepper").unlink()
    code, out, err = forebay("create", "--tenant", "acme")
    assert (code, out) == (2, "")
    assert "hashed with cannot be read" in err
    assert not path.with_name("keys.json.pepper").exists()


def test_number_of_keys_is_bounded(forebay: Forebay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_module, "MAX_KEYS", 2)
    create(forebay, "--tenant", "a")
    create(forebay, "--tenant", "a")
    code, _, err = forebay("create", "--tenant", "a")
    assert code == 2
    assert "revoke some" in err


# --- writers at once, and writers that die ---

_WRITER = """
import sys
from pathlib import Path
from router.keys import KeyFile
file = KeyFile(Path(sys.argv[1]))
print("up", flush=True)
sys.stdin.readline()
for _ in range(int(sys.argv[2])):
    print(file.create(sys.argv[3])[1], flush=True)
"""


def test_keys_that_two_processes_make_at_once_are_all_there(path: Path) -> None:
    each = 25
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(path), str(each), tenant],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for tenant in ("a", "b")
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "up\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("\n")
        writer.stdin.flush()
    made = {tenant: writer.communicate(timeout=60)[0].split() for tenant, writer in zip("ab", writers, strict=True)}
    assert [writer.returncode for writer in writers] == [0, 0]
    file = KeyFile(path)
    records = file.records()
    assert len(records) == 2 * each
    table = KeyTable(records, file.pepper(), DEFAULT_CLASSES)
    for tenant, keys in made.items():
        for key in keys:
            identity = table.identify(key.encode())
            assert identity is not None
            assert identity.tenant == tenant


def test_reader_never_sees_half_a_file(path: Path) -> None:
    file = KeyFile(path)
    file.create("first")
    done = threading.Event()
    seen: list[int] = []

    def read() -> None:
        while not done.is_set():
            seen.append(len(file.records()))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(50):
        file.create("more")
    done.set()
    reader.join()
    assert seen == sorted(seen)
    assert set(seen) <= set(range(1, 52))


def test_write_that_fails_leaves_the_file_and_no_litter(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = KeyFile(path)
    file.create("first")
    before, names = path.read_bytes(), sorted(p.name for p in path.parent.iterdir())

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(KeysError, match="No space left on device"):
            file.create("second")
    assert path.read_bytes() == before
    assert sorted(p.name for p in path.parent.iterdir()) == names
    file.create("third")
    assert [record.tenant for record in file.records()] == ["first", "third"]


def test_lock_that_is_never_let_go_ends_the_waiting(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_module, "LOCK_TIMEOUT_S", 0.1)
    with path.with_name("keys.json.lock").open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(KeysError, match="another command has held"):
            KeyFile(path).create("acme")
    KeyFile(path).create("acme")


# --- the look-up ---


def test_whatever_is_not_the_whole_key_is_nobody_s(path: Path) -> None:
    file = KeyFile(path)
    key = file.create("acme")[1].encode()
    other = file.create("other")[1].encode()
    table = KeyTable(file.records(), file.pepper(), DEFAULT_CLASSES)
    assert table.identify(key) is not None
    for wrong in (
        b"",
        b"fb-",
        key[:-1],
        key + b"0",
        key + b"\x00",
        key + b" " * 10_000,
        b" " + key,
        key.upper(),
        key[:16] + other[16:],
        b"fb-" + b"0" * 12 + key[15:],
        b"\xff" * 64,
        key[3:],
    ):
        assert table.identify(wrong) is None, wrong


def test_hashes_are_of_no_use_with_another_pepper(path: Path) -> None:
    file = KeyFile(path)
    key = file.create("acme")[1].encode()
    assert KeyTable(file.records(), b"x" * 64, DEFAULT_CLASSES).identify(key) is None


def test_limits_and_class_go_from_the_file_to_the_identity(path: Path) -> None:
    file = KeyFile(path)
    limits = Limits(requests_per_s=1, tokens_per_min=2, max_streams=3)
    key = file.create("acme", highest_class="batch", limits=limits, queue_share=0.5)[1]
    identity = KeyRing(file, DEFAULT_CLASSES).identify(key.encode())
    assert identity is not None
    assert identity.highest_class is not None
    assert (identity.highest_class.name, identity.limits, identity.queue_share) == ("batch", limits, 0.5)


def test_key_of_a_class_that_the_router_lacks_is_not_taken_and_the_others_are(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = KeyFile(path)
    lost, kept = file.create("a", highest_class="gold")[1], file.create("b")[1]
    ring = KeyRing(file, DEFAULT_CLASSES)
    assert ring.identify(lost.encode()) is None
    assert ring.identify(kept.encode()) is not None
    assert "no class 'gold'" in caplog.text


def test_ring_follows_the_file_and_keeps_what_it_has_while_it_cannot_be_read(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = KeyFile(path)
    first = file.create("a")[1].encode()
    ring = KeyRing(file, DEFAULT_CLASSES)
    second = file.create("b")[1].encode()
    assert ring.identify(second) is None
    ring.refresh()
    assert ring.identify(second) is not None

    whole = path.read_bytes()
    path.unlink()
    ring.refresh()
    path.write_bytes(b"{")
    ring.refresh()
    ring.refresh()
    assert ring.identify(first) is not None
    assert [r.levelno for r in caplog.records] == [logging.ERROR, logging.ERROR], "each failure once"

    path.write_bytes(whole)
    file.revoke(first[3:15].decode())
    ring.refresh()
    assert ring.identify(first) is None
    assert ring.identify(second) is not None
    assert not holds_key(caplog.text)


def test_file_that_has_not_changed_is_not_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = KeyFile(path)
    file.create("a")
    ring = KeyRing(file, DEFAULT_CLASSES)

    def read(_: Any) -> Any:
        raise AssertionError("it was read")

    monkeypatch.setattr(KeyFile, "records", read)
    ring.refresh()


@pytest.mark.parametrize("short", [b"", b"x" * 31])
def test_pepper_that_is_no_secret_is_refused(path: Path, short: bytes) -> None:
    file = KeyFile(path)
    file.create("a")
    file.pepper_path.write_bytes(short)
    with pytest.raises(KeysError, match="at least 32"):
        KeyRing(file, DEFAULT_CLASSES)


def test_pepper_may_lie_elsewhere(path: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef" * 4 + "\n")
    file = KeyFile(path, tmp_path / "secret")
    key = file.create("a")[1]
    assert not path.with_name("keys.json.pepper").exists()
    assert KeyRing(KeyFile(path, tmp_path / "secret"), DEFAULT_CLASSES).identify(key.encode()) is not None


def test_text_that_holds_a_key_is_told(path: Path) -> None:
    key = KeyFile(path).create("a")[1]
    assert holds_key(f"Bearer {key}!")
    assert not holds_key(key[:-1])
    assert not holds_key("req-12345")
