"""README's gallery: the figures it shows, narrow and in few colours, from a finished run. `make paper` runs it."""

import argparse
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from curvature_gap.files import atomic_path

WIDTH = 700
"""Pixels; a page on the web shows three side by side."""
COLOURS = 256


def shown_in(readme: Path) -> list[str]:
    """Return the names of the gallery's figures that a README shows, in order."""
    return list(dict.fromkeys(re.findall(r"\(paper/gallery/(\w+)\.png\)", readme.read_text(encoding="utf-8"))))


def thumbnail(figure: Path) -> bytes:
    """Return a figure as a PNG `WIDTH` pixels wide with a palette.

    Raises:
        FileNotFoundError: If the run has not drawn it.
    """
    from PIL import Image

    if not figure.is_file():
        raise FileNotFoundError(f"{figure} does not exist; finish the run with `snakemake --cores all` first.")
    with Image.open(figure) as image:
        white = Image.new("RGB", image.size, "white")
        white.paste(image, mask=image.getchannel("A") if "A" in image.getbands() else None)
    size = (WIDTH, round(white.height * WIDTH / white.width))
    file = io.BytesIO()
    small = white.resize(size, Image.Resampling.LANCZOS)
    small.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE).save(file, "PNG", optimize=True)
    return file.getvalue()


def write_gallery(figures: Path, readme: Path, gallery: Path) -> None:
    """Write the thumbnail of every figure that the README shows."""
    thumbnails = {name: thumbnail(figures / f"{name}.png") for name in shown_in(readme)}
    for name, content in thumbnails.items():
        with atomic_path(gallery / f"{name}.png") as temporary:
            temporary.write_bytes(content)


def main(arguments: Sequence[str] | None = None) -> int:
    """Renew paper/gallery from a folder of figures."""
    parser = argparse.ArgumentParser(prog="python -m curvature_gap.gallery", description=__doc__.splitlines()[0])
    parser.add_argument("figures", type=Path, help="folder of a finished run, for example results/laptop/figures")
    try:
        write_gallery(parser.parse_args(arguments).figures, Path("README.md"), Path("paper/gallery"))
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
