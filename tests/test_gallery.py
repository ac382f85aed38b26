"""README's gallery is small, complete, and made by one command."""

from pathlib import Path

import pytest
from PIL import Image

from curvature_gap.gallery import WIDTH, main, shown_in, thumbnail, write_gallery

ROOT = Path(__file__).parents[1]
LARGEST = 400_000


def test_the_committed_gallery_is_what_readme_shows_and_small():
    names = shown_in(ROOT / "README.md")
    files = sorted((ROOT / "paper" / "gallery").glob("*"))
    assert sorted(f"{name}.png" for name in names) == [file.name for file in files]
    for file in files:
        assert file.stat().st_size < LARGEST, file.name
        with Image.open(file) as image:
            assert image.width == WIDTH, file.name


def test_transparent_is_white_and_the_shape_stays(tmp_path):
    figure = tmp_path / "fig.png"
    Image.new("RGBA", (1400, 300), (255, 0, 0, 0)).save(figure)
    (tmp_path / "small.png").write_bytes(thumbnail(figure))
    with Image.open(tmp_path / "small.png") as image:
        assert image.size == (WIDTH, 150)
        assert image.convert("RGB").getpixel((3, 5)) == (255, 255, 255)
    assert thumbnail(figure) == thumbnail(figure)


def test_a_missing_figure_is_named_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    readme, gallery = tmp_path / "README.md", tmp_path / "gallery"
    readme.write_text("![a](paper/gallery/fig03.png) ![b](paper/gallery/fig04.png) ![a](paper/gallery/fig03.png)")
    assert shown_in(readme) == ["fig03", "fig04"]
    gallery.mkdir()
    Image.new("RGB", (20, 30)).save(tmp_path / "fig03.png")
    with pytest.raises(FileNotFoundError, match=r"fig04\.png does not exist; finish the run"):
        write_gallery(tmp_path, readme, gallery)
    assert not list(gallery.iterdir())
    monkeypatch.chdir(tmp_path)
    assert main([str(tmp_path)]) == 2
    assert "fig04.png" in capsys.readouterr().err
