"""The staging region: one memfd that scheduler, workers and I/O processes map.

Layout: a header page, the mark words, then page-aligned slots. A slot holds the objects of one chunk, each
at a fixed page-aligned offset, so that an object is published or fetched without a copy. The kernel frees the
memory with its last user, whatever kills that one; nothing here has a name in a file system.

Marks are how writers say that they are done: one 32-bit word for each slot, group and writer, which holds the
generation of the slot that the writer has filled. They need no lock, since each word has one writer.
"""

import contextlib
import fcntl
import json
import mmap
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tplayout.errors import TPLayoutError

PAGE = 4096
LAST_GENERATION = 2**31 - 1
VOID = 2**31  # set in a mark: the writer is done, but its part must not be used

_MAGIC = b"TPLSTG\x00\x01"
_PREFIX = len(_MAGIC) + 4
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class RegionError(TPLayoutError):
    """The region cannot be created or mapped, or is not the one that the reference means."""


@dataclass(frozen=True)
class RegionRef:
    """Where another process of this machine finds the region. `token` tells it from any other region."""

    pid: int
    fd: int
    nbytes: int
    token: str

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dict."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "RegionRef":
        """The inverse of `to_json`. Raises RegionError on anything else."""
        try:
            return cls(int(value["pid"]), int(value["fd"]), int(value["nbytes"]), str(value["token"]))
        except (KeyError, TypeError, ValueError) as error:
            raise RegionError(f"not a region reference: {error!r}") from None


