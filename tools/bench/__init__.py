"""Benchmarks: what copies, digests, stores and lookups cost, against what the machine and bare clients can do."""
