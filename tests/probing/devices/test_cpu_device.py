from __future__ import annotations

import platform
import resource
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import run_python
from warm import run_warm

from batchfinder.errors import DeviceError
from batchfinder.probing.devices import cpu as cpu_device
from batchfinder.probing.devices import process_peak
from batchfinder.probing.devices.cpu import CpuDevice
from batchfinder.units import GIB, MIB

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the CPU device is Linux only")

KIB = 1024


@pytest.mark.parametrize(
    ("after_steps", "capacity", "warns"),
    [
        ([100, 90, 91, 92, 93, 94, 95, 102], "", True),
        ([100, 190, 191, 192, 93, 94, 95, 100], "", False),
        ([100, 90, 91, 92, 93, 94, 95, 102], "1", False),
        ([100, 110, 120], "", False),
        ([], "", False),
    ],
)
def test_kernels_kept_for_each_shape_of_a_batch_are_warned_of(
    after_steps: list[int], capacity: str, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", capacity)
    warning = cpu_device.CpuDevice().shapes_warning([each * MIB for each in after_steps])
    assert ("ONEDNN_PRIMITIVE_CACHE_CAPACITY=1" in warning) is warns


START = "import torch\nfrom batchfinder.probing.devices.cpu import CpuDevice\nd = CpuDevice()\n"


def in_a_fresh_process(code: str) -> str:
    """What a program prints that has a device to work with."""
    return run_warm(START + textwrap.dedent(code)).strip()


def test_beyond_the_limit_pytorch_runs_out_and_goes_on_once_it_is_lifted() -> None:
    printed = in_a_fresh_process(
        """
        with d.limited_to(d.held_bytes() + 200 * 2**20):
            torch.ones(100 * 2**18)
            try:
                torch.ones(300 * 2**18)
            except RuntimeError as error:
                print("can't allocate memory" in str(error))
        print(torch.ones(300 * 2**18).numel())
        """
    )
    assert printed.split() == ["True", str(300 * 2**18)]


def test_the_limit_is_put_back_also_after_an_error() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    inside = None

    def fail_inside() -> None:
        nonlocal inside
        with CpuDevice().limited_to(100 * GIB):
            inside = resource.getrlimit(resource.RLIMIT_DATA)
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert inside == (100 * GIB, before[1])
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_the_peak_is_what_was_held_at_most_since_the_reset() -> None:
    printed = in_a_fresh_process(
        """
        torch.ones(400 * 2**18)
        d.reset_peaks()
        before = d.held_bytes()
        x = torch.ones(100 * 2**18)
        y = torch.ones(100 * 2**18)
        del x, y
        print((d.peaks().reserved_bytes - before) / 2**20, (d.held_bytes() - before) / 2**20)
        """
    )
    peak, held = map(float, printed.split())
    assert 190 < peak < 220
    assert -10 < held < 10


def test_what_is_held_is_what_the_limit_counts() -> None:
    """One page less than what is held leaves room for nothing."""
    printed = in_a_fresh_process(
        """
        x = torch.ones(100 * 2**18)
        try:
            with d.limited_to(d.held_bytes() + 50 * 2**20):
                torch.ones(60 * 2**18)
        except RuntimeError:
            print("out")
        with d.limited_to(d.held_bytes() + 70 * 2**20):
            torch.ones(60 * 2**18)
        print("in")
        """
    )
    assert printed.split() == ["out", "in"]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library does not tell")
@pytest.mark.parametrize("size_bytes", [10 * 2**20, 100 * 2**20])
def test_what_is_in_use_is_not_what_the_heap_keeps(size_bytes: int) -> None:
    printed = in_a_fresh_process(
        f"""
        before = d.in_use_bytes()
        x = [torch.ones({size_bytes // 4}) for _ in range(3)]
        print((d.in_use_bytes() - before) / {size_bytes})
        del x[0]
        print((d.in_use_bytes() - before) / {size_bytes})
        """
    )
    three, two = map(float, printed.split())
    assert three == pytest.approx(3, abs=0.1)
    assert two == pytest.approx(2, abs=0.1)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="others have no heap per thread")
