from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchfinder.probing.devices.allocator.blocks import (
    LARGE_SEGMENT_BYTES,
    Block,
    address_of,
    round_request,
    segment_bytes,
    size_of,
)
from batchfinder.probing.devices.allocator.caching import (
    AllocatorSettings,
    CachingAllocator,
    DeviceFullError,
)
from batchfinder.probing.devices.allocator.expandable import ExpandableAllocator
from batchfinder.units import GIB, KIB, MIB

ALLOCATORS = [CachingAllocator, ExpandableAllocator]
CAPACITY = 200 * MIB

# A request of some bytes, or a number that picks which block to give back.
requests = st.integers(1, 60 * MIB) | st.integers(1, 2 * MIB) | st.integers(1, 4 * KIB)
scripts = st.lists(st.tuples(st.booleans(), requests), max_size=80)


def run(allocator: CachingAllocator, script: list[tuple[bool, int]]) -> list[Block]:
    """Requests and releases; a request that does not fit is left out. Returns the live blocks."""
    live: list[Block] = []
    for is_request, number in script:
        if is_request or not live:
            try:
                block = allocator.malloc(number)
            except DeviceFullError:
                continue
            assert size_of(block) >= number
            live.append(block)
        else:
            allocator.free(live.pop(number % len(live)))
        assert_sound(allocator, live)
    return live


def assert_sound(allocator: CachingAllocator, live: list[Block]) -> None:
    spans = sorted((address_of(block), address_of(block) + size_of(block)) for block in live)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert allocator.allocated_bytes == sum(size_of(block) for block in live)
    # Expandable segments grow by pages, and the last one may stand out.
    overhang = LARGE_SEGMENT_BYTES if isinstance(allocator, ExpandableAllocator) else 0
    assert allocator.allocated_bytes <= allocator.reserved_bytes < CAPACITY + max(1, overhang)
    assert allocator.reserved_bytes <= allocator.peak_reserved_bytes


@pytest.mark.parametrize("make", ALLOCATORS)
@given(script=scripts)
def test_blocks_never_overlap_and_bytes_are_conserved(
    make: type[CachingAllocator], script: list[tuple[bool, int]]
) -> None:
    run(make(CAPACITY), script)


@pytest.mark.parametrize("make", ALLOCATORS)
@given(script=scripts)
def test_freed_neighbours_merge_until_whole_segments_can_be_given_back(
    make: type[CachingAllocator], script: list[tuple[bool, int]]
) -> None:
    allocator = make(CAPACITY)
    for block in run(allocator, script):
        allocator.free(block)
    assert allocator.allocated_bytes == 0

    allocator.release_cached()

    assert allocator.reserved_bytes == 0


@pytest.mark.parametrize("make", ALLOCATORS)
@given(script=scripts, number=requests)
def test_out_of_memory_only_after_the_cache_was_given_back(
    make: type[CachingAllocator], script: list[tuple[bool, int]], number: int
) -> None:
    allocator = make(CAPACITY)
    live = run(allocator, script)
    try:
        allocator.malloc(number)
    except DeviceFullError:
        reserved, retries = allocator.reserved_bytes, allocator.retries
        assert retries > 0
        allocator.release_cached()
        assert allocator.reserved_bytes == reserved  # nothing was left to give back
        assert reserved + segment_bytes(round_request(number)) > CAPACITY or live


@given(script=scripts)
def test_without_a_capacity_everything_fits(script: list[tuple[bool, int]]) -> None:
    free, capped = CachingAllocator(), CachingAllocator(1024 * GIB)

    run_sizes = [number for is_request, number in script if is_request]
    for number in run_sizes:
        free.malloc(number)
        capped.malloc(number)

    assert free.reserved_bytes == capped.reserved_bytes
    assert free.retries == capped.retries == 0


@given(size=st.integers(1, 4 * GIB), divisions=st.sampled_from([1, 2, 4, 8]))
def test_rounding_never_loses_bytes_and_never_more_than_doubles(size: int, divisions: int) -> None:
    rounded = round_request(size, divisions)

    assert size <= rounded <= max(512, 2 * size)
    assert round_request(rounded, divisions) == rounded


