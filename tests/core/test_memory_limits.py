"""A run under a limit of memory is refused at once, and is never killed by it."""

from __future__ import annotations

import gc
import resource
import sys
from pathlib import Path

import pytest

from quantkit.core.memory_limits import Limit, free_memory, memory_limits, require_memory_for_imports, uncollected
from quantkit.errors import QuantkitError
from quantkit.planning import needs as memory_estimate
from quantkit.planning.needs import ACTIVATIONS, Memory

GB = 10**9
SERVICE = "the memory limit of this container or service"


def system(folder: Path, cgroup: str, **files: str) -> tuple[Path, Path]:
    """Write a /proc and a /sys/fs/cgroup; a double underscore in a name is a slash, its first part the group."""
    proc, cgroups = folder / "proc", folder / "cgroups"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(cgroup)
    (proc / "self/statm").write_text("500 100 0 0 0 200 0\n")
    (proc / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable: 1000 kB\nSwapFree: 500 kB\n")
    for name, text in files.items():
        path = cgroups.joinpath(*name.split("__"))
        path = path.with_name(path.name.replace("-", "."))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc, cgroups


def rooms(proc: Path, cgroups: Path) -> dict[str, int]:
    """Return cause -> room beyond what the process has."""
    own = 100 * resource.getpagesize()
    return {limit.cause: limit.bytes - own for limit in memory_limits(proc, cgroups)}


def test_the_limit_of_a_group_counts_what_is_used_and_what_can_be_dropped(tmp_path: Path) -> None:
    given = {"a__b__memory-max": "9000", "a__b__memory-current": "5000", "a__b__memory-stat": "inactive_file 700\n"}
    assert rooms(*system(tmp_path, "0::/a/b\n", **given))[SERVICE] == 4700


def test_the_limit_of_an_outer_group_counts(tmp_path: Path) -> None:
    given = {"a__b__memory-max": "max", "a__b__memory-current": "5000"}
    given |= {"a__memory-max": "6000", "a__memory-current": "5500"}
    assert rooms(*system(tmp_path, "0::/a/b\n", **given))[SERVICE] == 500


def test_the_first_version_of_groups_counts_also_inside_a_container(tmp_path: Path) -> None:
    name = "memory__memory-{}_in_bytes"
    given = {name.format("limit"): "8000", name.format("usage"): "5000"}
    assert rooms(*system(tmp_path, "5:cpu:/x\n4:memory:/docker/id\n", **given))[SERVICE] == 3000
    given[name.format("limit")] = "9223372036854771712"
    assert SERVICE not in rooms(*system(tmp_path / "none", "4:memory:/\n", **given))


def test_swap_is_memory_that_a_run_may_take(tmp_path: Path) -> None:
    proc, cgroups = system(tmp_path, "")
    assert rooms(proc, cgroups)["the memory that is free here"] == 1500 * 1024
    assert free_memory(proc) == 1000 * 1024


def test_limits_of_the_shell_count_what_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (2**30, 2**30))
    found, page = rooms(*system(tmp_path, "")), resource.getpagesize()
    assert found["ulimit -v"] == 2**30 - 500 * page and found["ulimit -d"] == 2**30 - 200 * page


def test_a_system_that_reports_nothing_limits_nothing(tmp_path: Path) -> None:
    assert memory_limits(tmp_path, tmp_path) == []


def test_a_run_that_needs_far_more_than_it_may_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory({"program": GB, ACTIVATIONS: 9 * GB}, token_bytes=1000)
    monkeypatch.setattr(memory_estimate, "memory_limits", lambda: [Limit(5 * GB, "ulimit -d", "raise ulimit -d")])
    with pytest.raises(QuantkitError, match=r"about 10.0 GB of memory, and ulimit -d allows 5.0 GB: use a small"):
        memory.require()
    memory.of_sequences(4 * 10**6, None).require()  # shorter texts than the longest take less
    memory.of_sequences(9 * 10**6, 3 * GB).require()
    monkeypatch.setattr(memory_estimate, "memory_limits", lambda: [Limit(7 * GB, "", ""), Limit(9 * GB, "", "")])
    memory.require()


@pytest.mark.parametrize(("letter", "kind"), [("v", resource.RLIMIT_AS), ("d", resource.RLIMIT_DATA)])
def test_libraries_that_would_abort_the_process_are_not_imported(
    letter: str, kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {kind: 2**27}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits.get(kind, resource.RLIM_INFINITY),) * 2)
    require_memory_for_imports(computes=True)  # torch is here already
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(QuantkitError, match=rf"ulimit -{letter} allows 131072 KiB, and the libraries"):
        require_memory_for_imports(computes=False)
    limits.clear()
    require_memory_for_imports(computes=True)


@pytest.mark.parametrize("is_on", [True, False])
def test_a_caller_keeps_its_garbage_collector_after_an_error_in_a_nested_pause(is_on: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if is_on else gc.disable)()
        with pytest.raises(QuantkitError), uncollected():
            with uncollected():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise QuantkitError("a config that no library reads")
        assert gc.isenabled() == is_on
    finally:
        (gc.enable if before else gc.disable)()
