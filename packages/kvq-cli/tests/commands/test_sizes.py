import pytest

from kvq_cli.commands.sizes import SizeError, parse_tokens


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
