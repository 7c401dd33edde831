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


def v2(path, limit, used, inactive=0, active=7):
    where = f"sys/fs/cgroup{path}"
    return {
        f"{where}/memory.max": limit,
        f"{where}/memory.current": used,
        f"{where}/memory.stat": f"anon 1\ninactive_file {inactive}\nactive_file {active}",
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


V1 = {"proc/self/cgroup": "12:cpu,cpuacct:/x\n5:memory:/docker/ab\n0::/x"}


def v1(limit, used, inactive, active=0):
    """Of the group and all below it; its own pages are among them."""
    where = "sys/fs/cgroup/memory/docker/ab"
    return V1 | {
        f"{where}/memory.limit_in_bytes": limit,
        f"{where}/memory.usage_in_bytes": used,
        f"{where}/memory.stat": "inactive_file 1\nactive_file 2\n"
        f"total_inactive_file {inactive}\ntotal_active_file {active}",
    }


def test_what_version_1_leaves(root):
    assert cgroups.free_bytes(root(v1(100 * MIB, 80 * MIB, 30 * MIB))) == 50 * MIB


# 30 MiB of a program's own, and of 50 MiB of mapped weights what was read, in use or not
READ = {"none": (0, 0), "all, once": (50, 0), "all, in use": (0, 50), "some": (20, 10)}


@pytest.mark.parametrize("inactive, active", READ.values(), ids=READ)
def test_mapped_weights_count_once_whatever_was_read_of_them(root, inactive, active):
    used = (30 + inactive + active) * MIB

    def left(limit):
        where = root(OWN | v2("/pod/box", limit * MIB, used, inactive * MIB, active * MIB))
        return cgroups.free_bytes(where, mapped_bytes=50 * MIB)

    assert left(100) == 20 * MIB
    assert left(70) == -10 * MIB, "not even they have room"


def test_mapped_weights_count_once_in_version_1(root):
    where = root(v1(100 * MIB, 80 * MIB, 10 * MIB, 40 * MIB))
    assert cgroups.free_bytes(where, mapped_bytes=50 * MIB) == 20 * MIB


def test_no_control_groups_are_no_limit(tmp_path):
    assert cgroups.free_bytes(tmp_path) is None


@pytest.mark.parametrize(("limit", "expected"), [(None, 1000), (2000, 1000), (300, 300), (0, 0)])
def test_a_cpu_has_the_smaller_of_the_machines_memory_and_the_containers(
    monkeypatch, limit, expected
):
    available = SimpleNamespace(available=1000)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: available)
    monkeypatch.setattr(machine.cgroups, "free_bytes", lambda mapped_bytes: limit)
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