def test_small_requests_share_a_segment_of_two_mib() -> None:
    allocator = CachingAllocator()
    for _ in range(2 * MIB // 512):
        allocator.malloc(1)
    assert allocator.reserved_bytes == 2 * MIB

    allocator.malloc(1)

    assert allocator.reserved_bytes == 4 * MIB


@pytest.mark.parametrize(
    ("size", "segment"),
    [(MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (10 * MIB + 1, 12)],
)
def test_segments(size: int, segment: int) -> None:
    allocator = CachingAllocator()
    allocator.malloc(size)
    assert allocator.reserved_bytes == segment * MIB


def test_a_large_block_keeps_a_rest_of_up_to_one_mib() -> None:
    allocator = CachingAllocator()
    assert size_of(allocator.malloc(19 * MIB)) == 20 * MIB

    allocator = CachingAllocator()
    allocator.free(allocator.malloc(9 * MIB))
    assert size_of(allocator.malloc(9 * MIB)) == 9 * MIB


def test_the_smallest_block_that_fits_is_taken_and_the_lowest_of_equals() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.malloc(size * MIB) for size in (30, 20, 20, 40)]
    for block in blocks:
        allocator.free(block)

    assert address_of(allocator.malloc(20 * MIB)) == address_of(blocks[1])
    assert address_of(allocator.malloc(20 * MIB)) == address_of(blocks[2])
    assert address_of(allocator.malloc(20 * MIB)) == address_of(blocks[0])


def test_at_the_capacity_cached_segments_are_given_back_and_the_request_is_served() -> None:
    allocator = CachingAllocator(100 * MIB)
    kept = allocator.malloc(30 * MIB)
    allocator.free(allocator.malloc(60 * MIB))

    block = allocator.malloc(70 * MIB)

    assert (size_of(block), allocator.retries) == (70 * MIB, 1)
    assert allocator.reserved_bytes == 100 * MIB
    with pytest.raises(DeviceFullError):
        allocator.malloc(2 * MIB)
    allocator.free(kept)
    allocator.malloc(2 * MIB)


def test_a_split_segment_is_not_given_back() -> None:
    allocator = CachingAllocator(40 * MIB)
    allocator.malloc(2 * MIB)  # keeps 18 of the 20 MiB segment in the cache

    with pytest.raises(DeviceFullError):
        allocator.malloc(30 * MIB)
    assert size_of(allocator.malloc(18 * MIB)) == 18 * MIB


def test_expandable_segments_serve_what_fragments_cannot() -> None:
    sizes = [11 * MIB, 13 * MIB]

    def grow(allocator: CachingAllocator) -> CachingAllocator:
        for size in sizes:
            allocator.free(allocator.malloc(size))
        allocator.malloc(30 * MIB)
        return allocator

    assert grow(CachingAllocator()).reserved_bytes == (12 + 14 + 30) * MIB
    assert grow(ExpandableAllocator()).reserved_bytes == 40 * MIB


def test_expandable_segments_fill_holes_first() -> None:
    allocator = ExpandableAllocator()
    low, high = allocator.malloc(40 * MIB), allocator.malloc(20 * MIB)
    allocator.free(low)
    allocator.release_cached()
    assert allocator.reserved_bytes == 20 * MIB

    again = allocator.malloc(40 * MIB)

    assert address_of(again) < address_of(high)
    assert allocator.reserved_bytes == 60 * MIB


def test_max_split_size_keeps_large_blocks_whole() -> None:
    allocator = CachingAllocator(settings=AllocatorSettings(max_split_size_bytes=32 * MIB))
    large = allocator.malloc(100 * MIB)
    allocator.free(large)

    allocator.malloc(12 * MIB)  # not cut from the large block
    assert allocator.reserved_bytes == 112 * MIB
    allocator.malloc(90 * MIB)  # close enough to the large block to take all of it
    assert allocator.reserved_bytes == 112 * MIB


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", AllocatorSettings()),
        ("expandable_segments:True", AllocatorSettings(expandable_segments=True)),
        (
            "backend:native, max_split_size_mb:64,roundup_power2_divisions:4",
            AllocatorSettings(max_split_size_bytes=64 * MIB, roundup_power2_divisions=4),
        ),
        ("roundup_power2_divisions:[256:1,512:2],garbage", AllocatorSettings()),
    ],
)
@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_user_s_settings(
    name: str, text: str, settings: AllocatorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv(name, text)

    assert AllocatorSettings.of_this_process() == settings
