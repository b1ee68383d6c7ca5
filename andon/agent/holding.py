"""An agent's holds: a tree in the node's own file system, reported with its file table, and watched.

What it makes it writes down first, so that a tree is never forgotten: one that the server took stays until
the server asks for its removal, one that it never took goes by itself.
"""

import logging
import os
import re
from pathlib import Path
from typing import Any

from andon import held_tree, tree_removal
from andon.agent.places import Declined, Roots
from andon.agent.server import Server
from andon.agent.state import State
from andon.client_http import AnswerError
from andon.held_tree import HeldTree, HoldError

logger = logging.getLogger("andon.agent")

FILES_PER_POST = 2_000  # well under the server's 4 MiB, also with long names
LEFT_TOLD = 1_000
_TREE = re.compile(r"[0-9a-f-]{36}/[0-9]+(-[0-9]+)?")
_NOTE = "holds"
# Said of a hold that is nobody's any more: its item came to name another checkpoint, or has ended.
_NOBODYS = frozenset({"unknown-task", "not-wanted"})


class Holder:
    """Holds what is wanted, notices what changes afterwards, and removes what is not needed any more."""

    def __init__(self, server: Server, roots: Roots, state: State) -> None:
        self.server = server
        self.roots = roots
        self.state = state

    def hold(self, task: dict[str, Any]) -> None:
        """Hold a place and report it. Repeating it, also after being killed, finds the tree that is there.

        Raises:
            Declined: the place is not on this node, or its files are not as committed.
            AnswerError, Unreachable: the server did not take the report.
        """
        id_, uri, name = str(task["id"]), str(task["paths"][0]), _named(task)
        base, root = self.roots.path_of(uri)
        files = self._here(base, root, name, task.get("files"))
        tree = held_tree.tree_of(base, root, name)
        note = self.state.read(_NOTE, id_)
        if note is None or not note["tree"]:
            about = {"tree": str(tree), "name": base.name, "how": "making", "told": [], "taken": False}
            note = about | {"files": [{"path": str(entry["path"])} for entry in files]}
            self.state.write(_NOTE, id_, note)
        try:
            held = held_tree.hold_tree(base, root, name, files)
        except HoldError as error:
            if not error.permanent:
                raise OSError(error.says) from error
            self._take_back(id_, note)
            raise Declined("bytes-differ", error.says) from error
        note = note | {"tree": held.tree, "files": held.files, "how": held.how}
        self.state.write(_NOTE, id_, note)
        try:
            keep = self._report(id_, held)
        except AnswerError as error:
            if error.type in _NOBODYS:
                self._take_back(id_, note)
            raise
        if keep:
            self.state.write(_NOTE, id_, note | {"taken": True})
        else:
            self._take_back(id_, note)  # another agent was first
        logger.info("%s: %d files of %s", held.says, len(held.files), base)

    def _here(
        self, base: Path, root: Path, name: str, wanted: list[dict[str, Any]] | None
    ) -> list[dict[str, Any]]:
        """Return the wanted files that are on this node, or were when an earlier try held them."""
        if wanted is None:
            try:
                return [{"path": path} for path in held_tree.list_files(base)]
            except HoldError as error:
                raise Declined("not-here", error.says) from error
        tree = held_tree.tree_of(base, root, name)
        here = [
            entry
            for entry in wanted
            if os.path.lexists(base / held_tree.inside(str(entry["path"])))
            or os.path.lexists(held_tree.place(tree, base.name, str(entry["path"])))
        ]
        if not here:
            raise Declined("not-here", f"{base}: none of its {len(wanted)} files is on this node")
        return here

    def _report(self, task: str, held: HeldTree) -> bool:
        """Report a hold in pieces; returns whether the server counts on this tree."""
        about = {"id": task, "how": held.how, "tree": held.tree, "says": held.says}
        answer: dict[str, Any] = {}
        for start in range(0, max(1, len(held.files)), FILES_PER_POST):
            piece = held.files[start : start + FILES_PER_POST]
            last = start + FILES_PER_POST >= len(held.files)
            answer = self.server.post("/holds", {**about, "files": piece, "last": last})
        return bool(answer.get("keep", True))

    # --- watching

    def watch(self) -> None:
        """Look whether a held file was changed in place, and report it once; settle what was cut short."""
        for task in self.state.ids(_NOTE):
            note = self.state.read(_NOTE, task)
            if note is None or not note["tree"]:
                continue
            if not note.get("taken", True):
                self._ask_about(task, note)
            elif note["how"] == "removing":
                if not os.path.lexists(note["tree"]):
                    self.state.forget(_NOTE, task)
            else:
                self._look(task, note)

    def _look(self, task: str, note: dict[str, Any]) -> None:
        found = held_tree.changed(note["tree"], note["name"], note["files"])
        new = [one for one in found if one not in note["told"]]
        if not new:
            return
        logger.warning("%s: %s", note["tree"], "; ".join(new[:5]))
        body = {"id": task, "how": note["how"], "tree": note["tree"], "last": False, "changed": new[:1000]}
        try:
            self.server.post("/holds", body)
        except AnswerError as error:
            if error.type not in _NOBODYS:
                raise
        if self.state.read(_NOTE, task) == note:  # it may have been removed beside us
            self.state.write(_NOTE, task, note | {"told": found})

    def _ask_about(self, task: str, note: dict[str, Any]) -> None:
        """Ask about a tree of which this agent does not know whether the server took it."""
        how = "links" if note["how"] == "making" else note["how"]
        try:
            answer = self.server.post("/holds", {"id": task, "how": how, "tree": note["tree"], "last": False})
        except AnswerError as error:
            if error.type not in _NOBODYS:
                raise
            answer = {"keep": False}
        if answer.get("keep") is False:
            self._take_back(task, note)

    # --- removing

    def release(self, task: dict[str, Any]) -> None:
        """Remove a tree that is not needed any more, and say so. Repeating it changes nothing.

        Raises:
            Declined: it lies under none of the roots, behind a link, or may not be removed.
            AnswerError, Unreachable: the server did not take the report.
        """
        name = _named(task)
        notes = {
            id_: note
            for id_ in self.state.ids(_NOTE)
            if (note := self.state.read(_NOTE, id_)) is not None
            and str(note["tree"]).endswith(f"/{held_tree.TREES}/{name}")
        }
        ours: dict[str, int | None] = {}
        for id_, note in notes.items():
            ours |= _ours(note["files"], note["name"])
            self.state.write(_NOTE, id_, note | {"how": "removing", "taken": True})
        ours |= _ours(task["files"], Path(self.roots.path_of(str(task["paths"][0]))[0]).name)
        left: list[str] = []
        for where in sorted({*map(str, task["trees"]), *(str(note["tree"]) for note in notes.values())}):
            tree, root = self._tree(where, name)
            left += _removed(tree, root, ours).left
        gone = sum(path not in left for path in ours)
        self.server.post(f"/wanted/{task['id']}/released", {"files": gone, "left": left[:LEFT_TOLD]})
        for id_ in notes:
            self.state.forget(_NOTE, id_)
        logger.info("removed the tree %s: %d files", name, gone)

    def _take_back(self, task: str, note: dict[str, Any]) -> None:
        """Remove a tree that the server never took; what cannot be removed now is tried again."""
        if note.get("taken", True):
            return
        name = "/".join(Path(note["tree"]).parts[-2:])
        try:
            if note["tree"]:
                tree, root = self._tree(note["tree"], name)
                _removed(tree, root, _ours(note["files"], note["name"]))
                logger.info("removed the tree %s: nobody counts on it", name)
        except Declined as reason:
            logger.warning("%s: %s", name, reason.says)
        else:
            self.state.forget(_NOTE, task)

    def _tree(self, where: str, name: str) -> tuple[Path, Path]:
        """Return a tree and its root, where the path is exactly that of a tree of this name.

        Raises:
            Declined: it is not, leads through a link, or lies under none of the roots.
        """
        tree, root = self.roots.path_of(where)
        if str(tree) != where or not where.endswith(f"/{held_tree.TREES}/{name}"):
            raise Declined("outside-roots", f"{where}: is not the place of a tree, or a link leads to it")
        return tree, root


def _named(task: dict[str, Any]) -> str:
    name = str(task["tree"])
    if not _TREE.fullmatch(name):
        raise Declined("outside-roots", f"{name!r}: is no name of a tree")
    return name


def _ours(files: list[dict[str, Any]], base_name: str) -> dict[str, int | None]:
    """Return the inode of each held file, None where it was not noted yet."""
    return {str(entry["path"]) or base_name: entry.get("inode") or None for entry in files}


def _removed(tree: Path, root: Path, ours: dict[str, int | None]) -> tree_removal.Removed:
    try:
        removed = tree_removal.remove(tree, root, ours)
    except HoldError as error:
        raise Declined("unreadable", error.says) from error
    if removed.left:
        logger.warning("%s: %s: not held by this agent, left alone", tree, ", ".join(removed.left[:5]))
    return removed
