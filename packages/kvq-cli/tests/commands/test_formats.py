import json
import subprocess
import sys

import kvq_codecs
from kvq_codecs import table


def kvq(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "kvq_cli", *arguments],
        capture_output=True,
        check=True,
        text=True,
        timeout=60,
    ).stdout


def test_formats_prints_the_codecs_table():
    assert kvq("formats") == table.render(table.rows())


def test_formats_as_json_names_every_codec_and_its_bytes():
    rows = {row["name"]: row for row in json.loads(kvq("formats", "--json"))}
    assert tuple(rows) == tuple(kvq_codecs.names())
    assert rows["q4_0"]["row_bytes"] == {"64": 36, "128": 72, "256": 144}
    assert rows["iso3"]["row_bytes"]["64"] is None
    assert rows["fp32"]["error"]["relative_rms"] == 0
