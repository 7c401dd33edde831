import pytest

from kvq_cli.commands.sizes import SizeError, parse_bytes, parse_lengths, parse_tokens


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("1", 1),
        ("65536", 65_536),
        ("65_536", 65_536),
        ("200k", 200_000),
        ("200K", 200_000),
        (" 64ki ", 65_536),
        ("1.5m", 1_500_000),
        ("0.5Mi", 524_288),
        ("2g", 2_000_000_000),
        ("1gi", 2**30),
        ("1.024k", 1024),
    ],
)
def test_sizes_are_read(text, tokens):
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize(
    "text", ["", "k", "0", "0.0k", "-1", "1e6", "200 k", "200kb", "1.0001k", "1.", ".5k", "٣", "½"]
)
def test_what_is_no_whole_number_of_tokens_is_refused(text):
    with pytest.raises(SizeError, match="1,024"):
        parse_tokens(text)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GiB", 8 * 2**30),
        ("8gib", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("1.5MiB", 3 * 2**19),
        ("500kB", 500_000),
        ("16KiB", 2**14),
        ("2TiB", 2**41),
        ("2tb", 2 * 10**12),
        ("12345", 12_345),
        ("12_345b", 12_345),
    ],
)
def test_numbers_of_bytes_are_read(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "0GiB", "-1GB", "8G", "8 GiB x", "8PiB", "1.5", "1e9"])
def test_what_is_no_number_of_bytes_is_refused(text):
    with pytest.raises(SizeError, match=r"MiB|above 0"):
        parse_bytes(text)


def test_lengths_come_sorted_and_once():
    assert parse_lengths("32ki,8k, 8000") == (8_000, 32_768)
    with pytest.raises(SizeError, match="''"):
        parse_lengths("8k,")
