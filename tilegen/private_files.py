"""Files that no other user can have written. Code is imported from such files only.

The rule is ssh's rule for keys: the file and all folders above it belong to this user or to root,
and nobody else may write to them. Two kinds of folders are accepted although others may write to
them: folders where only owners may rename and delete, such as /tmp, and folders of a group without
other members.
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
    """A file that another user could have written; the message names the path and the reason."""


def check_private(path: Path) -> None:
    """Check that no other user could have written or created the file at `path`.

    A path that does not exist is accepted. Links are followed first. Raises NotPrivate.
    """
    real = Path(os.path.realpath(path))
    is_closed = False  # True below a folder that other users cannot enter
    for part in (*reversed(real.parents), real):
        try:
            info = part.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise NotPrivate(f"{str(part)!r} cannot be examined: {error.strerror}") from None
        if part != real and stat.S_ISCHR(info.st_mode):
            return  # nothing exists below /dev/null
        if info.st_uid not in (ROOT, os.geteuid()):
            raise NotPrivate(f"{str(part)!r} belongs to {_user(info.st_uid)}")
        if not is_closed and (others := _others_who_may_write(info)):
            raise NotPrivate(f"{str(part)!r} can be written to by {others}")
        is_closed |= stat.S_ISDIR(info.st_mode) and not info.st_mode & (stat.S_IRWXG | stat.S_IRWXO)


def read_private(path: Path) -> bytes | None:
    """Read a private file; None if there is none. Raises NotPrivate."""
    check_private(path)
    try:
        # Without O_NONBLOCK, opening a pipe without a writer would block forever.
        handle = os.open(os.path.realpath(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise NotPrivate(f"{str(path)!r} cannot be opened: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise NotPrivate(f"{str(path)!r} is not a regular file")
        with open(handle, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(handle)


def _others_who_may_write(info: os.stat_result) -> str:
    """Name the other users who may write to a file or folder; empty if there are none."""
    mode = info.st_mode
    if stat.S_ISDIR(mode) and mode & stat.S_ISVTX:
        return ""
    if mode & stat.S_IWOTH:
        return "anybody"
    if mode & stat.S_IWGRP and not _is_own_group(info.st_gid):
        return f"group {_group(info.st_gid)}"
    return ""


def _is_own_group(gid: int) -> bool:
    """Return True if this user is a group's only member; many systems create such groups."""
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
