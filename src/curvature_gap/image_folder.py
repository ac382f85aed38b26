"""Class folders of images, in a directory or in zip files: `cat/1.png`, or `train/cat/1.png` and `test/cat/1.png`.

Nothing is ever unpacked to disk, only image formats that Pillow decodes itself are read, and every limit is checked
before memory is taken.
"""

import io
import lzma
import os
import stat
import struct
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from curvature_gap.data import Dataset, assemble, canonical_order, check_size
from curvature_gap.downloads import user_path

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
LITTER = ("__MACOSX", "Thumbs.db", "desktop.ini")
MAX_FILE_BYTES = 64 * 2**20
MAX_TOTAL_BYTES = 16 * 2**30
MAX_PIXELS = 2**26
MAX_EXPANSION = 100
"""Zip members that expand by more than this are bombs: image formats are compressed already."""

DAMAGED = (OSError, EOFError, SyntaxError, ValueError, TypeError, LookupError, OverflowError, struct.error, zlib.error)
"""What Pillow's decoders raise on damaged files, found by flipping bytes in each format."""

Tree = dict[str, dict[str, list["Entry"]]]


class ImageFolderError(ValueError):
    """A folder or zip that is not a usable set of labelled images; the message names the file and the remedy."""


@dataclass(frozen=True)
class Entry:
    """A file or a folder below the root; `where` is how messages call it."""

    parts: tuple[str, ...]
    where: str
    is_folder: bool
    size: int = 0
    read: Callable[[], bytes] = bytes


def load(
    name: str,
    *,
    path: str,
    image_size: int | None = None,
    channels: int | None = None,
    seed: int = 0,
    test_fraction: float = 0.2,
) -> Dataset:
    """Return the images of class folders as a dataset.

    Args:
        name: Of the dataset.
        path: A directory or a zip file.
        image_size: Side in pixels; larger, smaller and oblong images are scaled and cropped at the centre. None: all
            images must be squares of one size.
        channels: 1 turns colour into grey, 3 refuses grey images. None: as the images are, all alike.
        seed: Of the split, where there are no train/ and test/ folders.
        test_fraction: Share of each class that becomes test data, at least one image.

    Raises:
        ImageFolderError: Naming the file, if anything does not fit.
    """
    if channels not in (None, 1, 3):
        raise ImageFolderError(f"{name}: channels must be 1 (grey) or 3 (colour), got {channels}.")
    if not 0 < test_fraction < 1:
        raise ImageFolderError(f"{name}: test_fraction must lie between 0 and 1, got {test_fraction}.")
    root = user_path(path, f"{name}: path")
    with open_entries([root]) as entries:
        splits, class_names = read_splits(entries, str(root), image_size, channels)
    if "all" in splits:
        splits = _split(*splits["all"], seed, test_fraction, class_names)
        how = f"{test_fraction:g} of each class held out with seed {seed}"
    else:
        how = "own train and test folders"
    return assemble(name, splits["train"], splits["test"], class_names, source=f"folder {root.name}", note=how)


def at_hand(path: str) -> tuple[bool, str]:
    """Say whether there is a directory or a file at `path`."""
    found = user_path(path, "path").exists()
    return found, f"{path} {'exists' if found else 'does not exist'}"


def read_splits(
    entries: Sequence[Entry], where: str, image_size: int | None, channels: int | None
) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], tuple[str, ...]]:
    """Return images (n, c, s, s) and labels (n,) of each split (train and test, or all), and the sorted class names.

    Raises:
        ImageFolderError: If the folders are not classes of images or an image cannot be used.
    """
    tree = arrange(entries, where)
    class_names = tuple(sorted(next(iter(tree.values()))))
    files = [(split, label, entry) for split in tree for label, c in enumerate(class_names) for entry in tree[split][c]]
    # All splits at once, so that they are held to one size and one kind.
    images = _decode_all([entry for _, _, entry in files], where, image_size, channels)
    labels = np.array([label for _, label, _ in files], np.int64)
    of_split = np.array([split for split, _, _ in files])
    splits = {split: (images[of_split == split], labels[of_split == split]) for split in tree}
    return splits, class_names


