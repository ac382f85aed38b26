"""The cache, downloads from a local server, the package index, pickles: nothing unverified, nothing half done."""

import gzip
import logging
import os
import pickle
import select
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from curvature_gap import downloads
from curvature_gap.data import Attempt
from curvature_gap.downloads import DatasetUnavailable, SourceError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.delenv("CURVATURE_GAP_DATA", raising=False)
    monkeypatch.setenv("CURVATURE_GAP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_first_source_that_works_wins_and_every_attempt_is_logged(caplog):
    caplog.set_level(logging.INFO)

    def fail(error):
        raise error

    sources = [
        ("by hand", lambda: fail(SourceError("x.gz is truncated"))),
        ("cache", lambda: fail(PermissionError(13, "Permission denied", "/c"))),
        ("mirror", lambda: "data"),
        ("never reached", lambda: fail(AssertionError("reached"))),
    ]
    value, label, attempts = downloads.first_that_verifies("SET", sources, "do this")
    assert (value, label) == ("data", "mirror")
    assert attempts == (
        Attempt("by hand", "x.gz is truncated"),
        Attempt("cache", "[Errno 13] Permission denied: '/c'"),
        Attempt("mirror", "verified, used"),
    )
    assert [record.message for record in caplog.records] == [f"SET: {attempt}" for attempt in attempts]
    with pytest.raises(DatasetUnavailable) as caught:
        downloads.first_that_verifies("SET", sources[:2], "do this")
    assert str(caught.value) == (
        "SET could not be had from any source:\n  - by hand: x.gz is truncated\n"
        "  - cache: [Errno 13] Permission denied: '/c'\nBy hand: do this"
    )
    assert caught.value.attempts == attempts[:2]


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("CURVATURE_GAP_CACHE", "some/where")
    assert downloads.cache_directory() == Path.cwd() / "some/where"
    monkeypatch.setenv("CURVATURE_GAP_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert downloads.cache_directory() == tmp_path / "curvature-gap"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert downloads.cache_directory().is_relative_to("/home/someone")


def test_without_any_home_the_cache_is_a_temporary_folder(monkeypatch):
    for name in ("CURVATURE_GAP_CACHE", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a user without a password entry
    assert downloads.cache_directory().is_absolute()


@pytest.mark.parametrize("setting", ["CURVATURE_GAP_DATA", "CURVATURE_GAP_CACHE"])
def test_settings_that_are_no_path_are_refused(monkeypatch, setting):
    read = downloads.data_directory if setting.endswith("DATA") else downloads.cache_directory
    monkeypatch.setenv(setting, "  ")
    with pytest.raises(ValueError, match=f"{setting} is blank; give a path"):
        read()
    monkeypatch.setenv(setting, os.fsdecode(b"/data/\xff"))
    with pytest.raises(ValueError, match=rf"{setting} is b'/data/\\xff', not UTF-8"):
        read()
    monkeypatch.setenv(setting, "~nobody-of-this-name/data")
    assert read().name == "data"


def test_scratch_vanishes_kept_files_stay_and_stale_ones_are_removed(cache):
    (cache / "set/.partial-killed").mkdir(parents=True)
    (cache / "set/.partial-killed/half").write_bytes(b"half")
    with downloads.locked_cache("set") as held:
        held.keep_bytes("a", b"whole")
        (held.scratch / "b").write_bytes(b"moved")
        assert held.keep("b", held.scratch / "b") == cache / "set/b"
        (held.scratch / "c").write_bytes(b"half")
    assert sorted(path.name for path in (cache / "set").iterdir()) == [".lock", "a", "b"]
    assert (cache / "set/a").read_bytes() == b"whole"


def test_a_cache_that_is_no_folder_costs_a_warning_only(cache, caplog):
    cache.write_text("a file")
    with downloads.locked_cache("set") as held:
        held.keep_bytes("a", b"whole")
        (held.scratch / "b").write_bytes(b"usable")
        assert held.keep("b", held.scratch / "b").read_bytes() == b"usable"
        assert not held.writable
    assert "cannot be written" in caplog.text
    assert "Set CURVATURE_GAP_CACHE" in caplog.text


def test_a_read_only_cache_is_still_read(public_path, as_nobody, monkeypatch):
    monkeypatch.setenv("CURVATURE_GAP_CACHE", str(public_path))
    monkeypatch.setenv("TMPDIR", "/tmp")
    with downloads.locked_cache("set") as held:
        held.keep_bytes("a", b"whole")
    # Whoever runs the test, the cache is somebody else's: not to be written, nor its lock.
    for path in (public_path / "set/.lock", public_path / "set", public_path):
        path.chmod(0o555)

    def read():
        with downloads.locked_cache("set") as held:
            return held.writable, (held.directory / "a").read_bytes()

    try:
        assert as_nobody(read) == (False, b"whole")
    finally:
        for path in (public_path, public_path / "set"):
            path.chmod(0o755)


def test_a_full_disk_costs_a_warning_only(cache, caplog, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with downloads.locked_cache("set") as held:
        monkeypatch.setattr(Path, "write_bytes", full)
        held.keep_bytes("a", b"whole")
    assert "a cannot be kept" in caplog.text
    assert "No space left" in caplog.text
    assert not (cache / "set/a").exists()


def test_a_download_arrives_whole_or_fails_with_its_address(server, tmp_path):
    server.files["/x.gz"] = b"content" * 1000
    assert downloads.download(f"{server.url}/x.gz", tmp_path).read_bytes() == b"content" * 1000
    with pytest.raises(SourceError, match=r"http://127.*/missing\.gz: HTTPError: 404"):
        downloads.download(f"{server.url}/missing.gz", tmp_path)
    server.cut = 100
    (tmp_path / "x.gz").unlink()
    with pytest.raises(SourceError, match=r"x\.gz: .*IncompleteRead"):
        downloads.download(f"{server.url}/x.gz", tmp_path)
    assert not (tmp_path / "x.gz").exists()
    with pytest.raises(SourceError, match=r"nowhere\.invalid/x: .*"):
        downloads.download("http://nowhere.invalid/x", tmp_path)


def test_gunzip_names_what_is_truncated_altered_or_a_bomb():
    packed = gzip.compress(bytes(10**6))
    assert len(downloads.gunzip(packed, 10**6, "x.gz")) == 10**6
    flipped = bytes([*packed[:-5], packed[-5] ^ 1, *packed[-4:]])
    for content in (packed[:-9], packed[: len(packed) // 2], flipped, b"<html>", packed[:10] + b"\xff" * 50):
        with pytest.raises(SourceError, match=r"x\.gz is truncated or altered"):
            downloads.gunzip(content, 10**6, "x.gz")
    with pytest.raises(SourceError, match=r"x\.gz expands to more than the 999999 bytes"):
        downloads.gunzip(packed, 999_999, "x.gz")


def test_a_zip_member_is_read_or_its_absence_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
        archive.writestr("a/b", b"content")
    assert downloads.zip_member(tmp_path / "x.whl", "a/b") == b"content"
    with pytest.raises(SourceError, match=r"x\.whl: .*no item named 'c'"):
        downloads.zip_member(tmp_path / "x.whl", "c")
    (tmp_path / "x.whl").write_bytes(b"no zip")
    with pytest.raises(SourceError, match=r"x\.whl: .*not a zip file"):
        downloads.zip_member(tmp_path / "x.whl", "a/b")


def test_a_pickle_of_arrays_is_read():
    array = np.arange(6, dtype=">f4").reshape(2, 3)
    for protocol in (3, 4):
        found = downloads.unpickle_arrays(pickle.dumps({"data": [array.astype("f4")], "n": 3}, protocol), "x.pkl")
        np.testing.assert_array_equal(found["data"][0], array)


def test_a_pickle_of_python_2_is_read():
    """As in the archives of 2009: numpy's old module names, byte strings without a type."""
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    state = b"(K\x01K\x02\x85" + dtype + b"\x89U\x02\x03\xfetb"
    content = b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R" + state + b"."
    np.testing.assert_array_equal(downloads.unpickle_arrays(content, "x.pkl"), np.array([3, 254], np.uint8))


class Harmful:
    """Its pickle would create a file when read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_with_code_is_refused_and_does_nothing(tmp_path, protocol):
    code = pickle.dumps([1, Harmful(tmp_path / "done"), np.zeros(2)], protocol)
    with pytest.raises(SourceError, match=r"x\.pkl was not read: the pickle names posix\.mkdir"):
        downloads.unpickle_arrays(code, "x.pkl")
    with pytest.raises(SourceError, match=r"x\.pkl is truncated or altered: SHA-256 .* expected 0000"):
        downloads.read_arrays(code, "0000", "x.pkl")
    assert not (tmp_path / "done").exists()


@pytest.mark.parametrize(
    "content", [b"", b"hello", pickle.dumps([1, 2])[:-1], b"cos\nsystem\n(S'true'\ntR.", b"\x80\x09."]
)
def test_what_is_no_pickle_of_arrays_is_refused(content):
    with pytest.raises(SourceError, match=r"x\.pkl was not read"):
        downloads.unpickle_arrays(content, "x.pkl")


def test_read_arrays_reads_what_has_the_right_hash():
    content = pickle.dumps([1, 2])
    assert downloads.read_arrays(content, downloads.sha256_of(content), "x.pkl") == [1, 2]


def test_hashes_of_files_and_bytes_agree(tmp_path):
    (tmp_path / "x").write_bytes(b"content")
    assert downloads.sha256_of(tmp_path / "x") == downloads.sha256_of(b"content")


def fake_pip(monkeypatch, tmp_path, source: str) -> None:
    """Put a script in the interpreter's place; it is called with pip's arguments."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nimport sys\nfrom pathlib import Path\n{source}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def test_a_wheel_comes_through_pip_with_an_argument_list(monkeypatch, tmp_path):
    odd = tmp_path / "a b;touch pwned"
    odd.mkdir()
    fake_pip(
        monkeypatch, tmp_path, "Path(sys.argv[sys.argv.index('--dest') + 1], 'x.whl').write_text(repr(sys.argv[1:]))"
    )
    wheel = downloads.download_wheel("some==1.0", odd)
    assert wheel == odd / "x.whl"
    assert "'-m', 'pip', 'download', '--no-deps'" in wheel.read_text()
    assert "'some==1.0'" in wheel.read_text()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("sys.exit('line\\nERROR: No matching distribution\\n')", "some==1.0: ERROR: No matching distribution"),
        ("print('saved')", "some==1.0: saved"),
        ("", "some==1.0: no wheel came"),
        ("import time; time.sleep(60)", "some==1.0: no answer within 1 s"),
    ],
)
def test_pips_last_word_is_told(monkeypatch, tmp_path, source, message):
    monkeypatch.setattr(downloads, "PIP_SECONDS", 1)
    fake_pip(monkeypatch, tmp_path, source)
    with pytest.raises(SourceError, match=message):
        downloads.download_wheel("some==1.0", tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_a_killed_process_leaves_no_pip_behind(tmp_path):
    """The stand-in for pip holds the write end of a pipe: the pipe closes when its last holder is gone."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nimport time\nprint('started', flush=True)\ntime.sleep(60)\n")
    script.chmod(0o755)
    reader, writer = os.pipe()
    code = (
        "import sys\nfrom pathlib import Path\nfrom curvature_gap import downloads\nrun = downloads.subprocess.run\n"
        f"downloads.subprocess.run = lambda *a, **k: run(*a, **k, pass_fds=({writer},))\n"
        f"sys.executable = {str(script)!r}\nprint('started', flush=True)\n"
        f"downloads.download_wheel('some==1.0', Path({str(tmp_path)!r}))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, pass_fds=(writer,), text=True
    ) as process:
        os.close(writer)
        assert process.stdout.readline() == "started\n"
        # Long enough for the child to be started; if it is not yet, there is nothing to leave behind.
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.kill()
    with os.fdopen(reader, "rb") as pipe:
        ready, _, _ = select.select([pipe], [], [], 10)
        assert ready, "a child still holds the pipe"
        assert pipe.read() == b""


def test_a_second_process_waits_for_the_lock_and_a_killed_one_frees_it(cache):
    hold = (
        "import sys, time\nfrom curvature_gap import downloads\n"
        "with downloads.locked_cache('set') as held:\n"
        "    (held.scratch / 'half').write_text('half')\n    print('held', flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        try:
            downloads_seconds, downloads.LOCK_SECONDS = downloads.LOCK_SECONDS, 0.2
            with (
                pytest.raises(SourceError, match=r"\.lock has been held by another process"),
                downloads.locked_cache("set"),
            ):
                pass
        finally:
            downloads.LOCK_SECONDS = downloads_seconds
            process.kill()
    with downloads.locked_cache("set") as held:
        assert not list(cache.rglob("half"))
        assert held.writable
