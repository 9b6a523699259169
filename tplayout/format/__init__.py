"""The canonical layout as pure functions: geometry, sharding, keys, digests, chunk objects, identity.

Nothing below this package does I/O or imports more than the standard library, blake3 and xxhash. FORMAT.md is
the normative text; the modules cite its numbers.
"""
