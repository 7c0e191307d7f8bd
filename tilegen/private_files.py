"""Files that nobody else can have written, the only ones that code is taken from.

The rule is that of ssh for its keys: the file and all folders above it belong to this user or to
root, and nobody else may write to them. Two kinds of folders are let pass although others may write
to them: those where only owners may rename and delete, such as /tmp, and those of a group that has
no other member.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from pathlib import Path

ROOT = 0


class NotPrivate(Exception):
    """Somebody else could have written the file; the message names the path and says why."""


def check_private(path: Path) -> None:
    """Raise NotPrivate if others could have written what lies at `path`, or could put it there.

    What does not exist yet is in order. Links are followed first.
    """
    real = Path(os.path.realpath(path))
    closed = False  # whether only this user gets past one of the folders above
    for one in (*reversed(real.parents), real):
        try:
            found = one.lstat()
        except FileNotFoundError:
            return
        except OSError as error:
            raise NotPrivate(f"{str(one)!r} cannot be examined: {error.strerror}") from None
        if found.st_uid not in (ROOT, os.geteuid()):
            raise NotPrivate(f"{str(one)!r} belongs to {_user(found.st_uid)}")
        if not closed and (who := _others_who_may_write(found)):
            raise NotPrivate(f"{str(one)!r} can be written to by {who}")
        closed |= stat.S_ISDIR(found.st_mode) and not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)


def read_private(path: Path) -> bytes | None:
    """Read a private file; None if there is none. Raises NotPrivate."""
    check_private(path)
    try:
        # Without O_NONBLOCK, opening a pipe that nobody writes to would wait for ever.
        handle = os.open(os.path.realpath(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NotPrivate(f"{str(path)!r} cannot be opened: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise NotPrivate(f"{str(path)!r} is no regular file")
        with open(handle, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(handle)


def _others_who_may_write(found: os.stat_result) -> str:
    mode = found.st_mode
    if stat.S_ISDIR(mode) and mode & stat.S_ISVTX:
        return ""
    if mode & stat.S_IWOTH:
        return "anybody"
    if mode & stat.S_IWGRP and not _is_own_group(found.st_gid):
        return f"group {_group(found.st_gid)}"
    return ""


def _is_own_group(gid: int) -> bool:
    """True for a group with this user as its only member, as many systems make for each user."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    own = (user.pw_gid, user.pw_name)
    return (group.gr_gid, group.gr_name) == own and {*group.gr_mem} <= {user.pw_name}


def _user(uid: int) -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return f"user {uid}"


def _group(gid: int) -> str:
    with contextlib.suppress(KeyError):
        return grp.getgrgid(gid).gr_name
    return str(gid)
