"""What a staging pool is made from: sizes, places, limits and times, in one frozen record."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

from tplayout.cache.codec import begun_codec
from tplayout.errors import ConfigError
from tplayout.format.digest import CellHasher, make_hasher
from tplayout.format.encryption_key import EncryptionKey
from tplayout.format.geometry import Geometry
from tplayout.format.layout import CODEC_NONE, ChunkLayout, layouts_of
from tplayout.staging.protocol import Config
from tplayout.staging.region import Region, RegionPlan


@dataclass(frozen=True, kw_only=True)
class StagingPlan:
    """The settings of one `Stager`. Times are seconds; `repr` shows no secret.

    url, storage_options, timeout_s: the store, and the deadline of one operation on it.
    max_bytes: what all files of a local store may have together; 0 for no limit.
    namespace: the identity's 32-byte digest. document: namespace.json, written before the first save if the
        store does not have it; empty to leave that to others. agreed: the store was seen to hold none, or one that
        says the same; one that is found damaged is then written anew.
    geometry, digest, secret, codec, encryption_key: the format. digest None: the default for a secret, or for none.
    slots: chunks that the region holds. writers: for each group, how many ranks must mark it.
    io_processes, load_threads, save_threads: I/O processes, and threads of each.
    loads_in_flight: loads handed out at a time over all lookups; 0: enough to keep the threads busy while the
        engine's steps keep the scheduler from handing out more.
    load_deadline_s: how long a lookup may take from when it is first asked about.
    slot_wait_s: how long a lookup that needs a slot waits for one before it ends with what it has.
    unasked_s: after that long, a lookup that nobody asks about gives way to one that needs slots.
    save_wait_s: how long writers may take to mark a chunk. drain_s: how long I/O processes outlive us.
    negative_cache_s: how long a damaged chunk is not loaded again.
    """

    url: str
    namespace: bytes
    geometry: Geometry
    slots: int
    writers: tuple[int, ...]
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    timeout_s: float = 30.0
    max_bytes: int = 0
    secret: bytes | None = field(default=None, repr=False)
    encryption_key: EncryptionKey | None = None
    digest: str | None = None
    codec: str = CODEC_NONE
    document: bytes = field(default=b"", repr=False)
    agreed: bool = False
    io_processes: int = 2
    load_threads: int = 4
    save_threads: int = 2
    loads_in_flight: int = 0
    load_deadline_s: float = 3.0
    slot_wait_s: float = 0.05
    unasked_s: float = 1.0
    save_wait_s: float = 60.0
    drain_s: float = 10.0
    negative_cache_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("slots", "io_processes", "load_threads", "save_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"staging: {name} is {getattr(self, name)}, must be 1 or more")
        if len(self.writers) != len(self.geometry.groups):
            raise ConfigError(f"staging: {len(self.writers)} writer counts for {len(self.geometry.groups)} groups")
        begun_codec(self.codec, self.encryption_key)
        if len(self.namespace) != 32:
            raise ConfigError(f"staging: namespace has {len(self.namespace)} bytes, must be the 32-byte digest")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a staging plan is not pickled, since it holds secrets")

    @cached_property
    def hasher(self) -> CellHasher:
        """The hasher of digest and secret. Raises FormatError or ConfigError if they do not agree."""
        return make_hasher(self.digest, self.secret)

    @cached_property
    def layouts(self) -> tuple[ChunkLayout, ...]:
        """Layout of each group's object."""
        return layouts_of(self.geometry, self.hasher.name, self.hasher.key_id)

    @property
    def region_plan(self) -> RegionPlan:
        """Sizes of the region."""
        return RegionPlan(self.slots, tuple(layout.nbytes for layout in self.layouts), self.writers)

    @property
    def most_loads(self) -> int:
        """Loads handed out at a time."""
        return self.loads_in_flight or 8 * self.io_processes * self.load_threads

    @property
    def most_saves(self) -> int:
        """Slots that saves may hold at a time: with a slow store there must be some left to load into."""
        return self.slots - self.reserve

    @property
    def reserve(self) -> int:
        """Slots that are left free by saves, and by loads that nobody waits for yet."""
        return self.slots // 4

    def config(self, region: Region) -> Config:
        """The first message to an I/O process that works on `region`."""
        return Config(
            url=self.url,
            storage_options=dict(self.storage_options),
            timeout_s=self.timeout_s,
            max_bytes=self.max_bytes,
            secret=None if self.secret is None else self.secret.hex(),
            encryption_key=None if self.encryption_key is None else self.encryption_key.reveal(),
            namespace=self.namespace.hex(),
            geometry=self.geometry.to_json(),
            digest=self.hasher.name,
            document=self.document.decode(),
            agreed=self.agreed,
            codec=self.codec,
            region_bytes=region.plan.nbytes,
            region_token=region.ref.token,
            load_threads=self.load_threads,
            save_threads=self.save_threads,
            save_wait_s=self.save_wait_s,
            drain_s=self.drain_s,
        )
