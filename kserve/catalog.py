"""The catalog: from a kernel's name to its folder, its definition and the bytes of its files.

Search order: `kernel_path` (KSERVE_PATH), the built-in folders, then the entry-point group `kserve.kernels`. A name is unique
over the first two; packages are asked only for names found in neither, since listing them costs an import of 36 ms.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from kserve.config import Settings, built_in_roots, is_setting
from kserve.definition import Entry, KernelDef
from kserve.errors import InvalidDefinition, UnknownKernel, closest
from kserve.kernel_toml import read_definition
from kserve.key import digest_of
from kserve.knobs import Override, check_override, variables_of
from kserve.outline import FILE_NAME, Outline, read_outline
from kserve.target import parse_target

ENTRY_POINT_GROUP = "kserve.kernels"
_LARGEST_FILE_BYTES = 4 << 20


class Found(NamedTuple):
    """One entry where it was found.

    Fields:
        files:     what a build of it may read: relative name -> bytes.
        variables: knob -> environment variables that override it, the strongest first.
    """

    name: str
    folder: Path
    files: dict[str, bytes]
    variables: dict[str, list[str]]

    @property
    def digests(self) -> dict[str, str]:
        return {name: digest_of(content) for name, content in self.files.items()}

    def check(self, spec: Mapping[str, object], target: str, overrides: Mapping[str, Override] | None = None) -> None:
        """Raises what the service would refuse, with this machine's paths and variables in it: the better message."""
        definition = definition_of(self.folder)
        entry = definition.entries[self.name]
        definition.resolve_target(entry, parse_target(target))
        for knob, override in (overrides or {}).items():
            check_override(entry.knobs[knob], override)
        chosen = {knob: override.value or 0 for knob, override in (overrides or {}).items()}
        definition.specialise(entry, spec, chosen)


def find(name: str, settings: Settings) -> Found:
    """The entry of that name.

    Raises: UnknownKernel with the closest names; InvalidDefinition when its folder cannot be read, or two define it.
    """
    for roots in ([*settings.kernel_path, *built_in_roots()], None):
        searched = package_roots() if roots is None else roots
        # A definition names its entries: files that do not contain the name need no parsing, and may be broken.
        folders = [folder for folder in kernel_folders(searched) if name.encode() in _bytes(folder)]
        holders = [(folder, found) for folder in folders if name in (found := outline_of(folder)).names]
        if len(holders) > 1:
            places = ", ".join(str(folder) for folder, _ in holders)
            raise InvalidDefinition(f"kernel {name} is defined in {len(holders)} folders: {places}")
        if holders:
            folder, outline = holders[0]
            return Found(name, folder, collect_files(folder, outline), overridable(name, folder, dict(outline.knobs)))
    known = sorted(entry.name for _, _, entry in every_entry(settings))
    raise UnknownKernel(f"no kernel is called {name!r}: {closest(name, known)}", hint="kserve kernels lists them all")


def overridable(name: str, folder: Path, aliases: Mapping[str, str]) -> dict[str, list[str]]:
    """The environment variables that override each knob of an entry, the strongest first; a setting's is none."""
    found = variables_of(name, folder.name, aliases)
    return {knob: [variable for variable in variables if not is_setting(variable)] for knob, variables in found.items()}


def every_entry(settings: Settings, broken: list[InvalidDefinition] | None = None) -> list[tuple[Path, KernelDef, Entry]]:
    """All entries of all folders, by name. Folders that cannot be read are left out; their errors are added to `broken`."""
    found = []
    for folder in kernel_folders([*settings.kernel_path, *built_in_roots(), *package_roots()]):
        try:
            definition = definition_of(folder)
        except InvalidDefinition as error:
            if broken is not None:
                broken.append(error)
            continue
        found += [(folder, definition, entry) for entry in definition.entries.values()]
    return sorted(found, key=lambda item: item[2].name)


def kernel_folders(roots: list[Path]) -> list[Path]:
    """The kernel folders of the roots, in order: a root itself, or each folder in it that has a kernel.toml."""
    folders: dict[Path, None] = {}
    for root in dict.fromkeys(root.resolve() for root in roots):
        if os.path.isfile(root / FILE_NAME):  # noqa: PTH113 - False in a folder that may not be entered, where Path raises
            folders[root] = None
        elif os.path.isdir(root):  # noqa: PTH112 - the same
            folders.update((child.parent, None) for child in sorted(root.glob(f"*/{FILE_NAME}")))
    return list(folders)


def package_roots() -> list[Path]:
    """Folders that installed packages offer: each entry point names a package, or a folder in one as `package.folder`.

    The package is located, not imported: reading a definition executes nothing.
    """
    from importlib.metadata import entry_points
    from importlib.util import find_spec

    roots = []
    for point in entry_points(group=ENTRY_POINT_GROUP):
        package, *inner = point.value.replace(":", ".").split(".")
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            roots.append(Path(spec.origin).parent.joinpath(*inner))
    return roots


def definition_of(folder: Path) -> KernelDef:
    """The definition in that folder. Raises: InvalidDefinition."""
    return read_definition(_bytes(folder), origin=str(folder / FILE_NAME))


def outline_of(folder: Path) -> Outline:
    """The outline of the definition in that folder. Raises: InvalidDefinition."""
    return read_outline(_bytes(folder), origin=str(folder / FILE_NAME))


def _bytes(folder: Path) -> bytes:
    try:
        return (folder / FILE_NAME).read_bytes()
    except OSError as error:
        raise InvalidDefinition(f"{folder / FILE_NAME} cannot be read: {error.strerror}") from None


def collect_files(folder: Path, definition: Outline | KernelDef) -> dict[str, bytes]:
    """The kernel.toml and every declared source and header, by relative name, sorted.

    Shared headers come from the folder `include` beside the kernel's own and are named `include/…`.

    Raises: InvalidDefinition for a pattern that matches nothing, a file that is too large or a link that leads outside.
    """
    files = {FILE_NAME: _content(folder / FILE_NAME, folder)}
    include = folder.parent / "include"
    for base, prefix, patterns in (
        (folder, "", (*definition.sources, *definition.headers)),
        (include, "include/", definition.shared_headers),
    ):
        for pattern in patterns:
            try:
                matches = sorted(path for path in base.glob(pattern) if os.path.isfile(path))  # noqa: PTH113 - as above
            except (ValueError, IndexError, NotImplementedError, RecursionError, OSError) as error:
                raise InvalidDefinition(f"{folder / FILE_NAME}: {pattern!r} is no pattern: {error}") from None
            if not matches:
                raise InvalidDefinition(f"{folder / FILE_NAME}: {pattern!r} matches no file in {base}")
            for path in matches:
                name, content = prefix + path.relative_to(base).as_posix(), _content(path, base)
                if files.setdefault(name, content) != content:
                    raise InvalidDefinition(f"{folder / FILE_NAME}: {name} is both a file of the folder and a shared header")
    return dict(sorted(files.items()))


def _content(path: Path, base: Path) -> bytes:
    try:
        if os.path.commonpath((os.path.realpath(path), real := os.path.realpath(base))) != real:
            raise InvalidDefinition(f"{path} leads outside {base}: a kernel's files lie in its own folder")
        if path.stat().st_size > _LARGEST_FILE_BYTES:
            raise InvalidDefinition(f"{path} is larger than {_LARGEST_FILE_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        raise InvalidDefinition(f"{path} cannot be read: {error.strerror}") from None
