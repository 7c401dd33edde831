import os
import stat
from pathlib import Path

import pytest

from kvq_attention.bench import check_writable
from kvq_attention.bench.files import write
from kvq_attention.errors import AttentionError


def test_trying_a_file_changes_nothing(tmp_path):
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_text("kept")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "later")
    for path in (new, old, link):
        check_writable("--json", path)
    assert old.read_text() == "kept"
    assert sorted(os.listdir(tmp_path)) == ["link", "old"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no/such/folder.json", "No such file or directory"),
        ("", "Is a directory"),
        ("file/below.json", "Not a directory"),
        (300 * "x", "File name too long"),
        ("round", "Too many levels of symbolic links"),
    ],
)
def test_a_file_that_cannot_be_written_is_named_with_its_option_and_the_reason(
    tmp_path, name, reason
):
    (tmp_path / "file").touch()
    (tmp_path / "round").symlink_to("round")
    path = tmp_path / name
    with pytest.raises(AttentionError, match=reason) as refused:
        check_writable("--plot", path)
    assert str(refused.value) == f"--plot cannot be written to {str(path)!r}: {reason}"
    with pytest.raises(AttentionError, match=f"^--json cannot be written .*: {reason}$"):
        write("--json", path, "")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_named(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(AttentionError, match="Permission denied"):
        check_writable("--json", tmp_path / "x.json")


def test_no_name_is_said_to_be_none():
    with pytest.raises(AttentionError, match=r"--json .*the name is empty or a directory"):
        check_writable("--json", Path(""))


def test_a_pipe_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    check_writable("--json", tmp_path / "pipe")  # an open would wait for a reader
