"""Image files in a folder or an archive: what they are called, and what is in them."""

from __future__ import annotations

import os
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png")


class ImageFile(NamedTuple):
    """One image file, by itself or inside of an archive.

    Args:
        path: Where it is, for people: a path, continued into the archive if it is in one.
        container: The file to open: the image's own, or the archive.
        offset: Where in that file the image begins.
        size: How many bytes of it are the image's; -1 for all.
        deflated: Whether they are compressed.
    """

    path: str
    container: str
    offset: int = 0
    size: int = -1
    deflated: bool = False

    @property
    def name(self) -> str:
        """The name without folders."""
        return self.path.rsplit("/", 1)[-1]

    def read(self) -> bytes:
        """Return the bytes of the image file. Nothing is kept open: worker processes can share this object."""
        with open(self.container, "rb") as file:
            file.seek(self.offset)
            content = file.read(self.size)
        return zlib.decompress(content, -zlib.MAX_WBITS) if self.deflated else content


def find_images(root: str | Path) -> list[ImageFile]:
    """Return the image files in a folder with its sub-folders, or in a .tar or .zip archive, sorted by name."""
    root = Path(root)
    if root.is_dir():
        found = _in_folder(root)
    elif zipfile.is_zipfile(root):
        found = _in_zip(root)
    elif tarfile.is_tarfile(root):
        found = _in_tar(root)
    else:
        raise ValueError(f"Expected a folder, a .tar or a .zip archive of images but got {root}.")
    images = (file for file in found if file.name.lower().endswith(IMAGE_ENDINGS) and not file.name.startswith("."))
    return sorted(images, key=lambda file: (file.name, file.path))


def _in_folder(root: Path) -> list[ImageFile]:
    paths = (f"{folder}/{name}" for folder, _, names in os.walk(root) for name in names)
    return [ImageFile(path, path) for path in paths]


def _in_tar(archive: Path) -> list[ImageFile]:
    try:
        members = _plain_members(archive) or _members(archive)
    except tarfile.ReadError as error:
        raise ValueError(
            f"{archive} is compressed as a whole: single images cannot be read out of it. Unpack it once, tar -xf"
            f" {archive}, and give the folder."
        ) from error
    return [ImageFile(f"{archive}/{name}", str(archive), offset, size) for name, offset, size in members]


def _members(archive: Path) -> list[tuple[str, int, int]]:
    """Return names, offsets and sizes of the files in a tar archive."""
    with tarfile.open(archive, "r:") as tar:
        return [(member.name, member.offset_data, member.size) for member in tar if member.isfile()]


def _plain_members(archive: Path) -> list[tuple[str, int, int]] | None:
    """Return the same ten times faster, or None for archives that have more than plain files and folders in them."""
    found, offset = [], 0
    with open(archive, "rb") as file:
        while len(header := file.read(tarfile.BLOCKSIZE)) == tarfile.BLOCKSIZE and header[0]:
            kind, digits = header[156:157], header[124:136].strip(b" \0")
            if kind not in b"05" or not digits.isdigit() or header[257:262] != b"ustar":
                return None
            size, offset = int(digits, 8), offset + tarfile.BLOCKSIZE
            if kind == b"0":
                parts = (header[345:500], header[:100])
                found.append(("/".join(_text(part) for part in parts if part[0]), offset, size))
            offset += -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
            file.seek(offset)
    return found


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _in_zip(archive: Path) -> list[ImageFile]:
    with zipfile.ZipFile(archive) as file:
        members = [member for member in file.infolist() if not member.is_dir()]
    kinds = {member.compress_type for member in members} - {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
    if kinds or any(member.flag_bits & 1 for member in members):
        raise ValueError(f"{archive} is encrypted or compressed in an unusual way. Unpack it once and give the folder.")
    with open(archive, "rb") as raw:
        return [
            ImageFile(
                f"{archive}/{member.filename}",
                str(archive),
                _content_offset(raw.fileno(), member.header_offset),
                member.compress_size,
                member.compress_type == zipfile.ZIP_DEFLATED,
            )
            for member in members
        ]


def _content_offset(descriptor: int, header: int) -> int:
    """Return where a zip member's content begins: its local header repeats the name and may have more extra fields."""
    os.lseek(descriptor, header + 26, os.SEEK_SET)
    name, extra = struct.unpack("<HH", os.read(descriptor, 4))
    return int(header + 30 + name + extra)
