"""What work is told stays what it is when another watches a part of it."""

from tplayout.admin.work import SIMPLY, Work


def test_another_watcher_changes_nothing_else():
    seen = []
    part = Work(jobs=3, dry_run=True).telling(lambda done, total, nbytes: seen.append((done, total, nbytes)))
    part.progress(1, None, 5)
    assert (part.jobs, part.dry_run, seen) == (3, True, [(1, None, 5)])


def test_without_a_word_work_is_done_one_by_one_and_nobody_watches():
    assert (SIMPLY.jobs, SIMPLY.dry_run) == (1, False)
    SIMPLY.progress(1, 1, 1)
