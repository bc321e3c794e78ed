"""How much memory the control groups of this process leave it: Linux, versions 1 and 2."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")
_FILES = {
    "cgroup": (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    "cgroup2": (("memory.max", "memory.high"), "memory.current", "inactive_file"),
}
"""By version: the files of limits, that of the bytes in use, and what of these is cached and given back when asked."""


@dataclass(frozen=True)
class Limit:
    """The memory limit of one control group.

    Attributes:
        limit_bytes: the most that its processes may hold.
        left_bytes: of these, what they do not hold now; cached files that nobody is using count as left.
    """

    limit_bytes: int
    left_bytes: int


def limits(root: Path = ROOT) -> list[Limit]:
    """The limits of this process's control groups and of all of their ancestors: each of them holds.

    Args:
        root: the folder that holds proc/self/cgroup, proc/self/mountinfo and the mount points named there.
    """
    return [found for folder, version in _groups(root) if (found := _limit(folder, *_FILES[version])) is not None]


def _limit(folder: Path, names: tuple[str, ...], used_name: str, cached_name: str) -> Limit | None:
    numbers = [int(text) for name in names if (text := read_text(folder / name).strip()).isdecimal()]
    used = read_text(folder / used_name).strip()
    if not numbers or not used.isdecimal():
        return None
    cached = re.search(rf"^{cached_name} (\d+)$", read_text(folder / "memory.stat"), re.MULTILINE)
    held = max(int(used) - (int(cached[1]) if cached else 0), 0)
    return Limit(min(numbers), max(min(numbers) - held, 0))


def _groups(root: Path) -> Iterator[tuple[Path, str]]:
    """The folders of this process's groups that can limit memory, and those of their ancestors; their version."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = [*line.split(":", 2), "", ""][:3]
        in_version_1 = "memory" in controllers.split(",")
        if not in_version_1 and hierarchy != "0":
            continue
        version = "cgroup" if in_version_1 else "cgroup2"
        for mounted, mount_point in _mounts(root, version):
            # A container may see less of the hierarchy than the path names.
            group = PurePosixPath(path)
            seen = ".." not in group.parts and group.is_relative_to(mounted)
            inside = group.relative_to(mounted) if seen else PurePosixPath()
            for folder in (inside, *inside.parents):
                yield root / str(mount_point / folder).lstrip("/"), version


def _mounts(root: Path, version: str) -> Iterator[tuple[str, PurePosixPath]]:
    """Which part of the hierarchy lies where, of each place where it is mounted."""
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        own, other = before.split(), after.split()
        if (
            len(own) > 4
            and other
            and other[0] == version
            and (version == "cgroup2" or "memory" in other[-1].split(","))
        ):
            part, place = (re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text) for text in own[3:5])
            yield part, PurePosixPath(place)


def read_text(path: Path) -> str:
    """What a file of the system says; "" where it says nothing."""
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
