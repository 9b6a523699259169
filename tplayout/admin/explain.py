"""Would a prompt hit? Chunk by chunk what a server of an identity would find in a store; and if it misses, why.

Looks where a server looks first. Only for what misses are other namespaces and prompts searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tplayout.admin.catalog import NO_SECRETS, Catalog, Namespace, Secrets, Stored, read_document, scan
from tplayout.admin.causes import Cause, Why, identity_causes, sibling_cause
from tplayout.admin.check import Checker, Fault, Verdict
from tplayout.admin.parallel import are_there, in_order
from tplayout.admin.prefixes import read_links
from tplayout.admin.progress import Progress, silent
from tplayout.admin.rate import RateLimit
from tplayout.admin.wanted import Wanted
from tplayout.cache.prefix import servable
from tplayout.errors import FormatError
from tplayout.format.digest import secret_id
from tplayout.format.encryption_key import EncryptionKey
from tplayout.format.identity import Identity
from tplayout.format.keys import ChunkId, object_name, prompt_chain
from tplayout.storage.base import Store

HIT, MISSING, DAMAGED, REFUSED = "hit", "missing", "damaged", "refused"
MAX_SCAN = 20_000  # chunks whose beginnings are read in search of a similar prompt
_NEAREST = 20  # other namespaces that are asked for the prompt


@dataclass(frozen=True)
class ChunkState:
    """One chunk of the prompt. detail: of what is wrong; objects: names, by group.

    state: HIT, MISSING, DAMAGED, or REFUSED: it is there, and a server with this secret and key does not take it.
    sound: of each object, whether it is there and good. A chunk without a window's part is a HIT that may not do.
    """

    chunk: ChunkId
    state: str
    detail: str
    objects: tuple[str, ...] = ()
    sound: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Nearby:
    """Another namespace: in what it differs, and how much of the prompt a server of it would find."""

    namespace: str
    model: str
    causes: tuple[Cause, ...]
    hit_chunks: int


@dataclass
class Explanation:
    """The answer. hit_chunks: as many as a server would use; causes: why not more, the most telling first."""

    identity: Identity
    exists: bool
    tokens: int
    chunks: list[ChunkState] = field(default_factory=list)
    hit_chunks: int = 0
    causes: list[Cause] = field(default_factory=list)
    nearby: list[Nearby] = field(default_factory=list)

    @property
    def hit_tokens(self) -> int:
        """Tokens that need not be computed."""
        return self.hit_chunks * self.identity.geometry.chunk_tokens

    @property
    def is_hit(self) -> bool:
        """Whether all full chunks of the prompt hit, of which there is one at least."""
        return 0 < len(self.chunks) == self.hit_chunks


@dataclass(frozen=True)
class Prompt:
    """A prompt as a request without adapter and multimodal items brings it."""

    tokens: Sequence[int]
    salt: str | None = None

    def chunks(self, identity: Identity) -> list[ChunkId]:
        """The full chunks that a server of this identity would look for."""
        return prompt_chain(identity.digest(), self.tokens, identity.geometry.chunk_tokens, self.salt)


def explain(
    store: Store,
    wanted: Wanted,
    prompt: Prompt,
    *,
    secrets: Secrets = NO_SECRETS,
    deep: bool = True,
    jobs: int = 8,
    max_scan: int = MAX_SCAN,
    progress: Progress = silent,
) -> Explanation:
    """What a server with this identity, secret and encryption key would find of the prompt, and why not more.

    deep: read and digest the objects; else their sizes, headers and keys. max_scan: chunks that are looked into for a
    similar prompt, the newest first. Raises StorageError when the store fails.
    """
    catalog: Catalog | None = None
    identity = wanted.identity
    if not wanted.weights_known:
        catalog = scan(store)
        identity = _with_their_weights(catalog, identity)
    space, fault = _namespace(store, identity)
    answer = Explanation(identity, space is not None, len(prompt.tokens))
    chunks = prompt.chunks(identity)
    if not chunks:
        answer.causes.append(_too_short(answer))
        return answer
    if fault is not None:
        text = f"namespace.json is damaged ({fault}): servers refuse it; `tplayout verify` tells the fix"
        answer.causes.append(Cause(Why.DOCUMENT, text, identity.namespace))
    answer.chunks = [ChunkState(chunk, MISSING, "") for chunk in chunks]
    if space is not None:
        _look_in(answer, store, space, secrets, deep, jobs, progress)
    if not answer.is_hit and not answer.causes:
        catalog = scan(store) if catalog is None else catalog
        answer.causes += _chunk_causes(store, catalog, answer, jobs, max_scan, secrets.encryption_key)
        answer.nearby = _nearby(store, catalog, answer, wanted, prompt)
        _conclude(answer, catalog)
    return answer


def _too_short(answer: Explanation) -> Cause:
    """Why a prompt without a full chunk cannot hit."""
    size = answer.identity.geometry.chunk_tokens
    text = f"the prompt has {answer.tokens} tokens, a chunk {size}: only full chunks are stored"
    return Cause(Why.TOO_SHORT, text, field="tokens", ours=answer.tokens, theirs=size)


def _look_in(
    answer: Explanation, store: Store, space: Namespace, secrets: Secrets, deep: bool, jobs: int, progress: Progress
) -> None:
    """Put into the answer what of its chunks the identity's namespace holds, and how many a server would use."""
    chunks = [one.chunk for one in answer.chunks]
    refused = _secret_cause(space, secrets.secret) or _key_cause(space, secrets.encryption_key)
    used = replace(secrets, encryption_key=None) if refused else secrets
    answer.chunks = _states(store, space, chunks, used, deep and refused is None, jobs, progress)
    if refused is None:
        answer.hit_chunks = _servable(answer.identity, answer.chunks)
    else:
        answer.chunks = [replace(one, state=REFUSED) if one.state == HIT else one for one in answer.chunks]
        answer.causes.append(refused)


