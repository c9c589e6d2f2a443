"""What builds share: a folder of sources among builds of the same files, and directories that are used one build after another.

Inodes are dear where a file system is ext4: it passes over each one that was freed in the last minutes whenever it looks for a
new one, so a build that makes and removes ten files makes every file of the next minutes dearer.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path

from kserve.alias import is_as_it_was, stamp
from kserve.build.staging import LOG_NAME, Staging, new_directory, write_files
from kserve.errors import StoreError

# Folders of sources that are kept while no build uses them.
_MOST_TREES = 8
# A build has a handful of outputs, and each one is looked at before another build gets the directory.
_MOST_OUTPUTS = 16


class SharedStaging(Staging):
    """Reads its sources in a folder that others read too, in a directory that other builds have before and after it.

    Args:
        take:  gives an empty directory of a build.
        leave: called once with this staging, at its end.
    Attributes:
        is_entered: whether it has a directory.
    """

    def __init__(self, sources: Path, *, take: Callable[[], Path], leave: Callable[[SharedStaging], None]) -> None:
        self.sources = sources
        self.is_entered = False
        self._take = take
        self._leave: Callable[[SharedStaging], None] | None = leave
        self._beginning = ""

    def enter(self) -> None:
        self.root = self._take()
        self.is_entered = True
        super().begin_log(self._beginning)

    def begin_log(self, text: str) -> None:
        self._beginning = text

    def log(self) -> str:
        return super().log() if self.is_entered else ""

    def remove(self) -> None:
        leave, self._leave = self._leave, None
        if leave is not None:
            leave(self)


class Tree:
    """A folder of sources that several builds read, and that a closed world lets none of them write to.

    Raises: OSError when it cannot be made.
    """

    def __init__(self, parent: Path, files: Mapping[str, bytes]) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="src-", dir=parent))
        self.folder = self.root / "src"
        self.n_users = 0
        try:
            write_files(self.folder, files)
            for name in files:
                (self.folder / name).chmod(0o400)
        except OSError:
            self.remove()
            raise
        # Directories as well: a file that is added to one could be found before a declared one.
        self._stamps = {str(path): stamp(str(path)) for path in (self.folder, *self.folder.rglob("*"))}

    @property
    def is_whole(self) -> bool:
        """Whether the files are as they were written, and there are no others."""
        return all(is_as_it_was(path, stated) for path, stated in self._stamps.items())

    def remove(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


class Trees:
    """The folders of sources, those used last at the end."""

    def __init__(self) -> None:
        self._trees: dict[tuple[Path, str], Tree] = {}

    def use(self, parent: Path, files: Mapping[str, bytes]) -> Tree:
        """The folder of these files under `parent`, for one more user. Raises: StoreError."""
        place = (parent, sha256(b"".join(sha256(part).digest() for pair in files.items() for part in _parts(pair))).hexdigest())
        tree = self._trees.get(place)
        if tree is not None and not tree.is_whole:
            del self._trees[place]
            if tree.n_users == 0:
                tree.remove()
            tree = None
        try:
            tree = tree or Tree(parent, files)
        except OSError as error:
            raise StoreError(f"a build cannot be staged in {parent}: {error}") from None
        # The one used last is the last to go.
        self._trees.pop(place, None)
        self._trees[place] = tree
        tree.n_users += 1
        return tree

    def leave(self, tree: Tree) -> None:
        """A user less. Of the folders that nobody uses the last few stay, for the next build."""
        tree.n_users -= 1
        if tree.n_users == 0 and tree not in self._trees.values():  # another one has taken its place
            tree.remove()
        for place in self._idle()[: max(0, len(self._trees) - _MOST_TREES)]:
            self._trees.pop(place).remove()

    def clear(self) -> None:
        """Remove the folders that no build uses."""
        for place in self._idle():
            self._trees.pop(place).remove()

    def _idle(self) -> list[tuple[Path, str]]:
        return [place for place, tree in self._trees.items() if tree.n_users == 0]


class Directories:
    """The directories of builds that have ended, empty again: as many as ever ran at once."""

    def __init__(self) -> None:
        self._idle: dict[Path, list[Path]] = {}

    def take(self, parent: Path) -> Path:
        """An empty directory under `parent`. Raises: StoreError."""
        idle = self._idle.get(parent, [])
        while idle:
            root = idle.pop()
            if _clear(root):  # looked at again: it may have lain there for days
                return root
            shutil.rmtree(root, ignore_errors=True)
        return new_directory(parent)

    def give_back(self, root: Path) -> None:
        """Keep it for another build, or remove it if it cannot be as good as new."""
        if _clear(root):
            self._idle.setdefault(root.parent, []).append(root)
        else:
            shutil.rmtree(root, ignore_errors=True)

    def clear(self) -> None:
        """Remove those that no build has."""
        for root in [root for idle in self._idle.values() for root in idle]:
            shutil.rmtree(root, ignore_errors=True)
        self._idle.clear()


def _clear(root: Path) -> bool:
    """Cut the files of a build to nothing, and keep them; False when there is more than a build's own plain files.

    Everything is private to this user and has one name, so no link leads to a file that is not the build's.
    """
    try:
        folders = [root, root / "out", root / "scratch"]
        if not all(folder.lstat().st_mode == stat.S_IFDIR | 0o700 for folder in folders):
            return False
        outputs = _names(root / "out")
        if _names(root / "scratch") or {*_names(root)} != {"out", "scratch", LOG_NAME} or len(outputs) > _MOST_OUTPUTS:
            return False
        found = {name: (root / name).lstat() for name in (LOG_NAME, *(f"out/{name}" for name in outputs))}
        if not all(one.st_mode == stat.S_IFREG | 0o600 and one.st_nlink == 1 for one in found.values()):
            return False
        for name, one in found.items():
            if one.st_size:
                os.truncate(root / name, 0)
    except OSError:
        return False
    return True


def _names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def _parts(pair: tuple[str, bytes]) -> tuple[bytes, bytes]:
    name, content = pair
    return os.fsencode(name), content
