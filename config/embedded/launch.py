"""Become another program whose life is tied to its parent, if need be without being root.

Run as a script, `python -I -S launch.py PARENT SIGNAL IDENTITY PROGRAM ARG…`:

- PARENT is the pid that starts it. When that process is gone the kernel sends SIGNAL, even if the
  parent was killed with -9 and could clean up nothing (prctl(2), PR_SET_PDEATHSIG).
- IDENTITY is `plain`; `userns:UID`, which enters a user namespace in which the present user is
  called UID (PostgreSQL refuses to run as uid 0; file ownership does not change, so no chmod and no
  new user is needed); or `user:UID:GID`, which gives up root for that user.

The order matters: changing credentials clears the death signal, so it is set last, and after that
the parent is looked at once more, since it may have died just before.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_CLONE_NEWUSER = 0x10000000


def _enter_user_namespace(uid: int) -> None:
    outside_uid, outside_gid = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUSER) != 0:
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWUSER)")
    # An unprivileged process may write gid_map only once setgroups is denied (user_namespaces(7)).
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {outside_uid} 1"),
        ("gid_map", f"{uid} {outside_gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _give_up_root(uid: int, gid: int) -> None:
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def die_with_parent(parent: int, death_signal: int) -> None:
    """Ask for `death_signal` when the parent dies; exit now if `parent` is already gone.

    Linux only; elsewhere `up` stops its children itself and a kill -9 of it can leave them.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGTERM)


def main(arguments: list[str]) -> None:
    """Change identity, tie this process to its parent, and become the program."""
    parent, death_signal, identity, *command = arguments
    kind, *numbers = identity.split(":")
    if kind == "userns":
        _enter_user_namespace(int(numbers[0]))
    elif kind == "user":
        _give_up_root(int(numbers[0]), int(numbers[1]))
    # Ctrl-C reaches the whole foreground process group; only the parent may decide the order of stopping.
    os.setsid()
    os.umask(0o077)
    die_with_parent(int(parent), int(death_signal))
    os.execvp(command[0], command)  # noqa: S606 - that is what this program is for


if __name__ == "__main__":
    main(sys.argv[1:])
