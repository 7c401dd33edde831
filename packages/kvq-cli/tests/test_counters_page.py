"""tools/attention_counters.py reads what ncu prints; the figures here are invented."""

import importlib.util
import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from kvq_attention.bench.cases import Shape
from kvq_cli.plots import bar_chart, has_figures

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(
    not (ROOT / "noxfile.py").is_file(), reason="tools are in the repository, not in an sdist"
)

DETAILS = """[12] python3@127.0.0.1
  decode (2112, 1, 1)x(32, 1, 1), Context 1, Stream 7, Device 0, CC 9.0
    Warning: Data collection happened without fixed GPU frequencies.
    Section: GPU Speed Of Light Throughput
    ----------------------- ----------- ------------
    Metric Name             Metric Unit Metric Value
    ----------------------- ----------- ------------
    Elapsed Cycles                cycle      123,456
    SM Frequency                    Mhz     1,500.00
    DRAM Throughput                   %        81.50
    Duration                         us        90.04
    ----------------------- ----------- ------------

    Section: Compute Workload Analysis
    -------------------- ----------- ------------
    Executed Ipc Active   inst/cycle         2.64
    Issue Slots Busy               %        55.25
    -------------------- ----------- ------------

    INF   ALU is the highest-utilized
          pipeline (40.5%) based on elapsed cycles in the workload, taking into account the
          rates of its different instructions.

    Section: Instruction Statistics
    ---------------------------------------- ----------- ------------
    Executed Instructions                           inst    3,000,128
    ---------------------------------------- ----------- ------------

    Section: Launch Statistics
    -------------------------------- --------------- ---------------
    Cluster Scheduling Policy                           PolicySpread
    Registers Per Thread             register/thread             120
    # SMs                                         SM             132
    -------------------------------- --------------- ---------------

    Section: Occupancy
    ------------------------------- ----------- ------------
    Block Limit Registers                 block           16
    Block Limit Shared Mem                block           14
    Block Limit Warps                     block           64
    ------------------------------- ----------- ------------

  merge (256, 1, 1)x(256, 1, 1), Context 1, Stream 7, Device 0, CC 9.0
    Section: GPU Speed Of Light Throughput
    DRAM Throughput                   %        10.00
    Duration                         ms         0.01
"""
SOURCE = """"Kernel Name","decode",
"Address","Source","# Samples","stall_math","stall_selected","stall_wait","stall_wait (Not Issued)"
"0x10","      LDC R1, c[0x0][0x28]","100","30","40","30","9"
"0x20","      HMMA.16816.F32 R4, R8, R12, R4","100","0","60","30","9"
"Kernel Name","merge",
"Address","Source","# Samples","stall_math","stall_selected","stall_wait","stall_wait (Not Issued)"
"0x10","      LDC R1, c[0x0][0x28]","900","900","0","0","0"
"""
LIKE = {
    "hardware": "GPU 9, 100 multiprocessors",
    "versions": {"torch": "2.11"},
    "ceilings": {"read_gb_per_s": 3000.0},
}


LAYER = Shape(32, 8, 128)


@pytest.fixture(scope="module")
def tool():
    """tools/attention_counters.py as a module."""
    path = ROOT / "tools" / "attention_counters.py"
    spec = importlib.util.spec_from_file_location("attention_counters", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def told(tool, details, source=None):
    return tool.row("q4_0", details, source, tiles=10_000, shape=LAYER, like=LIKE)


def test_a_row_holds_what_was_counted_of_decode(tool):
    assert told(tool, DETAILS, SOURCE) == {
        "codec": "q4_0",
        "kernel_us": 90.04,
        "dram_percent": 81.5,
        "issue_slots_percent": 55.25,
        "busiest_pipe": "ALU 40.5%",
        "bytes_a_tile": 16 * 2 * 72,
        "instructions_a_tile": 300,
        # 2,304 bytes take 0.768 ns, in which 400 schedulers issue 1.5 a nanosecond
        "while_memory_reads": 461,
        "registers": 120,
        "blocks_an_sm": 14,
        "top_stalls": "wait 67%, math 33%",
        "merge_us": 10.0,
    }


def test_without_a_source_page_or_a_merge_there_is_less(tool):
    alone = DETAILS.partition("  merge (")[0]
    row = told(tool, alone)
    assert row["top_stalls"] == "" and "merge_us" not in row


@pytest.mark.parametrize(
    ("details", "said"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM\n", "no kernel of the name decode"),
        (DETAILS.replace("Issue Slots Busy", "Else"), "no 'Issue Slots Busy' under 'Compute Work"),
        (DETAILS.replace("  decode (", "  other ("), "no kernel of the name decode"),
    ],
)
def test_what_is_missing_is_named(tool, details, said):
    with pytest.raises(SystemExit, match=said):
        told(tool, details)


def test_the_record_is_drawn_and_names_machine_versions_and_command(
    tool, tmp_path, monkeypatch, capsys
):
    for name, text in (("d.txt", DETAILS), ("s.csv", SOURCE), ("like.json", json.dumps(LIKE))):
        (tmp_path / name).write_text(text)
    pages = f"{tmp_path}/d.txt,{tmp_path}/s.csv"
    options = ("--like", f"{tmp_path}/like.json", "--ncu", "2025.3", "--case", "1x4k")
    given = ["counters", *options, f"q4_0={pages}", f"k=fp8,v=q8_0={tmp_path}/d.txt"]
    monkeypatch.setattr(sys, "argv", given)
    tool.main()
    record = json.loads(capsys.readouterr().out)
    assert record["kind"] == "attention-counters"
    assert record["title"] == "Counters of CUDA decode on GPU 9, 1x4k, 32/8x128"
    assert record["versions"] == {"torch": "2.11", "ncu": "2025.3"}
    assert "--case 1x4k --shape 32/8x128" in record["command"]
    assert [row["codec"] for row in record["rows"]] == ["q4_0", "k=fp8,v=q8_0"]
    tiles = 4096 / 16 * 8
    assert record["rows"][0]["instructions_a_tile"] == round(3_000_128 / tiles)
    assert has_figures(record)
    assert ET.fromstring(bar_chart(record)).tag.endswith("svg")
    assert "81.5" in bar_chart(record) and "55.25" in bar_chart(record)
