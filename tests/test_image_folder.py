"""Class folders of images: what is read, and every malformed input with the message it gets."""

import io
import os
import re
import shutil
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from curvature_gap import data, image_folder
from curvature_gap.image_folder import ImageFolderError

SIDE = 6


def picture(seed: int, size: tuple[int, int] = (SIDE, SIDE), mode: str = "RGB") -> Image.Image:
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).convert(mode)


def encoded(image: Image.Image, form: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def png(seed: int, size: tuple[int, int] = (SIDE, SIDE), mode: str = "RGB") -> bytes:
    return encoded(picture(seed, size, mode))


def files(prefix: str = "", classes=("cat", "dog"), n: int = 5, first: int = 0, mode: str = "RGB") -> dict[str, bytes]:
    """Return name -> content of n images in each class folder."""
    return {
        f"{prefix}{name}/{i}.png": png(first + 100 * c + i, mode=mode)
        for c, name in enumerate(classes)
        for i in range(n)
    }


def write_folder(root: Path, content: dict[str, bytes]) -> Path:
    for name, value in content.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value)
    return root


def write_zip(path: Path, content: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in content.items():
            archive.writestr(name, value)
    return path


def load(path: Path, **settings) -> data.Dataset:
    return image_folder.load("pets", path=str(path), **settings)


# What is read


def test_a_folder_and_a_zip_of_it_give_the_same_dataset(tmp_path):
    content = files() | {"README.txt": b"about", ".DS_Store": b"litter", "__MACOSX/cat/._1.png": b"litter"}
    folder, zipped = write_folder(tmp_path / "pets", content), write_zip(tmp_path / "pets.zip", content)
    wrapped = write_zip(tmp_path / "wrapped.zip", {f"pets/{name}": value for name, value in content.items()})
    datasets = [load(path) for path in (folder, zipped, wrapped)]
    assert len({dataset.sha256 for dataset in datasets}) == 1
    first = datasets[0]
    assert (first.class_names, first.channels, first.image_size) == (("cat", "dog"), 3, SIDE)
    assert (len(first.train_labels), len(first.test_labels)) == (8, 2)
    assert np.bincount(first.test_labels).tolist() == [1, 1]


def test_pixels_and_labels_are_those_of_the_files(tmp_path):
    content = files("train/") | files("test/", n=2, first=50)
    dataset = load(write_folder(tmp_path, content))
    found = {(image.tobytes(), label) for image, label in zip(dataset.test_images, dataset.test_labels, strict=True)}
    expected = {
        (np.asarray(picture(50 + 100 * label + i)).transpose(2, 0, 1).tobytes(), label)
        for label in (0, 1)
        for i in range(2)
    }
    assert found == expected
    np.testing.assert_allclose(dataset.mean, (dataset.train_images / 255).mean(axis=(0, 2, 3)))


def test_the_split_depends_on_the_seed_and_not_on_the_files_names(tmp_path):
    content = files(n=7)
    renamed = {re.sub(r"(\d)\.png", lambda m: f"{9 - int(m[1])}.png", name): value for name, value in content.items()}
    one, other = load(write_folder(tmp_path / "a", content)), load(write_folder(tmp_path / "b", renamed))
    assert one.sha256 == other.sha256
    assert load(tmp_path / "a", seed=1).sha256 != one.sha256
    assert len(load(tmp_path / "a", test_fraction=0.5).test_labels) == 8
    assert "20" in one.note or "0.2" in one.note


def test_images_are_scaled_cropped_and_greyed_as_asked(tmp_path):
    content = files() | {"cat/wide.png": png(7, size=(11, 5)), "dog/photo.jpg": encoded(picture(8, (9, 13)), "JPEG")}
    folder = write_folder(tmp_path, content)
    dataset = load(folder, image_size=4, channels=1)
    assert dataset.train_images.shape[1:] == (1, 4, 4)
    assert dataset.mean.shape == (1,)
    assert load(folder, image_size=4).channels == 3


@pytest.mark.parametrize("form", ["PNG", "BMP", "GIF", "TIFF", "PPM", "WEBP", "JPEG"])
def test_every_documented_format_is_read(tmp_path, form):
    # A palette of one grey ramp survives GIF; quality does not matter here.
    content = {f"{name}/{i}": encoded(picture(i), form) for name in ("cat", "dog") for i in range(2)}
    assert load(write_folder(tmp_path, content)).channels == 3


def test_a_photograph_is_turned_as_its_camera_says(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 3  # turned by 180 degrees
    turned = {f"{name}/{i}.png": encoded(picture(i).rotate(180), exif=exif) for name in ("a", "b") for i in range(2)}
    plain = {f"{name}/{i}.png": png(i) for name in ("a", "b") for i in range(2)}
    assert load(write_folder(tmp_path / "1", turned)).sha256 == load(write_folder(tmp_path / "2", plain)).sha256


def test_spaces_quotes_and_semicolons_are_names_like_others(tmp_path):
    odd = """a b'c"d;touch $(touch pwned)&"""
    folder = write_folder(tmp_path / odd, files(classes=(odd, "café")))
    assert set(load(folder).class_names) == {odd, "café"}
    assert not list(tmp_path.rglob("pwned")) + list(Path.cwd().glob("pwned"))


def test_links_to_images_and_folders_are_followed(tmp_path):
    write_folder(tmp_path / "store", files())
    (tmp_path / "pets").mkdir()
    (tmp_path / "pets/cat").symlink_to(tmp_path / "store/cat")
    (tmp_path / "pets/dog").mkdir()
    for path in (tmp_path / "store/dog").iterdir():
        (tmp_path / "pets/dog" / path.name).symlink_to(path)
    assert load(tmp_path / "pets").sha256 == load(tmp_path / "store").sha256


# What is refused: each builder writes below `root` and returns the path to load.


def _added(content: dict[str, bytes]):
    return lambda root: write_folder(root, files() | content)


def _zipped(content: dict[str, bytes]):
    return lambda root: write_zip(root / "pets.zip", files() | content)


def _folder_of(content: dict[str, bytes]):
    return lambda root: write_folder(root, content)


def _empty_class(root: Path) -> Path:
    write_folder(root, files())
    (root / "emu").mkdir()
    return root


def _link(name: str, target: str):
    def build(root: Path) -> Path:
        write_folder(root, files())
        (root / name).symlink_to(target)
        return root

    return build


def _bytes_name(name: bytes):
    def build(root: Path) -> Path:
        write_folder(root, files())
        Path(os.fsdecode(os.fsencode(root) + b"/cat/" + name)).write_bytes(png(1))
        return root

    return build


def _fifo(root: Path) -> Path:
    write_folder(root, files())
    os.mkfifo(root / "cat/pipe.png")
    return root


def _zip_link(root: Path) -> Path:
    info = zipfile.ZipInfo("cat/link.png")
    info.external_attr = 0o120777 << 16
    path = write_zip(root / "pets.zip", files())
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(info, "/etc/passwd")
    return path


def _zip_twice(root: Path) -> Path:
    path = write_zip(root / "pets.zip", files())
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("cat/1.png", png(77))
    return path


def _zip_bomb(root: Path) -> Path:
    path = root / "pets.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("cat/1.png", bytes(10**7))
    return path


def _zip_flipped(root: Path) -> Path:
    path = write_zip(root / "pets.zip", files())
    content = bytearray(path.read_bytes())
    content[content.index(b"IDAT") + 9] ^= 0xFF
    path.write_bytes(content)
    return path


def _zip_encrypted(root: Path) -> Path:
    path = write_zip(root / "pets.zip", files())
    content = bytearray(path.read_bytes())
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(signature) + flags] |= 1
    path.write_bytes(content)
    return path


def _zip_truncated(root: Path) -> Path:
    path = write_zip(root / "pets.zip", files())
    path.write_bytes(path.read_bytes()[:-40])
    return path


def _zip_not_utf8(root: Path) -> Path:
    path = write_zip(root / "pets.zip", files() | {"cat/é.png": png(3)})
    path.write_bytes(path.read_bytes().replace("é".encode(), b"\xff\xfe"))
    return path


def _png_of_huge_size() -> bytes:
    """A picture whose header promises 60,000 x 60,000 pixels."""
    import zlib

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0")) + chunk(b"IEND", b"")


def _animation() -> bytes:
    return encoded(picture(1), "GIF", save_all=True, append_images=[picture(2), picture(3)])


def _transparent() -> bytes:
    image = picture(1).convert("RGBA")
    image.putalpha(100)
    return encoded(image)


def _sixteen_bit() -> bytes:
    return encoded(Image.fromarray(np.arange(SIDE**2, dtype=np.uint16).reshape(SIDE, SIDE) * 1000))


REFUSED = {
    "no such path": (lambda root: root / "nowhere", {}, r"nowhere does not exist; give a directory"),
    "neither folder nor zip": (
        lambda root: write_folder(root, {"a.tar": b"x"}) / "a.tar",
        {},
        r"neither .* nor .* zip",
    ),
    "empty folder": (lambda root: root, {}, r"has 0 class folders \(none\); at least two"),
    "one class": (_folder_of(files(classes=("cat",))), {}, r"has 1 class folders \(cat\); at least two"),
    "empty class": (_empty_class, {}, r"class emu is empty"),
    "one image in a class": (_added({"emu/1.png": png(1)}), {}, r"class emu has one image; two are needed"),
    "image outside the classes": (_added({"7.PNG": png(1)}), {}, r"7\.PNG lies outside the class folders"),
    "folder in a class": (_added({"cat/old/1.png": png(1)}), {}, r"cat/old lies deeper than class folder/image"),
    "classes differing by case": (_added(files(classes=("Cat",))), {}, r"classes 'Cat' and 'cat' differ in spelling"),
    "classes differing by accents' form": (
        _folder_of(files(classes=("caf\u00e9", "cafe\u0301"))),
        {},
        r"differ in spelling alone",
    ),
    "train without test": (_folder_of(files("train/")), {}, r"holds train; it must be train and test"),
    "train and test and more": (
        _folder_of(files("train/") | files("test/") | files("extra/")),
        {},
        r"holds extra, test, train; it must be train and test",
    ),
    "class missing from test": (
        _folder_of(files("train/", classes=("cat", "dog", "emu")) | files("test/")),
        {},
        r"emu only in one of train and test",
    ),
    "text among the images": (_added({"cat/notes.txt": b"hello"}), {}, r"cat/notes\.txt is not an intact image"),
    "text named as an image": (_added({"cat/x.png": b"hello"}), {}, r"cat/x\.png is not an intact image"),
    "empty file": (_added({"cat/x.png": b""}), {}, r"cat/x\.png is not an intact image"),
    "truncated image": (_added({"cat/x.png": png(1)[:80]}), {}, r"cat/x\.png is not an intact image"),
    "PostScript, which would be executed": (
        _added({"cat/x.eps": b"%!PS-Adobe-3.0 EPSF"}),
        {},
        r"x\.eps is not an intact",
    ),
    "image with a huge header": (_added({"cat/x.png": _png_of_huge_size()}), {}, r"cat/x\.png.*(pixels|decompression)"),
    "grey where colour is expected": (
        _added({"cat/x.png": png(1, mode="L")}),
        {"channels": 3},
        r"cat/x\.png is grey where colour is expected; set channels: 1",
    ),
    "grey and colour mixed": (_added({"dog/x.png": png(1, mode="L")}), {}, r"dog/x\.png and .* grey and colour, mixed"),
    "sixteen bits": (_added({"cat/x.png": _sixteen_bit()}), {}, r"cat/x\.png has mode I;16; 8-bit"),
    "transparent": (_added({"cat/x.png": _transparent()}), {}, r"cat/x\.png is partly transparent"),
    "animated": (_added({"cat/x.gif": _animation()}), {}, r"cat/x\.gif has 3 frames"),
    "oblong": (_added({"cat/x.png": png(1, size=(7, 6))}), {}, r"cat/x\.png is 7 x 6, not square; set image_size"),
    "two sizes": (_added({"cat/x.png": png(1, size=(9, 9))}), {}, r"cat/x\.png has side 9, .* has 6; set image_size"),
    "training and test images of two sizes": (
        _folder_of(files("train/") | {f"test/{name}/x.png": png(1, size=(9, 9)) for name in ("cat", "dog")}),
        {},
        r"test/cat/x\.png has side 9, .* has 6",
    ),
    "link to itself": (_link("cat/loop.png", "loop.png"), {}, r"loop\.png cannot be read: Too many levels"),
    "link to the folder above": (_link("cat/loop", ".."), {}, r"cat/loop is a link that leads back"),
    "link to nowhere": (_link("cat/gone.png", "/nowhere/x.png"), {}, r"gone\.png cannot be read: No such file"),
    "link to the whole file system": (_link("cat/all", "/proc/self/fd"), {}, r"cat/all"),
    "pipe": (_fifo, {}, r"cat/pipe\.png is neither a file nor a folder"),
    "name not UTF-8": (_bytes_name(b"x\xff.png"), {}, r"cat holds a name that is not UTF-8, b'x\\xff\.png'; rename"),
    "zip climbing out": (_zipped({"../../etc/x.png": png(1)}), {}, r"\.\./\.\./etc/x\.png points outside the zip"),
    "zip climbing out halfway": (_zipped({"cat/../../x.png": png(1)}), {}, r"cat/\.\./\.\./x\.png points outside"),
    "zip with an absolute name": (_zipped({"/cat/x.png": png(1)}), {}, r"/cat/x\.png points outside the zip"),
    "zip with a drive": (_zipped({"C:/cat/x.png": png(1)}), {}, r"C:/cat/x\.png points outside the zip"),
    "zip with backslashes": (_zipped({"..\\x.png": png(1)}), {}, r"x\.png points outside the zip"),
    "zip with a link": (_zip_link, {}, r"cat/link\.png is a link; put the file itself"),
    "zip with a name twice": (_zip_twice, {}, r"cat/1\.png occurs twice in the zip"),
    "zip bomb": (_zip_bomb, {}, r"cat/1\.png expands from \d+ to 10000000 bytes: a zip bomb"),
    "zip with a flipped byte": (_zip_flipped, {}, r"pets\.zip: cat/0\.png cannot be read: Bad CRC-32"),
    "zip with a password": (_zip_encrypted, {}, r"cat/0\.png is encrypted"),
    "zip truncated": (_zip_truncated, {}, r"pets\.zip is neither a directory nor a readable zip file"),
    "zip with names that are not UTF-8": (_zip_not_utf8, {}, r"pets\.zip is neither .* readable zip file"),
    "zip of one class": (
        lambda root: write_zip(root / "one.zip", files(classes=("cat",))),
        {},
        r"has 1 class folders \(cat\); at least two",
    ),
    "two channels": (_added({}), {"channels": 2}, r"channels must be 1 \(grey\) or 3 \(colour\), got 2"),
    "everything for testing": (_added({}), {"test_fraction": 1.0}, r"test_fraction must lie between 0 and 1, got 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_malformed_input_is_refused_in_words(tmp_path, case):
    build, settings, message = REFUSED[case]
    with pytest.raises(ImageFolderError, match=message) as caught:
        load(build(tmp_path), **settings)
    str(caught.value).encode("utf-8")  # a log can hold it


@pytest.mark.parametrize("size", [-3, 0, 10**6])
def test_impossible_sizes_are_refused_before_memory_is_taken(tmp_path, size):
    with pytest.raises(ValueError, match=r"GiB, the limit is|at least 1"):
        load(write_folder(tmp_path, files()), image_size=size)


def test_a_blank_path_is_not_the_current_folder():
    with pytest.raises(ValueError, match="pets: path is blank"):
        image_folder.load("pets", path=" ")


def test_files_beyond_the_limits_are_refused_by_their_size_alone(tmp_path, monkeypatch):
    folder = write_folder(tmp_path, files())
    monkeypatch.setattr(image_folder, "MAX_FILE_BYTES", 50)
    with pytest.raises(ImageFolderError, match=r"0\.png has \d+ bytes, more than the 50 allowed"):
        load(folder)
    monkeypatch.setattr(image_folder, "MAX_TOTAL_BYTES", 500)
    with pytest.raises(ImageFolderError, match=r"\d+ bytes of files, more than the 500 allowed"):
        load(folder)


def test_nothing_is_unpacked(tmp_path, monkeypatch):
    path = write_zip(tmp_path / "pets.zip", files())
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    load(path)
    assert sorted(tmp_path.rglob("*")) == before


def test_unreadable_files_and_folders_are_named(public_path, as_nobody):
    root = write_folder(public_path / "pets", files())
    (root / "cat/3.png").chmod(0)
    with pytest.raises(ImageFolderError, match=r"cat/3\.png cannot be read: Permission denied"):
        as_nobody(lambda: load(root))
    shutil.rmtree(root)
    write_folder(root, files())
    (root / "dog").chmod(0)
    with pytest.raises(ImageFolderError, match=r"dog cannot be read: Permission denied"):
        as_nobody(lambda: load(root))
    zipped = write_zip(public_path / "pets.zip", files())
    zipped.chmod(0)
    with pytest.raises(ImageFolderError, match=r"pets\.zip is neither .*Permission denied"):
        as_nobody(lambda: load(zipped))
