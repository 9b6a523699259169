"""Lines that could come by the thousand come once a minute, and nobody else's line is lost for it."""

from tplayout.staging.log_limit import LogLimit


def test_one_line_a_minute_that_counts_the_others():
    now = [100.0]
    limit = LogLimit(lambda: now[0])
    assert limit.allow("a") == ""
    assert [limit.allow("a") for _ in range(3)] == [None] * 3
    assert limit.allow("b") == ""
    now[0] += 59.9
    assert limit.allow("a") is None
    now[0] += 0.1
    assert limit.allow("a") == " (4 more like it since the last such line)"
    now[0] += 60.0
    assert limit.allow("a") == ""


def test_endless_kinds_take_no_endless_memory():
    limit = LogLimit(lambda: 0.0)
    assert all(limit.allow(str(kind)) == "" for kind in range(10_000))
    assert len(limit._kinds) <= 256
