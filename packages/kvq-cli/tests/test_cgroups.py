"""What a container may still take, in file systems made up after the kernel's documentation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvq_cli import cgroups, machine

MIB = 2**20


@pytest.fixture
def root(tmp_path):
    """Write files below a root; returns it."""

    def write(files):
        for path, text in files.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")
        return tmp_path

    return write


def v2(path, limit, used, inactive=0):
    where = f"sys/fs/cgroup{path}"
    return {
        f"{where}/memory.max": limit,
        f"{where}/memory.current": used,
        f"{where}/memory.stat": f"anon 1\ninactive_file {inactive}\nactive_file 7",
    }


OWN = {"proc/self/cgroup": "0::/pod/box"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (v2("/pod/box", 100 * MIB, 30 * MIB), 70 * MIB),
        (v2("/pod/box", 100 * MIB, 30 * MIB, 20 * MIB), 90 * MIB),
        (v2("/pod/box", "max", 30 * MIB), None),
        # an ancestor binds too, and the tightest counts
        (v2("/pod/box", "max", 30 * MIB) | v2("/pod", 50 * MIB, 40 * MIB), 10 * MIB),
        (v2("/pod/box", 100 * MIB, 95 * MIB) | v2("/pod", 200 * MIB, 95 * MIB), 5 * MIB),
        # a container sees its own group as the root, whatever its path is outside
        (v2("", 64 * MIB, 60 * MIB), 4 * MIB),
        (v2("/pod/box", 10 * MIB, 30 * MIB), 0),
        (v2("/other", 10 * MIB, 1 * MIB), None),
        ({}, None),
    ],
)
def test_what_version_2_leaves(root, files, expected):
    assert cgroups.free_bytes(root(OWN | files)) == expected


def test_what_version_1_leaves(root):
    where = "sys/fs/cgroup/memory/docker/ab"
    files = {
        "proc/self/cgroup": "12:cpu,cpuacct:/x\n5:memory:/docker/ab\n0::/x",
        f"{where}/memory.limit_in_bytes": 100 * MIB,
        f"{where}/memory.usage_in_bytes": 80 * MIB,
        f"{where}/memory.stat": f"inactive_file 1\ntotal_inactive_file {30 * MIB}",
    }
    assert cgroups.free_bytes(root(files)) == 50 * MIB


def test_no_control_groups_are_no_limit(tmp_path):
    assert cgroups.free_bytes(tmp_path) is None


@pytest.mark.parametrize(("limit", "expected"), [(None, 1000), (2000, 1000), (300, 300), (0, 0)])
def test_a_cpu_has_the_smaller_of_the_machines_memory_and_the_containers(
    monkeypatch, limit, expected
):
    available = SimpleNamespace(available=1000)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: available)
    monkeypatch.setattr(machine.cgroups, "free_bytes", lambda: limit)
    assert machine.free_bytes(torch.device("cpu")) == expected


# ---- processors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "share"),
    [
        ({"sys/fs/cgroup/pod/box/cpu.max": "150000 100000"}, 1.5),
        ({"sys/fs/cgroup/pod/box/cpu.max": "max 100000"}, None),
        (
            {
                "sys/fs/cgroup/pod/box/cpu.max": "max 100000",
                "sys/fs/cgroup/pod/cpu.max": "400000 50000",
                "sys/fs/cgroup/cpu.max": "900000 100000",
            },
            8,
        ),
        ({}, None),
        ({"sys/fs/cgroup/pod/box/cpu.max": "garbage"}, None),
    ],
)
def test_the_tightest_share_of_processors_counts(root, files, share):
    assert cgroups.cpus(root(OWN | files)) == share


def test_shares_of_the_first_version_count_too(root):
    own = {"proc/self/cgroup": "4:cpu,cpuacct:/box\n7:memory:/other"}
    where = "sys/fs/cgroup/cpu/box"
    files = {f"{where}/cpu.cfs_quota_us": 300000, f"{where}/cpu.cfs_period_us": 100000}
    assert cgroups.cpus(root(own | files)) == 3
    assert cgroups.cpus(root(own | files | {f"{where}/cpu.cfs_quota_us": -1})) is None


@pytest.mark.parametrize(
    ("wanted", "cores", "share", "threads"),
    [(None, 6, None, 6), (None, 6, 2.5, 2), (None, 6, 0.5, 1), (None, 2, 4, 2), (5, 2, 1.0, 5)],
)
def test_threads_are_no_more_than_may_run_at_once(monkeypatch, wanted, cores, share, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: range(cores), raising=False)
    monkeypatch.setattr(cgroups, "cpus", lambda: share)
    assert machine.choose_threads(wanted) == threads
