"""An agent's holds: a tree in the node's own file system, reported with its file table, and watched."""

import logging
import os
import re
from pathlib import Path
from typing import Any

from andon import held_tree
from andon.agent.places import Declined, Roots
from andon.agent.server import Server
from andon.agent.state import State
from andon.held_tree import HeldTree, HoldError

logger = logging.getLogger("andon.agent")

FILES_PER_POST = 2_000  # well under the server's 4 MiB, also with long names
_TREE = re.compile(r"[0-9a-f-]{36}/[0-9]+(-[0-9]+)?")
_NOTE = "holds"


class Holder:
    """Holds what is wanted and notices what changes afterwards."""

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
        uri, name = str(task["paths"][0]), str(task["tree"])
        if not _TREE.fullmatch(name):
            raise Declined("outside-roots", f"{name!r}: is no name of a tree")
        base, root = self.roots.path_of(uri)
        files = self._here(base, root, name, task.get("files"))
        try:
            held = held_tree.hold_tree(base, root, name, files)
        except HoldError as error:
            if not error.permanent:
                raise OSError(error.says) from error
            raise Declined("bytes-differ", error.says) from error
        self.state.write(
            _NOTE,
            str(task["id"]),
            {"tree": held.tree, "name": base.name, "files": held.files, "how": held.how, "told": []},
        )
        self._report(str(task["id"]), held)
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

    def _report(self, task: str, held: HeldTree) -> None:
        about = {"id": task, "how": held.how, "tree": held.tree, "says": held.says}
        for start in range(0, max(1, len(held.files)), FILES_PER_POST):
            piece = held.files[start : start + FILES_PER_POST]
            last = start + FILES_PER_POST >= len(held.files)
            self.server.post("/holds", {**about, "files": piece, "last": last})

    def watch(self) -> None:
        """Look whether a held file was changed in place, and report it once."""
        for task in self.state.ids(_NOTE):
            note = self.state.read(_NOTE, task)
            if note is None or not note["tree"]:
                continue
            found = held_tree.changed(note["tree"], note["name"], note["files"])
            new = [one for one in found if one not in note["told"]]
            if new:
                logger.warning("%s: %s", note["tree"], "; ".join(new[:5]))
                body = {
                    "id": task,
                    "how": note["how"],
                    "tree": note["tree"],
                    "last": False,
                    "changed": new[:1000],
                }
                self.server.post("/holds", body)
                self.state.write(_NOTE, task, note | {"told": found})
