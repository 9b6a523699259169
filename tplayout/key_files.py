"""Files that hold a secret or an encryption key: who else on this machine may read them."""

import os
import stat

_READ_BY_OTHERS = stat.S_IRGRP | stat.S_IROTH


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