@contextmanager
def open_entries(paths: Sequence[Path]) -> Iterator[list[Entry]]:
    """Yield what lies in a directory or in one or several zip files; zips stay open while entries are read."""
    with ExitStack() as stack:
        found: list[Entry] = []
        for path in paths:
            if path.is_dir():
                found += _walk(path)
            elif path.is_file():
                found += _zip_entries(stack.enter_context(_open_zip(path)), path)
            else:
                raise ImageFolderError(f"{path} does not exist; give a directory of class folders or a zip of it.")
        total = sum(entry.size for entry in found)
        if total > MAX_TOTAL_BYTES:
            raise ImageFolderError(f"{paths[0]}: {total} bytes of files, more than the {MAX_TOTAL_BYTES} allowed.")
        yield found


def _open_zip(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError, UnicodeDecodeError, NotImplementedError, struct.error) as error:
        raise ImageFolderError(f"{path} is neither a directory nor a readable zip file: {error}") from error


def _walk(root: Path) -> list[Entry]:
    """List a directory, deepest level included; links are followed unless they lead back to where they came from."""
    found: list[Entry] = []

    def visit(folder: Path, parts: tuple[str, ...], above: tuple[tuple[int, int], ...]) -> None:
        try:
            status = folder.stat()
            names = sorted(path.name for path in folder.iterdir())
        except OSError as error:
            raise ImageFolderError(f"{folder} cannot be read: {error.strerror}.") from error
        identity = (status.st_dev, status.st_ino)
        if identity in above:
            raise ImageFolderError(f"{folder} is a link that leads back to a folder above it; remove the link.")
        for name in filter(_wanted, names):
            path, below = folder / _readable(name, str(folder)), (*parts, name)
            try:
                status = path.stat()
            except OSError as error:
                raise ImageFolderError(f"{path} cannot be read: {error.strerror}.") from error
            if stat.S_ISDIR(status.st_mode):
                found.append(Entry(below, str(path), is_folder=True))
                visit(path, below, (*above, identity))
            elif stat.S_ISREG(status.st_mode):
                found.append(Entry(below, str(path), is_folder=False, size=status.st_size, read=path.read_bytes))
            else:
                raise ImageFolderError(f"{path} is neither a file nor a folder.")

    visit(root, (), ())
    return found


def _wanted(name: str) -> bool:
    return not name.startswith(".") and name not in LITTER


def _readable(name: str, folder: str) -> str:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ImageFolderError(f"{folder} holds a name that is not UTF-8, {os.fsencode(name)!r}; rename it.") from error
    return name


def _zip_entries(archive: zipfile.ZipFile, path: Path) -> list[Entry]:
    found, seen = [], set()
    for info in archive.infolist():
        where = f"{path}: {info.filename}"
        parts = _safe_parts(info.filename, where)
        if not all(map(_wanted, parts)):
            continue
        if parts in seen:
            raise ImageFolderError(f"{where} occurs twice in the zip; which one is meant cannot be told.")
        seen.add(parts)
        if stat.S_ISLNK(info.external_attr >> 16):
            raise ImageFolderError(f"{where} is a link; put the file itself into the zip.")
        if info.flag_bits & 1:
            raise ImageFolderError(f"{where} is encrypted; make a zip without a password.")
        if info.file_size > MAX_EXPANSION * max(info.compress_size, 1024):
            raise ImageFolderError(f"{where} expands from {info.compress_size} to {info.file_size} bytes: a zip bomb.")
        # Intermediate folders need not be listed in a zip; a class is known by its files, an empty one by its entry.
        found += [
            Entry(parts, where, is_folder=True)
            if info.is_dir()
            else Entry(parts, where, is_folder=False, size=info.file_size, read=_member_reader(archive, info))
        ]
    return found


