"""The staging region: layout, marks, attaching from another process, and what is refused."""

import fcntl
import json
import os
import subprocess
import sys

import pytest

from tplayout.staging.region import LAST_GENERATION, PAGE, Region, RegionError, RegionPlan, RegionRef

PLAN = RegionPlan(slots=3, object_bytes=(5000, 4096), writers=(2, 1))


@pytest.fixture
def region():
    region = Region.create(PLAN)
    yield region
    region.close()


def resident_bytes(region):
    return os.stat(region.fileno()).st_blocks * 512


def test_objects_are_page_aligned_disjoint_and_exactly_long(region):
    assert PLAN.slot_bytes == 3 * PAGE
    assert PLAN.nbytes == os.fstat(region.fileno()).st_size
    spans = []
    for slot in range(3):
        for group, nbytes in enumerate(PLAN.object_bytes):
            view = region.slot(slot, group)
            assert len(view) == nbytes
            view[:] = bytes([slot * 16 + group]) * nbytes
            spans.append((slot, group))
    for slot, group in spans:
        assert bytes(region.slot(slot, group)) == bytes([slot * 16 + group]) * PLAN.object_bytes[group]
    assert region.slot(1, 1).obj is region.memory.obj


def test_creation_touches_no_slot_memory():
    sparse = Region.create(RegionPlan(slots=64, object_bytes=(1 << 20,), writers=(1,)))
    assert resident_bytes(sparse) <= 2 * PAGE
    sparse.close()


def test_marks_belong_to_slot_group_writer_and_generation(region):
    region.mark(1, 0, 0, 7)
    assert not region.marked(1, 0, 7)
    assert not region.settled(1, 0, 7)
    region.mark(1, 0, 1, 7)
    assert region.marked(1, 0, 7)
    assert not region.marked(1, 0, 8)
    assert not region.marked(0, 0, 7)
    assert not region.marked(1, 1, 7)
    region.clear_marks(1, 0)
    assert not region.settled(1, 0, 7)


def test_a_void_mark_settles_but_does_not_complete(region):
    region.mark(2, 0, 0, LAST_GENERATION)
    region.mark(2, 0, 1, LAST_GENERATION, usable=False)
    assert not region.marked(2, 0, LAST_GENERATION)
    assert region.settled(2, 0, LAST_GENERATION)


@pytest.mark.parametrize("where", [(3, 0, 0), (-1, 0, 0), (0, 0, 2), (0, 1, 1)])
def test_marks_outside_are_refused(region, where):
    with pytest.raises(IndexError):
        region.mark(*where, 1)


@pytest.mark.parametrize("slot", [3, -1])
def test_slots_outside_are_refused(region, slot):
    with pytest.raises(IndexError):
        region.slot(slot, 0)


def test_another_process_writes_and_marks_through_proc(region):
    code = (
        "import sys, json; from tplayout.staging.region import *\n"
        "region = Region.attach(RegionRef.from_json(json.loads(sys.argv[1])))\n"
        "region.slot(2, 1)[:3] = b'abc'; region.mark(2, 1, 0, 5); region.close()\n"
    )
    subprocess.run([sys.executable, "-c", code, json.dumps(region.ref.to_json())], check=True)
    assert bytes(region.slot(2, 1)[:3]) == b"abc"
    assert region.marked(2, 1, 5)


def test_attach_refuses_what_is_gone_another_or_another_size(region):
    ref = region.ref
    for wrong, message in (
        (RegionRef(ref.pid, 10**6, ref.nbytes, ref.token), "cannot be opened"),
        (RegionRef(ref.pid, ref.fd, ref.nbytes + PAGE, ref.token), "expected"),
        (RegionRef(ref.pid, ref.fd, ref.nbytes, "0" * 32), "not the one"),
    ):
        with pytest.raises(RegionError, match=message):
            Region.attach(wrong)


def test_adopt_refuses_what_is_no_region(tmp_path):
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PLAN.nbytes)
    with pytest.raises(RegionError, match="sealed"):
        Region.adopt(os.dup(fd), PLAN.nbytes, "")
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with pytest.raises(RegionError, match="not a tplayout staging region"):
        Region.adopt(os.dup(fd), PLAN.nbytes, "")
    os.pwrite(fd, b"TPLSTG\x00\x01\x03\x00\x00\x00{}x", 0)
    with pytest.raises(RegionError, match="damaged header"):
        Region.adopt(os.dup(fd), PLAN.nbytes, "")
    os.close(fd)
    with pytest.raises(RegionError):
        Region.adopt(os.open(tmp_path, os.O_RDONLY), PLAN.nbytes, "")


def test_nobody_can_shrink_it_or_open_it_with_other_rights(region):
    with pytest.raises(PermissionError):
        os.ftruncate(region.fileno(), PAGE)
    assert os.fstat(region.fileno()).st_mode & 0o777 == 0o600
    assert not os.get_inheritable(region.fileno())


def test_close_is_idempotent_and_leaves_views_valid(region):
    view = region.slot(0, 0)
    view[:2] = b"ok"
    region.close()
    region.close()
    assert bytes(view[:2]) == b"ok"


@pytest.mark.parametrize("sizes", [(0, (1,), (1,)), (1, (), ()), (1, (1,), (1, 1)), (1, (0,), (1,)), (1, (1,), (0,))])
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(RegionError):
        RegionPlan(*sizes)


def test_a_region_that_memory_cannot_hold_is_refused_in_one_line():
    with pytest.raises(RegionError, match="cannot make a staging region"):
        Region.create(RegionPlan(slots=1, object_bytes=(2**62,), writers=(1,)))


def test_the_ref_round_trips_and_rejects_garbage(region):
    assert RegionRef.from_json(region.ref.to_json()) == region.ref
    with pytest.raises(RegionError):
        RegionRef.from_json({"pid": "x"})
