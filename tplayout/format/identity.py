"""Cache identity: what must match before two servers may share chunks, and the document that says so.

An identity is hashed from its canonical JSON; the hash names the namespace. It holds nothing of TP, PP, block
size, backend or host.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from blake3 import blake3

from tplayout.arguments import check_type
from tplayout.errors import ConfigError, FormatError, GeometryError, Reason
from tplayout.format.canonical import canonical_json, parse_json
from tplayout.format.digest import KEYED, digest_bytes
from tplayout.format.geometry import Geometry
from tplayout.format.keys import namespace_name
from tplayout.format.layout import CODEC_AES_256_GCM, CODEC_NONE, FORMAT_VERSION, check_codec, is_key_id

MAX_DOCUMENT_BYTES = 4 * 2**20
ABSENT = "<absent>"

_CONTEXT = "tplayout 1 identity"
_TEXT_LIMIT = 4096
_FIELDS = {"format", "weights", "config", "compute_dtype", "quantization", "geometry"}


@dataclass(frozen=True, eq=False)
class Identity:
    """What KV values are a function of, besides tokens and extras.

    weights: revision or fingerprint of the weight files. config: the model's fields that change KV values, as
    JSON values. compute_dtype: of the forward pass. quantization: of the weights. geometry: with the resolved
    KV dtype, scales and windows. Raises ConfigError for empty text or a config without canonical encoding.
    """

    weights: str
    config: Mapping[str, Any]
    compute_dtype: str
    quantization: str | None
    geometry: Geometry

    def __post_init__(self) -> None:
        for name in ("weights", "compute_dtype", "quantization"):
            value = getattr(self, name)
            if value is None and name == "quantization":
                continue
            if not isinstance(value, str) or not 1 <= len(value) <= _TEXT_LIMIT:
                raise ConfigError(f"identity {name} is {repr(value)[:80]}, must be text of 1 to {_TEXT_LIMIT}")
        if not isinstance(self.config, Mapping):
            raise ConfigError(f"identity config is {type(self.config).__name__}, must be an object")
        check_type("identity geometry", self.geometry, Geometry, "a Geometry")
        # A copy that later changes do not reach; nested as in the document, which has limits.
        nested = canonical_json({"identity": {"config": self.config}})
        copy = parse_json(nested, len(nested))
        object.__setattr__(self, "config", copy["identity"]["config"])

    def to_json(self) -> dict[str, Any]:
        """The document that is hashed."""
        return {
            "format": FORMAT_VERSION,
            "weights": self.weights,
            "config": self.config,
            "compute_dtype": self.compute_dtype,
            "quantization": self.quantization,
            "geometry": self.geometry.to_json(),
        }

    @classmethod
    def from_json(cls, value: Any) -> "Identity":
        """Strict inverse of `to_json`. Raises FormatError wrong-version or bad-namespace."""
        if not isinstance(value, dict):
            _bad("identity must be an object")
        if value.get("format") != FORMAT_VERSION or type(value["format"]) is not int:
            _wrong_version(value.get("format"))
        _check_fields("identity", value, _FIELDS)
        try:
            geometry = Geometry.from_json(value["geometry"])
            fields = {name: value[name] for name in _FIELDS - {"format", "geometry"}}
            return cls(geometry=geometry, **fields)
        except (ConfigError, GeometryError) as error:
            _bad(str(error))

    def digest(self) -> bytes:
        """32 bytes; the `namespace` argument of the key functions."""
        return blake3(canonical_json(self.to_json()), derive_key_context=_CONTEXT).digest()

    @property
    def namespace(self) -> str:
        """32 hex digits: the namespace's directory."""
        return namespace_name(self.digest())

    def diff(self, other: "Identity") -> list[tuple[str, Any, Any]]:
        """Fields that differ as (dotted path, ours, theirs); ABSENT stands for a field one side lacks."""
        return list(_differences("", self.to_json(), other.to_json()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.digest() == other.digest()

    def __hash__(self) -> int:
        return int.from_bytes(self.digest()[:8], "little")


@dataclass(frozen=True)
class StorageFacts:
    """How a namespace's objects are stored; fixed when it is created.

    key_id: names the secret. encryption_key_id: names the encryption key of the codec aes-256-gcm.
    """

    digest: str
    key_id: str | None = None
    codec: str = CODEC_NONE
    encryption_key_id: str | None = None

    def to_json(self) -> dict[str, str | None]:
        """The member `storage` of the document."""
        facts = {"codec": self.codec, "digest": self.digest, "key_id": self.key_id}
        return facts if self.encryption_key_id is None else {**facts, "encryption_key_id": self.encryption_key_id}


@dataclass(frozen=True)
class NamespaceDocument:
    """The content of namespace.json. model: a name for people, in no identity."""

    identity: Identity
    storage: StorageFacts
    model: str

    def to_bytes(self) -> bytes:
        """Readable JSON; a function of the fields alone. ConfigError for one that no reader would accept."""
        check_type("model", self.model, str, "text, a name for people")
        canonical_json(self.model)
        document = {
            "tplayout": FORMAT_VERSION,
            "model": self.model,
            "namespace": self.identity.namespace,
            "identity_digest": self.identity.digest().hex(),
            "storage": self.storage.to_json(),
            "identity": self.identity.to_json(),
        }
        data = (json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
        if len(data) > MAX_DOCUMENT_BYTES:
            raise ConfigError(f"namespace.json would have {len(data)} bytes, at most {MAX_DOCUMENT_BYTES}")
        return data


def parse_namespace_document(data: bytes | memoryview, expected_namespace: str) -> NamespaceDocument:
    """Parse and check namespace.json. expected_namespace: the directory it was found in.

    Raises FormatError: too-large, not-utf8, not-json, duplicate-name, too-deep; wrong-version, bad-namespace,
    unsupported-digest, unsupported-codec; wrong-namespace when the identity is not the directory's.
    """
    document = parse_json(data, MAX_DOCUMENT_BYTES)
    if not isinstance(document, dict):
        _bad("must be an object")
    version = document.get("tplayout")
    if version != FORMAT_VERSION or type(version) is not int:
        _wrong_version(version)
    _check_fields(
        "namespace.json", document, {"tplayout", "model", "namespace", "identity_digest", "storage", "identity"}
    )
    if not isinstance(document["model"], str):
        _bad(f"model is {repr(document['model'])[:80]}, must be text")
    storage = _storage_facts(document["storage"])
    identity = Identity.from_json(document["identity"])
    stated = (document["identity_digest"], document["namespace"], expected_namespace)
    if stated != (identity.digest().hex(), identity.namespace, identity.namespace):
        detail = f"the identity is that of {identity.namespace}, the document says {repr(stated)[:200]}"
        raise FormatError(Reason.WRONG_NAMESPACE, detail)
    return NamespaceDocument(identity, storage, document["model"])


def _storage_facts(value: Any) -> StorageFacts:
    codec = value.get("codec") if isinstance(value, dict) else None
    if isinstance(codec, str):
        check_codec(codec)  # first: another codec may have members of its own
    names = ["codec", "digest", "key_id", *(["encryption_key_id"] if codec == CODEC_AES_256_GCM else [])]
    if not isinstance(value, dict) or value.keys() != set(names):
        _bad(f"storage must have exactly {', '.join(names)}")
    digest, key_id = value["digest"], value["key_id"]
    if not isinstance(digest, str) or not isinstance(codec, str):
        _bad("storage digest and codec must be text")
    digest_bytes(digest)
    is_id = isinstance(key_id, str) and is_key_id(key_id)
    if is_id != (digest == KEYED) or (key_id is not None and not is_id):
        _bad(f"storage key_id is {repr(key_id)[:80]} with digest {digest}")
    encryption = value.get("encryption_key_id")
    if codec == CODEC_AES_256_GCM and not (isinstance(encryption, str) and is_key_id(encryption)):
        _bad(f"storage encryption_key_id is {repr(encryption)[:80]}, must be 16 hex digits")
    return StorageFacts(digest, key_id, codec, encryption)


def _differences(path: str, ours: Any, theirs: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        names = sorted(ours.keys() | theirs.keys())
        pairs = [(f"{path}.{n}" if path else n, ours.get(n, ABSENT), theirs.get(n, ABSENT)) for n in names]
    elif _is_nested(ours) and _is_nested(theirs):
        longest = range(max(len(ours), len(theirs)))
        pairs = [(f"{path}[{i}]", _item(ours, i), _item(theirs, i)) for i in longest]
    else:
        same = canonical_json(ours) == canonical_json(theirs)
        return [] if same else [(path, ours, theirs)]
    return [difference for pair in pairs for difference in _differences(*pair)]


def _is_nested(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, dict | list) for item in value)


def _item(values: list[Any], index: int) -> Any:
    return values[index] if index < len(values) else ABSENT


def _check_fields(what: str, document: dict[str, Any], fields: set[str]) -> None:
    """FormatError bad-namespace that names what is missing, else what does not belong there."""
    if missing := sorted(fields - document.keys()):
        _bad(f"{what} lacks {', '.join(map(repr, missing))}")
    if foreign := sorted(document.keys() - fields):
        _bad(f"{what} has {', '.join(map(repr, foreign))}, which does not belong there")


def _bad(detail: str) -> NoReturn:
    raise FormatError(Reason.BAD_NAMESPACE, detail[:400])


def _wrong_version(found: Any) -> NoReturn:
    raise FormatError(Reason.WRONG_VERSION, f"format {repr(found)[:40]}, this version reads {FORMAT_VERSION}")
