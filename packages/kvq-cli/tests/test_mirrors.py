"""A codec has one name throughout the house: its source, its tests and its page carry it."""

from pathlib import Path

import pytest

import kvq_codecs
from kvq_attention import claims

ROOT = Path(__file__).parents[3]
CODECS = ROOT / "packages" / "kvq-codecs"
ATTENTION = ROOT / "packages" / "kvq-attention" / "src" / "kvq_attention"
PLACES = {
    "source": (CODECS / "src" / "kvq_codecs" / "formats", "{}.py"),
    "tests": (CODECS / "tests" / "formats", "test_{}.py"),
    "triton": (ATTENTION / "triton" / "formats", "{}.py"),
    "cuda": (ATTENTION / "cuda" / "source" / "formats", "{}.cuh"),
    "page": (ROOT / "docs" / "reference" / "formats", "{}.md"),
}
EXCUSED = {"triton": claims.WITHOUT_TRITON, "cuda": claims.WITHOUT_CUDA}
NOT_CODECS = {"__init__", "index", "bits", "constants", "e4m3", "operands", "table"}

pytestmark = pytest.mark.skipif(
    not (ROOT / "noxfile.py").is_file(), reason="the mirrors are in the repository, not in an sdist"
)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("codec", kvq_codecs.names())
def test_a_codec_has_its_file_or_an_excuse(codec: str, place: str) -> None:
    folder, pattern = PLACES[place]
    excused = codec in EXCUSED.get(place, ())
    assert (folder / pattern.format(codec)).is_file() != excused


@pytest.mark.parametrize("place", PLACES)
def test_no_file_is_left_of_a_codec_that_is_gone(place: str) -> None:
    folder, pattern = PLACES[place]
    before, _, after = pattern.partition("{}")
    found = {
        f.name.removeprefix(before).removesuffix(after) for f in folder.glob(pattern.format("*"))
    }
    assert found - NOT_CODECS <= set(kvq_codecs.names())
