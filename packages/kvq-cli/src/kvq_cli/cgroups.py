"""Memory that a container may still take: a machine's free memory can be far more."""

from __future__ import annotations

from pathlib import Path, PurePosixPath


def free_bytes(root: Path = Path("/")) -> int | None:
    """Bytes below the tightest memory limit of this process's control groups; None = no limit.

    Parameters
    ----------
    root : where /proc and /sys are
    """
    rooms = [
        room
        for version, group in _groups(root)
        for above in _with_ancestors(group)
        if (room := _room(root, version, above)) is not None
    ]
    return max(0, min(rooms)) if rooms else None


def _groups(root: Path) -> list[tuple[int, PurePosixPath]]:
    """Version and path of the control groups that account for memory."""
    lines = _read(root / "proc/self/cgroup").splitlines()
    found = list[tuple[int, PurePosixPath]]()
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            found.append((2, PurePosixPath(path)))
        elif "memory" in controllers.split(","):
            found.append((1, PurePosixPath(path)))
    return found


def _with_ancestors(group: PurePosixPath) -> list[PurePosixPath]:
    """A limit binds all below it. A container may see only its own group, and that as the root."""
    return [group, *group.parents]


def _room(root: Path, version: int, group: PurePosixPath) -> int | None:
    if version == 2:
        folder = root / "sys/fs/cgroup" / group.relative_to("/")
        limit, usage, inactive = "memory.max", "memory.current", "inactive_file"
    else:
        folder = root / "sys/fs/cgroup/memory" / group.relative_to("/")
        limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        inactive = "total_inactive_file"
    most, used = _read(folder / limit).strip(), _read(folder / usage).strip()
    if not most.isdigit() or not used.isdigit():
        return None  # no such file, or "max"
    statistics = dict(line.split(maxsplit=1) for line in _read(folder / "memory.stat").splitlines())
    # the kernel drops cached files that nobody used lately before it refuses memory
    return int(most) - max(0, int(used) - int(statistics.get(inactive, 0)))


def _read(path: Path) -> str:
    """Text of a file of the kernel; empty where there is none or it may not be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
