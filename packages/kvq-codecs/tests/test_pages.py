"""The generated reference pages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import kvq_codecs
from kvq_codecs.pages import page, pages


def test_every_format_has_a_page_and_the_index_links_it() -> None:
    texts = pages()
    assert set(texts) == {"index.md", *(f"{name}.md" for name in kvq_codecs.names())}
    links = set(re.findall(r"\]\((\w+\.md)\)", texts["index.md"]))
    assert links == set(texts) - {"index.md"}


def test_pages_are_the_same_each_time() -> None:
    assert pages() == pages()


def test_every_page_says_bits_bias_specials_layout_and_what_is_forbidden() -> None:
    for name, text in pages().items():
        if name != "index.md":
            for line in ("- Bits: ", "- Bias: ", "- Specials: ", "- Layout: ", "Forbidden: "):
                assert text.count(f"\n{line}") == 1, f"{name}: {line}"
            for section in ("Planes", "Sizes", "Interchange bytes", "Measured error"):
                assert f"\n## {section}\n" in text, f"{name}: {section}"


def test_code_values_and_interchange_fields_are_listed() -> None:
    assert "| `0x08` | -0 | -0.5 | -1 | -1.5 | -2 | -3 | -4 | -6 |" in page("nvfp4")
    assert re.search(r"`0x78` .* 448 \| +NaN \|", page("fp8"))
    assert "-0.190685004" in page("iso3")
    assert "| 2 … 3  | dead" in page("iso4")
    assert "D / 32 blocks of 34 bytes" in page("q8_0")


def test_they_can_be_written(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "kvq_codecs.pages", str(tmp_path / "new")], check=True)
    written = {p.name: p.read_text(encoding="utf-8") for p in (tmp_path / "new").iterdir()}
    assert written == pages()