def test_what_is_set_aside_for_the_heaps_of_threads_is_no_peak() -> None:
    # A process of its own: the C library may keep the stack of a thread that ended for the next.
    printed = run_python(
        "-c",
        START
        + textwrap.dedent(
            """
        import threading
        together = threading.Barrier(4)

        def allocate():
            together.wait()
            torch.ones(10_000)
            together.wait()

        d.reset_peaks()
        before = d.held_bytes()
        threads = [threading.Thread(target=allocate) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        print((d.peaks().reserved_bytes - before) / 2**20)
        """
        ),
    )
    # Stacks of 8 MiB count, of the heaps what the tensors take.
    assert 30 < float(printed) < 40


# The machine's memory, as the kernel tells of it.

Machine = Callable[..., CpuDevice]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A device on a machine of 64 GiB with 48 GiB available, in the given control groups."""

    def build(cgroup: str | None = None, **files: str) -> CpuDevice:
        proc = tmp_path / "proc"
        (proc / "self").mkdir(parents=True)
        (proc / "meminfo").write_text(
            f"MemTotal: {64 * MIB} kB\nMemFree: 1 kB\nMemAvailable: {48 * MIB} kB\nHugePages: 0\n"
        )
        (proc / "self" / "status").write_text(
            f"Name: python\nVmData: {2 * MIB} kB\nVmRSS: {1 * MIB} kB\nVmHWM: {3 * MIB} kB\n"
            f"VmPeak: {9 * MIB} kB\nVmSize: {8 * MIB} kB\n"
        )
        if cgroup is not None:
            (proc / "self" / "cgroup").write_text(cgroup)
        for name, text in files.items():
            path = tmp_path / "cgroup" / name.replace("__", "/").replace("_DOT_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr(process_peak, "PROC", proc)
        monkeypatch.setattr(cpu_device, "CGROUP", tmp_path / "cgroup")
        return CpuDevice()

    return build


def limits(folder: str, limit: str, used: int, cached: int = 0) -> dict[str, str]:
    """The files of a control group of version 2."""
    return {
        f"{folder}memory_DOT_max": limit,
        f"{folder}memory_DOT_current": str(used),
        f"{folder}memory_DOT_stat": f"anon 1\ninactive_file {cached}\n",
    }


def test_free_is_what_the_system_calls_available(machine: Machine) -> None:
    memory = machine().memory()
    assert memory.capacity_bytes == 64 * GIB
    assert memory.used_by_others_bytes == (64 - 48 - 1) * GIB
    assert (memory.context_bytes, memory.held_bytes) == (0, 2 * GIB)


def test_the_peak_counts_what_is_reserved_but_not_resident(machine: Machine) -> None:
    device = machine()
    device.reset_peaks()
    assert device.peaks().allocated_bytes == (3 + 2 - 1) * GIB


def test_a_control_group_limits_the_machine(machine: Machine) -> None:
    files = limits("job__", str(16 * GIB), used=6 * GIB, cached=2 * GIB)
    memory = machine("0::/job\n", **files).memory()
    assert memory.capacity_bytes == 16 * GIB
    assert memory.used_by_others_bytes == (6 - 2 - 1) * GIB


def test_the_tightest_of_nested_control_groups_counts(machine: Machine) -> None:
    files = limits("a__b__", "max", used=0) | limits("a__", str(8 * GIB), used=GIB)
    assert machine("0::/a/b\n", **files).memory().capacity_bytes == 8 * GIB


def test_control_groups_of_the_first_version(machine: Machine) -> None:
    files = {
        "memory__job__memory_DOT_limit_in_bytes": str(8 * GIB),
        "memory__job__memory_DOT_usage_in_bytes": str(3 * GIB),
        "memory__job__memory_DOT_stat": f"cache 5\ntotal_inactive_file {GIB}\n",
    }
    memory = machine("4:cpu,memory:/job\n1:name=systemd:/job\n", **files).memory()
    assert memory.capacity_bytes == 8 * GIB
    assert memory.used_by_others_bytes == (3 - 1 - 1) * GIB


def test_a_machine_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_peak, "PROC", tmp_path)
    with pytest.raises(DeviceError, match=r"process cannot be read .*\. Try mounting /proc"):
        CpuDevice()


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_are_told_what_is_possible(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(DeviceError, match=r"cannot be limited.*\. Try --device with an"):
        CpuDevice()


def test_a_limit_that_the_shell_has_set_is_the_capacity() -> None:
    printed = in_a_fresh_process(
        """
        import resource
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (2**31, hard))
        memory = d.memory()
        print(memory.capacity_bytes, memory.used_by_others_bytes)
        """
    )
    assert printed.split() == [str(2**31), "0"]
