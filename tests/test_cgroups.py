"""Memory limits, read from trees of files as kernels, systemd, slurm and containers show them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from moestro import machine
from moestro.hf import residency
from moestro.machine import Limit

UNLIMITED = "9223372036854771712\n"
V1_MOUNT = "35 31 0:32 {} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
V2_MOUNT = "25 30 0:22 {} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.fixture
def tree(tmp_path: Path):
    """Writes files, given by their paths, and returns the folder that stands for /."""

    def make(files: Mapping[str, str]) -> Path:
        for name, text in {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   1000 kB\n", **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


def v1(group: str, limit: str, used: str, stat: str = "") -> dict[str, str]:
    files = {"limit_in_bytes": limit, "usage_in_bytes": used, "stat": stat}
    return {f"sys/fs/cgroup/memory{group}/memory.{name}": text for name, text in files.items()}


def v2(group: str, limit: str, used: str, stat: str = "") -> dict[str, str]:
    files = {"max": limit, "current": used, "stat": stat}
    return {f"sys/fs/cgroup{group}/memory.{name}": text for name, text in files.items()}


def test_without_groups_the_kernel_decides(tree) -> None:
    root = tree({})
    assert machine.limits(root) == []
    assert machine.available_bytes(root=root) == 1_024_000
    assert machine.memory_bytes(root) == machine.describe()["memory_bytes"]


def test_version_two_in_a_container(tree) -> None:
    own = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT.format("/")}
    assert machine.available_bytes(root=tree({**own, **v2("", "max\n", "7\n")})) == 1_024_000
    assert machine.available_bytes(root=tree(v2("", "507\n", "7\n"))) == 500
    root = tree(v2("", "507\n", "400\n", "anon 9\ninactive_file 150\n"))
    assert machine.available_bytes(root=root) == 257  # cached files are given back
    assert machine.memory_bytes(root) == 507


def test_the_least_of_all_scopes_of_systemd(tree) -> None:
    scope = "/user.slice/user-1000.slice/user@1000.service/app.slice/run-r1.scope"
    root = tree(
        {"proc/self/cgroup": f"0::{scope}\n", "proc/self/mountinfo": V2_MOUNT.format("/")}
        | v2(scope, "max\n", "10\n")
        | v2("/user.slice/user-1000.slice/user@1000.service/app.slice", "900\n", "100\n")
        | v2("/user.slice/user-1000.slice", "1000\n", "700\n")
        | v2("/user.slice/user-1001.slice", "1\n", "1\n")
    )
    assert sorted(machine.limits(root), key=lambda limit: limit.limit_bytes) == [Limit(900, 800), Limit(1000, 300)]
    assert machine.available_bytes(root=root) == 300
    assert machine.memory_bytes(root) == 900


def test_a_throttled_scope_counts_as_a_limit(tree) -> None:
    own = {"proc/self/cgroup": "0::/a\n", "proc/self/mountinfo": V2_MOUNT.format("/")}
    root = tree({**own, **v2("/a", "max\n", "10\n"), "sys/fs/cgroup/a/memory.high": "50\n"})
    assert machine.limits(root) == [Limit(50, 40)]


def test_jobs_of_slurm_in_version_one(tree) -> None:
    step = "/slurm/uid_7/job_8/step_0"
    root = tree(
        {
            "proc/self/cgroup": f"5:cpu,cpuacct:/other\n4:memory:{step}\n1:name=systemd:/init.scope\n0::/init\n",
            "proc/self/mountinfo": V1_MOUNT.format("/")
            + "33 31 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
            + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
        }
        | v1("", UNLIMITED, "123456\n")
        | v1(step, UNLIMITED, "40\n")
        | v1("/slurm/uid_7/job_8", "5000\n", "4000\n", "inactive_file 1\ntotal_inactive_file 300\n")
    )
    assert Limit(5000, 1300) in machine.limits(root)
    assert machine.available_bytes(root=root) == 1300


@pytest.mark.parametrize("mounted", ["/docker/abc", "/elsewhere", "/.."])
def test_a_container_that_sees_only_its_own_part(tree, mounted: str) -> None:
    """The path in proc is the host's, the mount shows the container's group only."""
    own = {"proc/self/cgroup": "4:memory:/docker/abc\n", "proc/self/mountinfo": V1_MOUNT.format(mounted)}
    root = tree({**own, **v1("", "800\n", "100\n")})
    assert machine.limits(root) == [Limit(800, 700)]


def test_a_group_outside_of_the_namespace(tree) -> None:
    own = {"proc/self/cgroup": "0::/../../other\n", "proc/self/mountinfo": V2_MOUNT.format("/")}
    assert machine.limits(tree({**own, **v2("", "800\n", "100\n")})) == [Limit(800, 700)]


def test_mount_points_with_spaces(tree) -> None:
    mount = V2_MOUNT.format("/").replace("/sys/fs/cgroup ", "/sys/fs/c\\040group ")
    files = {"sys/fs/c group/a/memory.max": "9\n", "sys/fs/c group/a/memory.current": "2\n"}
    assert machine.limits(tree({"proc/self/cgroup": "0::/a\n", "proc/self/mountinfo": mount, **files})) == [Limit(9, 7)]


def test_mapped_pages_are_bounded_by_the_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "memory_bytes", lambda: 1 << 30)
    page = os.sysconf("SC_PAGE_SIZE")
    assert residency.Residency(None)._limit == 3 * (1 << 28) // page  # type: ignore[arg-type]
