"""Where secrets and encryption keys come from: files and the environment, and who else may read those files."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from tplayout.errors import ConfigError

SECRET_ENV = "TPLAYOUT_SECRET_KEY"
ENCRYPTION_KEY_ENV = "TPLAYOUT_ENCRYPTION_KEY"

_READ_BY_OTHERS = stat.S_IRGRP | stat.S_IROTH


def read_key_file(path: str) -> bytes:
    """What a file holds, without blanks around it. ConfigError if it cannot be read, or holds nothing."""
    try:
        data = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"key file {path} cannot be read: {error.strerror}") from None
    except ValueError:  # a zero byte
        raise ConfigError(f"key file {path!r} cannot be read: that is no path") from None
    if not data:
        raise ConfigError(f"key file {path} is empty: put the key into it (make one: openssl rand -hex 32)")
    return data


def key_in_environment(name: str, environ: Mapping[str, str] = os.environ) -> bytes | None:
    """The bytes of a variable, whatever they are; None if it is not set, or empty."""
    return os.fsencode(environ.get(name, "")) or None


def check_secret(data: bytes, source: str) -> bytes:
    """The secret itself. ConfigError, which names the source, if it is too short to be one."""
    from tplayout.format.digest import MIN_SECRET_BYTES

    if len(data) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"{source} holds a secret of {len(data)} bytes, must have {MIN_SECRET_BYTES} or more "
            "(try: openssl rand -hex 32)"
        )
    return data


def exposure(path: str) -> str:
    """One line for whoever may change that, "" if only the owner may read the file, or it is none (a pipe, say).

    A reason to warn and not to refuse: orchestrators mount keys with modes of their own.
    """
    try:
        info = os.stat(path)
    except (OSError, ValueError):
        return ""
    if not stat.S_ISREG(info.st_mode) or not info.st_mode & _READ_BY_OTHERS:
        return ""
    return (
        f"key file {path} has mode {stat.S_IMODE(info.st_mode):04o}: others on this machine may read it; chmod 600 it"
    )
