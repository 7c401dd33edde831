"""What a CPU serves with needs no Triton, which torch's wheel for CPUs does not bring."""

import json
import subprocess
import sys

WITHOUT = """
import json, sys
sys.modules["triton"] = None
import torch
from kvq_attention import bench, selfcheck
from kvq_attention.layer import Layer
found = {}
for op, cases in (("decode", "1x20"), ("extend", "4+12")):
    plan = bench.plan(
        device="cpu", op=op, quick=True, cases=cases, repeat=1, codecs="q8_0", shape="2/1x64"
    )
    record = bench.run(plan)
    found[op] = [record["failed"], [row["backend"] for row in record[op]]]
layer = Layer(heads=4, kv_heads=2, head_dim=64)
checked = selfcheck.run([("q8_0", "q8_0")], layer, "cpu", torch.float32)
found["check"] = [each.problems for each in checked]
print(json.dumps(found))
"""


def test_the_reference_is_measured_and_checked():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["decode"] == [[], ["reference", "reference"]]
    assert found["extend"] == [[], ["reference", "reference"]]
    assert found["check"] and not any(found["check"])
