"""tools/attention_counters.py reads what ncu prints; the figures here are invented."""

import importlib
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
    Block Limit SM                        block           32
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
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        yield importlib.import_module("attention_counters")
    for name in ("attention_counters", "ncu_pages"):
        del sys.modules[name]


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


@pytest.fixture
def command(tool, tmp_path, monkeypatch, capsys):
    """Runs the tool on files of these texts; what it ends with and says."""

    def run(pages, *options, **texts):
        for name, text in texts.items():
            raw = text if isinstance(text, bytes) else text.encode()
            (tmp_path / name).write_bytes(raw)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["counters", "--ncu", "2025.3", *options, *pages])
        code = tool.main()
        return code, *capsys.readouterr()

    return run


GOOD = {"details": DETAILS, "source": SOURCE, "like": json.dumps(LIKE)}
GIVEN = ("q4_0=details,source",)
DURATION = "    Duration                         us        90.04\n"
DECODE = DETAILS[DETAILS.index("  decode (") :].partition("  merge (")[0]
OTHER = "  void at::copy<float>(float *) (8, 1, 1)x(128, 1, 1), Context 1, Stream 7"
CUT = SOURCE.rpartition('"0x20","      HMMA')[0]


def wrong(details=DETAILS, **others):
    return {**GOOD, "details": details, **others}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            wrong("==ERROR== ERR_NVGPUCTRPERM\n"),
            "no kernel of the name decode; give what `ncu --im",
        ),
        (
            wrong(SOURCE),
            "no kernel of the name decode; give what `ncu --import REPORT --page details",
        ),
        (wrong(""), "'details' is empty; give all that was printed"),
        (wrong(b"NVR\0\xff\xfe"), "'details' is no text; give what ncu printed of its report"),
        (wrong(DETAILS[: DETAILS.index(",000,128")]), "'details' is cut off in its last line"),
        (
            wrong(DECODE[: DECODE.index("    Block Limit Shared")]),
            "no 'Block Limit Shared Mem' und",
        ),
        (
            wrong(DETAILS.replace("Issue Slots Busy", "Else")),
            "no 'Issue Slots Busy' under 'Compute",
        ),
        (wrong(DETAILS.replace("  decode (", "  other (")), "no kernel of the name decode"),
        (
            wrong(DETAILS.replace("    Block Limit Warps", "    Else")),
            "no 'Block Limit Warps' under",
        ),
        (
            wrong(DETAILS.replace(DURATION, 2 * DURATION)),
            "have 'Duration' under 'GPU Speed Of Light",
        ),
        (
            wrong(DETAILS.replace(DURATION, DURATION + DURATION.replace("90.04", "91.5"))),
            "several times (90.04 us; 91.5 us); profile one call",
        ),
        (wrong(f"{DETAILS}{DECODE}"), "have the kernel decode several times; profile one call"),
        (
            wrong(DETAILS.replace("90.04", "n/a")),
            "have 'n/a' as 'Duration' under 'GPU Speed Of Lig",
        ),
        (
            wrong(DETAILS.replace("81.50", "nan")),
            "have 'nan' as 'DRAM Throughput' under 'GPU Speed",
        ),
        (
            wrong(DETAILS.replace(" us ", " min ")),
            "'Duration' in 'min'; units may be ns, us, ms, s",
        ),
        (wrong(source=DETAILS), "source page has the kernel decode not; profile one call"),
        (wrong(source=SOURCE.replace("decode", "other")), "source page has the kernel decode not"),
        (wrong(source=2 * SOURCE), "source page has the kernel decode several times"),
        (
            wrong(source=SOURCE.replace("stall_", "else_")),
            "has no samples of decode's stalls; give",
        ),
        (wrong(source=f'{CUT}"0x20","HMMA","10"\n'), "line 4 of ncu's source page has no count in"),
        (
            wrong(source=SOURCE.replace('"40"', '"many"')),
            "line 3 of ncu's source page has no count",
        ),
        (wrong(like="{"), "--like 'like' is no JSON (Expecting"),
        (
            wrong(like="[]"),
            "--like 'like' lacks hardware, versions or ceilings.read_gb_per_s; give",
        ),
        (wrong(like=json.dumps({**LIKE, "ceilings": {}})), "lacks hardware, versions or ceilings"),
        (
            wrong(like=json.dumps({**LIKE, "ceilings": {"read_gb_per_s": 0}})),
            "lacks hardware, versions or ceilings",
        ),
        (
            wrong(like=json.dumps({**LIKE, "hardware": "CPU"})),
            "names no multiprocessors: 'CPU'; gi",
        ),
    ],
)
def test_pages_that_are_foreign_or_cut_off_are_refused(command, files, said):
    assert command(GIVEN, "--like", "like", **GOOD)[0] == 0
    refused(command(GIVEN, "--like", "like", **files), said)


@pytest.mark.parametrize(
    ("pages", "options", "said"),
    [
        (["q5_0=details"], (), "'q5_0=details': unknown codec 'q5_0'"),
        (["details"], (), "'details' must be FORMAT=DETAILS or FORMAT=DETAILS,SOURCE.csv"),
        (["q4_0=details,source,source"], (), "must be FORMAT=DETAILS or FORMAT=DETAILS,SOURCE.csv"),
        (["q4_0,q8_0=details"], (), "'q4_0,q8_0=details': a format has one page"),
        (["q4_0=details", "q4_0=details"], (), "'q4_0=details': a format has one page; give each"),
        (["q4_0=none"], (), "'none' cannot be read: No such file"),
        (["q4_0="], (), "'.' cannot be read: Is a directory"),
        (GIVEN, ("--like", "none"), "--like 'none' cannot be read: No such file"),
        (GIVEN, ("--case", "8x32k,1x4k"), "--case '8x32k,1x4k' names 2; give the one that was"),
        (GIVEN, ("--case", "much"), "case 'much' must be BATCHxCONTEXT"),
        (GIVEN, ("--shape", "32x8"), "shape '32x8' must be HEADS/KV_HEADSxHEAD_DIM"),
        (
            ["iso4=details"],
            ("--shape", "4/2x64"),
            "'iso4=details': iso4: head_dim 64 is not a mult",
        ),
    ],
)
def test_what_cannot_be_told_is_refused(command, pages, options, said):
    refused(command(pages, "--like", "like", *options, **GOOD), said)


def refused(done, said):
    """In one line, with nothing on standard output."""
    code, out, err = done
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("error: ") and said in line


def test_kernels_beside_it_are_told_apart(tool):
    """One with a signature, whose metrics are not decode's."""
    assert told(tool, f"{DETAILS}{OTHER}\n{DECODE.partition(chr(10))[2]}") == told(tool, DETAILS)


def test_the_record_is_drawn_and_names_machine_versions_and_command(
    tool, tmp_path, monkeypatch, capsys
):
    for name, text in (("d.txt", DETAILS), ("s.csv", SOURCE), ("like.json", json.dumps(LIKE))):
        (tmp_path / name).write_text(text)
    pages = f"{tmp_path}/d.txt,{tmp_path}/s.csv"
    options = ("--like", f"{tmp_path}/like.json", "--ncu", "2025.3", "--case", "1x4k")
    given = ["counters", *options, f"q4_0={pages}", f"k=fp8,v=q8_0={tmp_path}/d.txt"]
    monkeypatch.setattr(sys, "argv", given)
    assert tool.main() == 0
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