def _safe_parts(filename: str, where: str) -> tuple[str, ...]:
    member = PurePosixPath(filename)
    if member.is_absolute() or ".." in member.parts or "\\" in filename or ":" in member.parts[0]:
        raise ImageFolderError(f"{where} points outside the zip; refused.")
    return member.parts


def _member_reader(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Callable[[], bytes]:
    return lambda: archive.read(info)


def arrange(entries: Sequence[Entry], where: str) -> Tree:
    """Return split -> class -> files, with splits train and test, or one called all.

    Raises:
        ImageFolderError: If it is not two levels (or three with train/ and test/), there are fewer than two classes, a
            class is empty, or two classes' names differ by case or Unicode form alone.
    """
    files = [entry for entry in entries if not entry.is_folder]
    folders = {entry.parts for entry in entries if entry.is_folder}
    folders |= {entry.parts[:k] for entry in files for k in range(1, len(entry.parts))}
    top = sorted({parts[0] for parts in folders})
    wrapped = len(top) == 1 and top[0] not in ("train", "test") and any(len(parts) > 1 for parts in folders)
    if wrapped:
        inner = [Entry(e.parts[1:], e.where, e.is_folder, e.size, e.read) for e in entries if len(e.parts) > 1]
        return _arrange_unwrapped(inner, where)
    return _arrange_unwrapped(entries, where)


def _arrange_unwrapped(entries: Sequence[Entry], where: str) -> Tree:
    top = {entry.parts[0] for entry in entries if entry.is_folder or len(entry.parts) > 1}
    if not top & {"train", "test"}:
        return {"all": _classes(entries, where)}
    if top != {"train", "test"}:
        raise ImageFolderError(f"{where} holds {_listed(top)}; it must be train and test, or class folders alone.")
    tree = {}
    for split in ("train", "test"):
        below = [Entry(e.parts[1:], e.where, e.is_folder, e.size, e.read) for e in entries if e.parts[0] == split]
        tree[split] = _classes([entry for entry in below if entry.parts], f"{where}/{split}")
    if set(tree["train"]) != set(tree["test"]):
        alone = set(tree["train"]) ^ set(tree["test"])
        raise ImageFolderError(f"{where}: {_listed(alone)} only in one of train and test; both need every class.")
    return tree


def _classes(entries: Sequence[Entry], where: str) -> dict[str, list[Entry]]:
    classes: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: entry.parts):
        if len(entry.parts) == 1 and entry.is_folder:
            classes.setdefault(entry.parts[0], [])
        elif len(entry.parts) == 1:
            if entry.parts[0].lower().endswith(SUFFIXES):
                raise ImageFolderError(f"{entry.where} lies outside the class folders; move it into its class.")
        elif len(entry.parts) > 2 or entry.is_folder:
            raise ImageFolderError(f"{entry.where} lies deeper than class folder/image; flatten it.")
        else:
            classes.setdefault(entry.parts[0], []).append(entry)
    _check_classes(classes, where)
    return classes


def _check_classes(classes: dict[str, list[Entry]], where: str) -> None:
    if len(classes) < 2:
        raise ImageFolderError(
            f"{where} has {len(classes)} class folders ({_listed(classes)}); at least two are needed."
        )
    known: dict[str, str] = {}
    for name, files in classes.items():
        if not files:
            raise ImageFolderError(f"{where}: class {name} is empty; add images or remove the folder.")
        folded = unicodedata.normalize("NFC", name).casefold()
        if folded in known:
            raise ImageFolderError(
                f"{where}: classes {known[folded]!r} and {name!r} differ in spelling alone; rename one."
            )
        known[folded] = name


