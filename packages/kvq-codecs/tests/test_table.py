"""The table of formats."""

from __future__ import annotations

import subprocess
import sys
import time

import kvq_codecs
from kvq_codecs.table import block, render, rows

from . import invented


def test_rows_say_what_a_codec_costs() -> None:
    by_name = {row.name: row for row in rows()}
    assert tuple(by_name) == kvq_codecs.names()
    assert by_name["nvfp4"].row_bytes == (40, 76, 148)
    assert by_name["nvfp4"].bits_per_value == 4.75
    assert by_name["iso3"].row_bytes == (None, 50, 100)
    assert by_name["q4_0"].error.mean_error < -10 * by_name["q4_0"].error.mean_noise


def test_blocks_in_words() -> None:
    words = {name: block(kvq_codecs.get(name).spec) for name in kvq_codecs.names()}
    assert words == {
        **dict.fromkeys(("fp32", "bf16", "fp16"), "-"),
        **dict.fromkeys(("q8_0", "q6_0", "q4_0", "fp8_e4m3"), "32"),
        "fp8": "row",
        "nvfp4": "16, row",
        **dict.fromkeys(("iso3", "iso4"), "128"),
    }
    assert block(invented.SPEC) == "32"


def test_a_new_codec_has_a_row() -> None:
    kvq_codecs.register(invented.CODEC)
    try:
        assert "| invented_5 |            5.5 |" in render(rows())
    finally:
        kvq_codecs.unregister("invented_5")


def test_python_m_kvq_codecs_prints_it_without_torch_in_two_seconds() -> None:
    program = (
        "import runpy, sys; runpy.run_module('kvq_codecs', run_name='__main__');"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == render(rows())
    start = time.process_time()
    rows()
    assert time.process_time() - start < 2
