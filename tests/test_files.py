import os
import stat

import pytest

from curvature_gap.files import atomic_path


def test_the_file_appears_whole(tmp_path):
    target = tmp_path / "new folder" / "table.csv"
    with atomic_path(target) as temporary:
        temporary.write_text("a")
        assert not target.exists()
        assert temporary.suffix == ".csv"
    assert target.read_text() == "a"


def test_a_failure_keeps_the_old_file_and_leaves_nothing_else(tmp_path):
    target = tmp_path / "table.csv"
    target.write_text("old")

    def fail():
        with atomic_path(target) as temporary:
            temporary.write_text("half")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["table.csv"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_umask_is_honoured(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        with atomic_path(tmp_path / "x.txt") as temporary:
            temporary.write_text("a")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x.txt").stat().st_mode) == mode
