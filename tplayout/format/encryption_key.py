"""The key that chunk objects are encrypted with, its id, and what it gives each object."""

import struct

from blake3 import blake3

from tplayout.errors import ConfigError
from tplayout.format.digest import KEY_ID_BYTES

ENCRYPTION_KEY_BYTES = 32

_OBJECT_CONTEXT = "tplayout 1 object encryption"
_KEY_ID_CONTEXT = "tplayout 1 encryption key id"


class EncryptionKey:
    """A key, and the id that names it. It shows in no text, and is not pickled."""

    def __init__(self, key: bytes) -> None:
        """key: 32 random bytes. ConfigError for another length."""
        if len(key) != ENCRYPTION_KEY_BYTES:
            raise ConfigError(f"encryption key of {len(key)} bytes, must have {ENCRYPTION_KEY_BYTES}")
        self._key = key
        self.id = blake3(key, derive_key_context=_KEY_ID_CONTEXT).digest(KEY_ID_BYTES).hex()

    @classmethod
    def parse(cls, text: bytes, source: str) -> "EncryptionKey":
        """From 64 hex digits. source: where they come from, for the ConfigError that other text is."""
        try:
            digits = text.strip().decode("ascii")
            if len(digits) == 2 * ENCRYPTION_KEY_BYTES and digits.isalnum():
                return cls(bytes.fromhex(digits))
        except ValueError:
            pass
        raise ConfigError(f"{source} holds no encryption key, which is 64 hex digits (make one: openssl rand -hex 32)")

    def __repr__(self) -> str:
        return f"<encryption key {self.id}>"

    def __reduce__(self) -> str:
        raise TypeError("an encryption key is not pickled")

    def reveal(self) -> str:
        """The key itself, 64 hex digits: for the pipe to an I/O process only."""
        return self._key.hex()

    def of_object(self, salt: bytes, chunk_key: bytes, group_index: int) -> bytes:
        """The key that one object is sealed under, 32 bytes."""
        material = self._key + salt + chunk_key + struct.pack("<I", group_index)
        return blake3(material, derive_key_context=_OBJECT_CONTEXT).digest()