@dataclass(frozen=True)
class RegionPlan:
    """Sizes of a region. One entry a group: object_bytes of a slot, and how many writers must mark them."""

    slots: int
    object_bytes: tuple[int, ...]
    writers: tuple[int, ...]

    def __post_init__(self) -> None:
        groups = len(self.object_bytes)
        if self.slots < 1 or groups < 1 or len(self.writers) != groups:
            raise RegionError(f"no region of {self.slots} slots, {groups} objects each, writers {self.writers}")
        if min(self.object_bytes) < 1 or min(self.writers) < 1:
            raise RegionError(f"no region with objects of {self.object_bytes} bytes, writers {self.writers}")

    @property
    def slot_bytes(self) -> int:
        """Bytes from one slot to the next."""
        return sum(map(_whole_pages, self.object_bytes))

    @property
    def slots_start(self) -> int:
        """Offset of slot 0."""
        return PAGE + _whole_pages(4 * self.slots * sum(self.writers))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole region."""
        return self.slots_start + self.slots * self.slot_bytes


class Region:
    """A mapped region. Make one with `create`, `attach` or `adopt`; views of it keep the memory alive."""

    def __init__(self, fd: int, plan: RegionPlan, token: str, memory: mmap.mmap) -> None:
        """Internal: wrap what `create`, `attach` or `adopt` have opened."""
        self.plan = plan
        self._fd = fd
        self._token = token
        self._memory = memory
        self._bytes = memoryview(memory)
        self._words = self._bytes[PAGE : plan.slots_start].cast("I")
        paged = [_whole_pages(nbytes) for nbytes in plan.object_bytes]
        self._group_start = [sum(paged[:group]) for group in range(len(paged))]
        self._word_start = [sum(plan.writers[:group]) for group in range(len(paged))]
        self._words_a_slot = sum(plan.writers)

    @classmethod
    def create(cls, plan: RegionPlan) -> "Region":
        """A new region. Its memory is not touched, so it costs nothing until used."""
        token = secrets.token_hex(16)
        fd = os.memfd_create("tplayout-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, plan.nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            os.pwrite(fd, _encode_header(plan, token), 0)
            return cls(fd, plan, token, mmap.mmap(fd, plan.nbytes))
        except OSError as error:
            os.close(fd)
            raise RegionError(f"cannot make a staging region of {plan.nbytes} bytes: {error}") from None

    @classmethod
    def attach(cls, ref: RegionRef) -> "Region":
        """Map the region of another process through /proc. Raises RegionError if it is gone."""
        path = f"/proc/{ref.pid}/fd/{ref.fd}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RegionError(f"staging region {path} cannot be opened: {error.strerror}") from None
        return cls.adopt(fd, ref.nbytes, ref.token)

    @classmethod
    def adopt(cls, fd: int, nbytes: int, token: str) -> "Region":
        """Map the region behind an open descriptor, which the region then owns (it is closed on failure)."""
        try:
            _check_file(fd, nbytes)
            plan = _decode_header(os.pread(fd, PAGE, 0), token)
            if plan.nbytes != nbytes:
                raise RegionError(f"staging region has {nbytes} bytes, its header means {plan.nbytes}")
            return cls(fd, plan, token, mmap.mmap(fd, nbytes))
        except OSError as error:
            os.close(fd)
            raise RegionError(f"staging region cannot be mapped: {error}") from None
        except RegionError:
            os.close(fd)
            raise

    @property
    def ref(self) -> RegionRef:
        """How other processes find this mapping; valid while this process lives and has not closed it."""
        return RegionRef(os.getpid(), self._fd, self.plan.nbytes, self._token)

    def fileno(self) -> int:
        """The region's descriptor, to be inherited by an I/O process."""
        return self._fd

    @property
    def memory(self) -> memoryview:
        """The whole mapping, for page-locking it."""
        return self._bytes

    def slot(self, slot: int, group: int) -> memoryview:
        """The object of one group in one slot: writable, exactly as long as the object."""
        if not 0 <= slot < self.plan.slots:
            raise IndexError(f"slot {slot} of {self.plan.slots}")
        start = self.plan.slots_start + slot * self.plan.slot_bytes + self._group_start[group]
        return self._bytes[start : start + self.plan.object_bytes[group]]

    def mark(self, slot: int, group: int, writer: int, generation: int, *, usable: bool = True) -> None:
        """A writer's last word on its part of an object: it is written, or (not usable) it will not be.

        The writer must not touch the slot afterwards. Readers look milliseconds later, which is what orders
        its stores before the mark on machines that reorder stores.
        """
        self._words[self._word(slot, group, writer)] = generation if usable else generation | VOID

    def marked(self, slot: int, group: int, generation: int) -> bool:
        """All writers have filled their parts in this generation."""
        return all(word == generation for word in self._marks(slot, group))

    def settled(self, slot: int, group: int, generation: int) -> bool:
        """All writers are done with the object, whether or not their parts are usable."""
        return all(word & ~VOID == generation for word in self._marks(slot, group))

    def clear_marks(self, slot: int, group: int) -> None:
        """Forget all marks of an object, so that it can be filled again in the same generation."""
        for writer in range(self.plan.writers[group]):
            self._words[self._word(slot, group, writer)] = 0

    def close(self) -> None:
        """Let go of the region. Memory that views still show stays mapped until they are gone. Idempotent."""
        if self._fd < 0:
            return
        self._words.release()
        self._bytes.release()
        os.close(self._fd)
        self._fd = -1
        with contextlib.suppress(BufferError):  # a slot's view is still in use; the mapping goes with it
            self._memory.close()

    def _word(self, slot: int, group: int, writer: int) -> int:
        if not (0 <= slot < self.plan.slots and 0 <= writer < self.plan.writers[group]):
            raise IndexError(f"slot {slot}, group {group}, writer {writer} in {self.plan}")
        return slot * self._words_a_slot + self._word_start[group] + writer

    def _marks(self, slot: int, group: int) -> Sequence[int]:
        first = self._word(slot, group, 0)
        return self._words[first : first + self.plan.writers[group]]


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _encode_header(plan: RegionPlan, token: str) -> bytes:
    text = json.dumps({"token": token, **asdict(plan)}, separators=(",", ":")).encode()
    if _PREFIX + len(text) > PAGE:
        raise RegionError(f"a region of {len(plan.writers)} groups does not fit its header page")
    return _MAGIC + len(text).to_bytes(4, "little") + text


def _decode_header(page: bytes, token: str) -> RegionPlan:
    size = int.from_bytes(page[len(_MAGIC) : _PREFIX], "little")
    if page[: len(_MAGIC)] != _MAGIC or _PREFIX + size > len(page):
        raise RegionError("not a tplayout staging region (or of another version)")
    try:
        header = json.loads(page[_PREFIX : _PREFIX + size])
        found = header["token"]
        plan = RegionPlan(int(header["slots"]), tuple(header["object_bytes"]), tuple(header["writers"]))
    except (ValueError, KeyError, TypeError):
        raise RegionError("staging region with a damaged header") from None
    if found != token:
        raise RegionError("this staging region is not the one that was meant (its owner was restarted)")
    return plan


def _check_file(fd: int, nbytes: int) -> None:
    """Size and seals: without the seals a shrunken file would kill whoever reads it."""
    size = os.fstat(fd).st_size
    if size != nbytes:
        raise RegionError(f"staging region has {size} bytes, expected {nbytes}")
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise RegionError("staging region is not sealed against resizing")
