"""How a piece of work is done: what all verbs that move many objects are told."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tplayout.admin.progress import Progress, silent


@dataclass(frozen=True)
class Work:
    """jobs: objects at the same time. progress: is told how far it is. dry_run: count, and write nothing."""

    jobs: int = 1
    progress: Progress = silent
    dry_run: bool = False

    def telling(self, progress: Progress) -> Work:
        """The same, of which another is told."""
        return replace(self, progress=progress)


SIMPLY = Work()
