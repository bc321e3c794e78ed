"""How much memory the control groups of this process leave it: Linux, versions 1 and 2."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")


@dataclass(frozen=True)
class _Version:
    """The files of one version. What is cached counts as used there, though the kernel gives it back when asked."""

    limits: tuple[str, ...]
    used: str
    cached: str


_V1 = _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Version(("memory.max", "memory.high"), "memory.current", "inactive_file")


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
    return [found for folder, version in _groups(root) if (found := _limit(folder, version)) is not None]


def _limit(folder: Path, version: _Version) -> Limit | None:
    numbers = [int(text) for name in version.limits if (text := _read(folder / name).strip()).isdecimal()]
    used = _read(folder / version.used).strip()
    if not numbers or not used.isdecimal():
        return None
    cached = re.search(rf"^{version.cached} (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
    held = max(int(used) - (int(cached[1]) if cached else 0), 0)
    return Limit(min(numbers), max(min(numbers) - held, 0))


def _groups(root: Path) -> Iterator[tuple[Path, _Version]]:
    """The folders of this process's groups that can limit memory, and those of their ancestors."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            version, kind = _V1, "cgroup"
        elif hierarchy == "0":
            version, kind = _V2, "cgroup2"
        else:
            continue
        for mounted, mount_point in _mounts(root, kind):
            inside = _below(path, mounted)
            for group in (inside, *inside.parents):
                yield root / str(mount_point / group).lstrip("/"), version


def _mounts(root: Path, kind: str) -> Iterator[tuple[str, PurePosixPath]]:
    """Which part of the hierarchy lies where, of each place where it is mounted."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        own, other = before.split(), after.split()
        if len(own) > 4 and other and other[0] == kind and (kind == "cgroup2" or "memory" in other[-1].split(",")):
            yield _unescaped(own[3]), PurePosixPath(_unescaped(own[4]))


def _below(path: str, mounted: str) -> PurePosixPath:
    """A group's path inside a mount. A container may see less of the hierarchy than the path names."""
    group = PurePosixPath(path)
    if ".." not in group.parts and group.is_relative_to(mounted):
        return group.relative_to(mounted)
    return PurePosixPath()


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