def _listed(names: Any) -> str:
    names = sorted(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "none"


def _decode_all(entries: Sequence[Entry], where: str, image_size: int | None, channels: int | None) -> np.ndarray:
    if image_size is not None:
        check_size(where, len(entries), channels or 1, image_size)  # before the first image is scaled to it
    first = _decode(entries[0], image_size, channels)
    shape = first.shape
    check_size(where, len(entries), *shape[:2])
    images = np.empty((len(entries), *shape), np.uint8)
    for i, entry in enumerate(entries):
        image = _decode(entry, image_size, channels)
        if image.shape[0] != shape[0]:
            raise ImageFolderError(f"{entry.where} and {entries[0].where} are grey and colour, mixed; set channels: 1.")
        if image.shape != shape:
            sides = f"side {image.shape[1]}, {entries[0].where} has {shape[1]}"
            raise ImageFolderError(f"{entry.where} has {sides}; set image_size to scale all to one.")
        images[i] = image
    return images


def _decode(entry: Entry, image_size: int | None, channels: int | None) -> np.ndarray:
    """Return one image, uint8 (c, s, s)."""
    from PIL import Image, ImageOps

    if entry.size > MAX_FILE_BYTES:
        raise ImageFolderError(f"{entry.where} has {entry.size} bytes, more than the {MAX_FILE_BYTES} allowed.")
    try:
        content = entry.read()
    except (OSError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError) as error:
        raise ImageFolderError(f"{entry.where} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            _check_kind(image, entry.where, channels)
            mode = "L" if channels == 1 or image.mode in ("1", "L") else "RGB"
            upright = ImageOps.exif_transpose(image) if image.getexif() else image
            pixels = upright.convert(mode)
    except ImageFolderError:
        raise
    except (*DAMAGED, Image.DecompressionBombError) as error:
        raise ImageFolderError(f"{entry.where} is not an intact image ({', '.join(FORMATS)}): {error}") from error
    if image_size is not None and pixels.size != (image_size, image_size):
        pixels = ImageOps.fit(pixels, (image_size, image_size))
    if pixels.width != pixels.height:
        raise ImageFolderError(f"{entry.where} is {pixels.width} x {pixels.height}, not square; set image_size.")
    array = np.asarray(pixels)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def _check_kind(image: Any, where: str, channels: int | None) -> None:
    if image.width * image.height > MAX_PIXELS:
        raise ImageFolderError(f"{where} is {image.width} x {image.height}, more than the {MAX_PIXELS} pixels allowed.")
    if getattr(image, "n_frames", 1) > 1:
        raise ImageFolderError(f"{where} has {image.n_frames} frames; one picture per file is expected.")
    if image.mode not in ("1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr"):
        raise ImageFolderError(f"{where} has mode {image.mode}; 8-bit grey or colour is expected.")
    if image.has_transparency_data and image.convert("RGBA").getextrema()[3][0] < 255:
        raise ImageFolderError(f"{where} is partly transparent; its colour is undefined. Flatten it.")
    if channels == 3 and image.mode in ("1", "L"):
        raise ImageFolderError(f"{where} is grey where colour is expected; set channels: 1, or convert the image.")


def _split(
    images: np.ndarray, labels: np.ndarray, seed: int, test_fraction: float, class_names: tuple[str, ...]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Hold out a share of every class, by a seeded draw from the canonical order: file names do not matter."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    shuffled = canonical_order(images, labels)[torch.randperm(len(labels), generator=generator).numpy()]
    test = []
    for label, name in enumerate(class_names):
        members = shuffled[labels[shuffled] == label]
        if len(members) < 2:
            raise ImageFolderError(f"class {name} has one image; two are needed, one to train and one to test.")
        n_test = min(max(1, round(test_fraction * len(members))), len(members) - 1)
        test.append(members[:n_test])
    held_out = np.concatenate(test)
    rest = np.setdiff1d(np.arange(len(labels)), held_out)
    return {"train": (images[rest], labels[rest]), "test": (images[held_out], labels[held_out])}
