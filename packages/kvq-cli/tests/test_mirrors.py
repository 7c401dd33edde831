"""A codec has one name throughout the house: its source, its tests and its page carry it."""

from pathlib import Path

import pytest

import kvq_codecs

ROOT = Path(__file__).parents[3]
CODECS = ROOT / "packages" / "kvq-codecs"
PLACES = {
    "source": (CODECS / "src" / "kvq_codecs" / "formats", "{}.py"),
    "tests": (CODECS / "tests" / "formats", "test_{}.py"),
    "page": (ROOT / "docs" / "reference" / "formats", "{}.md"),
}
NOT_CODECS = {"__init__", "index"}

pytestmark = pytest.mark.skipif(
    not (ROOT / "noxfile.py").is_file(), reason="the mirrors are in the repository, not in an sdist"
)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("codec", kvq_codecs.names())
def test_a_codec_has_its_file(codec: str, place: str) -> None:
    folder, pattern = PLACES[place]
    assert (folder / pattern.format(codec)).is_file()


@pytest.mark.parametrize("place", PLACES)
def test_no_file_is_left_of_a_codec_that_is_gone(place: str) -> None:
    folder, pattern = PLACES[place]
    before, _, after = pattern.partition("{}")
    found = {
        f.name.removeprefix(before).removesuffix(after) for f in folder.glob(pattern.format("*"))
    }
    assert found - NOT_CODECS <= set(kvq_codecs.names())
