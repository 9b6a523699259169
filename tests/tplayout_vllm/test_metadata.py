"""What travels between the connector's sides is plain data that survives the trip."""

import copy

from tplayout.format.geometry import Geometry, Group, Part
from tplayout.staging.region import RegionRef
from tplayout_vllm.metadata import ChunkCopy, StagingRef, StepMetadata, Transfer

GEOMETRY = Geometry(
    16,
    (
        Group("full", "full", (0,), 2, (Part("k", 4), Part("v", 4)), "F32"),
        Group("window-32", "window", (1,), 2, (Part("k", 4), Part("v", 4)), "F32", 32),
    ),
)


def test_ranks_mark_the_groups_that_they_write() -> None:
    ref = StagingRef(RegionRef(1, 2, 3, "t"), GEOMETRY, "xxh3-128", None, {}, (((0, 0), (0, 1)), ((1, 0), (1, 1))))
    assert ref.marks_of((0, 1)) == [0]
    assert ref.marks_of((1, 0)) == [1]
    assert ref.marks_of((2, 0)) == []


def test_a_step_is_the_same_after_a_copy_between_processes() -> None:
    step = StepMetadata(saves=[Transfer("r", ([1, 2],), (ChunkCopy(3, 4, 16, 16, 32, (0, 1)),))])
    other = copy.deepcopy(step)
    assert other == step
    step.saves[0].tables[0].append(9)
    assert other.saves[0].tables == ([1, 2],)


def test_a_step_without_work_names_no_region() -> None:
    assert StepMetadata() == StepMetadata(None, [], [])