def _namespace(store: Store, identity: Identity) -> tuple[Namespace | None, FormatError | None]:
    """The identity's namespace, if its document is there, without a listing; or why it cannot be read."""
    space = Namespace(identity.namespace)
    there = read_document(store, space)
    if space.document is not None:
        return space, None
    return None, space.fault if there else None


def _with_their_weights(catalog: Catalog, identity: Identity) -> Identity:
    """The identity with the weights of the namespace that is equal otherwise; as it is if there is none."""
    for space in catalog.namespaces.values():
        if space.document is not None:
            theirs = replace(identity, weights=space.document.identity.weights)
            if theirs == space.document.identity:
                return theirs
    return identity


def _secret_cause(space: Namespace, secret: bytes | None) -> Cause | None:
    """Why a server with this secret, or none, would refuse the namespace."""
    theirs = space.known().storage.key_id
    ours = None if secret is None else secret_id(secret)
    if ours == theirs:
        return None
    names = [f"the secret {one}" if one else "no secret" for one in (ours, theirs)]
    text = f"secret: the server has {names[0]}, the namespace was made with {names[1]}; the server refuses to start"
    return Cause(Why.SECRET, text, space.name, "storage.key_id", ours, theirs)


def _key_cause(space: Namespace, encryption_key: EncryptionKey | None) -> Cause | None:
    """Why a server with this encryption key, or none, would not use the namespace."""
    theirs = space.known().storage.encryption_key_id
    ours = None if encryption_key is None else encryption_key.id
    if ours == theirs:
        return None
    names = [f"the encryption key {one}" if one else "no encryption key" for one in (ours, theirs)]
    text = f"encryption: the server has {names[0]}, the namespace was made with {names[1]}; all of it is a miss"
    return Cause(Why.ENCRYPTION, text, space.name, "storage.encryption_key_id", ours, theirs)


def _states(
    store: Store,
    space: Namespace,
    chunks: Sequence[ChunkId],
    secrets: Secrets,
    deep: bool,
    jobs: int,
    progress: Progress,
) -> list[ChunkState]:
    groups, layouts = space.known().identity.geometry.groups, space.layouts()
    names = [[object_name(space.name, chunk.key, group) for group in range(len(groups))] for chunk in chunks]
    there = iter(are_there(store, [name for row in names for name in row]))
    found = [[next(there) for _ in row] for row in names]
    checker = Checker(store, Catalog({space.name: space}, [], []), secrets, deep, RateLimit(None))
    todo = [
        Stored(names[index][group], chunk.key, group, layouts[group].nbytes, None)
        for index, chunk in enumerate(chunks)
        for group in range(len(groups))
        if found[index][group]
    ]

    def check(stored: Stored) -> Verdict:
        if deep:
            return checker.object(stored)
        size = next((info.size for info in store.list(stored.name) if info.key == stored.name), stored.size)
        return checker.object(replace(stored, size=size))

    faults: dict[str, Fault] = {}
    nbytes = 0
    for done, (stored, verdict) in enumerate(zip(todo, in_order(check, todo, jobs), strict=True), 1):
        if verdict.fault is not None:
            faults[stored.name] = verdict.fault
        nbytes += verdict.nbytes
        progress(done, len(todo), nbytes)
    states = []
    for chunk, row, exist in zip(chunks, names, found, strict=True):
        absent = [group for group, is_there in zip(groups, exist, strict=True) if not is_there]
        bad = [name for name in row if name in faults]
        detail = "; ".join(f"{name}: {faults[name].reason}: {faults[name].detail}" for name in bad)
        if absent and len(groups) > 1:
            detail = detail or f"no object of {', '.join(group.name for group in absent)}"
        needed = [group for group in absent if group.window is None] or (len(absent) == len(groups))
        state = DAMAGED if bad else MISSING if needed else HIT
        sound = tuple(is_there and name not in faults for name, is_there in zip(row, exist, strict=True))
        states.append(ChunkState(chunk, state, detail, tuple(row), sound))
    return states


