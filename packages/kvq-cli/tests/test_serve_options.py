"""Options that contradict each other or mean nothing are refused, with what would do."""

from __future__ import annotations

import pytest

from kvq_cli.config import ConfigError
from kvq_cli.serve_options import ISO, ServeOptions, cache_format
from kvq_codecs import names


@pytest.mark.parametrize("iso", ISO)
def test_a_rotated_codec_by_either_option(iso):
    assert iso in names()
    assert cache_format("auto", iso) == cache_format(iso, iso) == cache_format(iso, None) == iso


def test_every_rotated_codec_has_the_short_name():
    assert set(ISO) == {name for name in names() if name.startswith("iso")}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (
            ("q8_0", "iso3"),
            "kv_cache_dtype 'q8_0' and kv_cache_iso iso3 name two formats; give one",
        ),
        (("auto", "q4_0"), "kv_cache_iso must be iso3 or iso4, got 'q4_0'; kv_cache_dtype takes"),
    ],
)
def test_what_the_rotated_option_does_not_take(given, complaint):
    with pytest.raises(ConfigError, match=complaint):
        cache_format(*given)


def test_a_size_by_tokens_or_by_pages():
    assert ServeOptions("m", num_tokens=4096).size_tokens == 4096
    assert ServeOptions("m", num_pages=256).size_tokens == 4096
    assert ServeOptions("m", num_pages=3, page_tokens=64).size_tokens == 192
    assert ServeOptions("m").size_tokens is None


def test_as_many_decodes_are_replayed_as_may_run_where_there_can_be_graphs():
    many, few = ServeOptions("m", max_running_requests=200), ServeOptions("m")
    assert many.graph_rows(on_host=False) == 64
    assert few.graph_rows(on_host=False) == few.max_running_requests == 16
    assert many.graph_rows(on_host=True) == 0
    asked = ServeOptions("m", cuda_graph_max_bs=100, max_running_requests=80)
    assert asked.graph_rows(on_host=False) == 80
    assert ServeOptions("m", cuda_graph_max_bs=0).graph_rows(on_host=False) == 0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"num_tokens": 4096, "num_pages": 256}, "both size the cache; give one of them"),
        ({"num_pages": 0}, "num_pages must be at least 1, got 0"),
        ({"num_tokens": 100}, r"multiple of page_tokens \(16\), got 100; take 96 or 112"),
        ({"num_tokens": 5}, r"multiple of page_tokens \(16\), got 5; take 16$"),
    ],
)
def test_sizes_that_are_refused(options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        ServeOptions("m", **options)
