"""What a container may take of its machine, which can be far less than there is."""

from __future__ import annotations

from pathlib import Path, PurePosixPath


def free_bytes(root: Path = Path("/"), mapped_bytes: int = 0) -> int | None:
    """Bytes below the tightest memory limit of this process's control groups; None = no limit.

    Parameters
    ----------
    root : where /proc and /sys are
    mapped_bytes : of mapped files, which count as used; below 0 where not even they have room
    """
    rooms = [
        room
        for version, group in _groups(root, "memory")
        for above in _with_ancestors(group)
        if (room := _room(root, version, above, mapped_bytes)) is not None
    ]
    return max(-mapped_bytes, min(rooms)) if rooms else None


def cpus(root: Path = Path("/")) -> float | None:
    """Processors whose whole time this process's control groups may take; None = no limit."""
    shares = [
        share
        for version, group in _groups(root, "cpu")
        for above in _with_ancestors(group)
        if (share := _share(root, version, above)) is not None
    ]
    return min(shares, default=None)


def _groups(root: Path, controller: str) -> list[tuple[int, PurePosixPath]]:
    """Version and path of the control groups that account for memory or processors."""
    lines = _read(root / "proc/self/cgroup").splitlines()
    found = list[tuple[int, PurePosixPath]]()
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            found.append((2, PurePosixPath(path)))
        elif controller in controllers.split(","):
            found.append((1, PurePosixPath(path)))
    return found


def _with_ancestors(group: PurePosixPath) -> list[PurePosixPath]:
    """A limit binds all below it. A container may see only its own group, and that as the root."""
    return [group, *group.parents]


def _room(root: Path, version: int, group: PurePosixPath, mapped_bytes: int) -> int | None:
    if version == 2:
        folder = root / "sys/fs/cgroup" / group.relative_to("/")
        limit, usage, prefix = "memory.max", "memory.current", ""
    else:
        folder = root / "sys/fs/cgroup/memory" / group.relative_to("/")
        limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        prefix = "total_"
    most, used = _read(folder / limit).strip(), _read(folder / usage).strip()
    if not most.isdigit() or not used.isdigit():
        return None  # no such file, or "max"
    statistics = dict(line.split(maxsplit=1) for line in _read(folder / "memory.stat").splitlines())
    active, inactive = (
        int(statistics.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive")
    )
    # the kernel drops cached files that nobody used lately before it refuses memory
    room = int(most) - max(0, int(used) - inactive)
    return room - max(0, mapped_bytes - active)  # those in use are in what is used


def _share(root: Path, version: int, group: PurePosixPath) -> float | None:
    """Microseconds of computing in a period, by the period's."""
    if version == 2:
        folder = root / "sys/fs/cgroup" / group.relative_to("/")
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
    else:
        folder = root / "sys/fs/cgroup/cpu" / group.relative_to("/")
        quota = _read(folder / "cpu.cfs_quota_us").strip()
        period = _read(folder / "cpu.cfs_period_us").strip()
    # no such files, or "max", or -1
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _read(path: Path) -> str:
    """Text of a file of the kernel; empty where there is none or it may not be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