def _servable(identity: Identity, states: Sequence[ChunkState]) -> int:
    """How many chunks a server would use, windows considered."""

    def exist(places: Sequence[tuple[int, int]]) -> list[bool]:
        return [states[chunk].sound[group] for chunk, group in places]

    return servable(identity.geometry, len(states), exist)


def _chunk_causes(
    store: Store,
    catalog: Catalog,
    answer: Explanation,
    jobs: int,
    max_scan: int,
    encryption_key: EncryptionKey | None,
) -> list[Cause]:
    """Why the first chunk that a server cannot use is not there, in the namespace that is."""
    space = catalog.namespaces.get(answer.identity.namespace)
    if space is None or space.document is None:
        return []
    states, first = answer.chunks, answer.hit_chunks
    gone = next((index for index in range(first, len(states)) if states[index].state != HIT), None)
    if gone is None or states[first].state == HIT:
        text = f"a part of a sliding window that ends there is missing: only {first} chunks can be served"
        return [Cause(Why.WINDOW, text, space.name)]
    state = states[first]
    after = f"after chunk {first - 1}" if first else "at the beginning"
    if state.state == DAMAGED:
        text = f"chunk {first} is damaged ({state.detail}); `tplayout verify` tells the fix"
        return [Cause(Why.DAMAGED, text, space.name)]
    later = sum(other.state == HIT for other in states[first + 1 :])
    if later:
        text = f"gap {after}: chunk {first} is missing, {later} later ones are stored"
        return [Cause(Why.GAP, text, space.name, "chunk", first)]
    newest = sorted(space.objects, key=lambda stored: -(stored.modified or 0.0))[:max_scan]
    links = read_links(store, replace(space, objects=newest), jobs, encryption_key=encryption_key)
    parent = states[first].chunk.parent
    siblings = [chunk for chunk in links.ids.values() if chunk.parent == parent]
    return [replace(sibling_cause(state.chunk, siblings), namespace=space.name)]


def _nearby(store: Store, catalog: Catalog, answer: Explanation, wanted: Wanted, prompt: Prompt) -> list[Nearby]:
    """The other namespaces, those that hold the prompt first, then those that differ least."""
    others = []
    for space in catalog.namespaces.values():
        if space.document is not None and space.name != answer.identity.namespace:
            causes = identity_causes(answer.identity, space.document.identity, wanted.weights_known)
            others.append((len(causes), space, causes))
    others.sort(key=lambda item: (item[0], item[1].name))
    found = []
    for _, space, causes in others[:_NEAREST]:
        identity = space.known().identity
        hits = _listed(space, prompt.chunks(identity))
        found.append(Nearby(space.name, space.known().model, tuple(causes), hits))
    return sorted(found, key=lambda near: (-(near.hit_chunks > 0), len(near.causes)))


def _listed(space: Namespace, chunks: Sequence[ChunkId]) -> int:
    """How many chunks a server of that namespace would find, by the listing."""
    there = {stored.name for stored in space.objects}

    def exist(places: Sequence[tuple[int, int]]) -> list[bool]:
        return [object_name(space.name, chunks[chunk].key, group) in there for chunk, group in places]

    return servable(space.known().identity.geometry, len(chunks), exist)


def _conclude(answer: Explanation, catalog: Catalog) -> None:
    """Put the reason that other namespaces give where it belongs."""
    if not catalog.namespaces:
        answer.causes.append(Cause(Why.EMPTY, "the store holds no namespace: wrong URL, or nothing was stored yet"))
        return
    nearest = answer.nearby[0] if answer.nearby else None
    if nearest is None:
        if not answer.causes:
            answer.causes.append(Cause(Why.NOT_STORED, "no namespace of the store can be read; see `tplayout verify`"))
        return
    if not answer.exists:
        answer.causes += nearest.causes or (Cause(Why.NOT_STORED, "nothing is stored for this identity"),)
    elif nearest.hit_chunks > answer.hit_chunks:
        answer.causes = [*nearest.causes, *answer.causes]
