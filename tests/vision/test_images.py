"""Image files are found in folders and archives, and read without unpacking."""

import pickle
import struct
import zipfile

import pytest
from faces import pack

from fairbatch_lightning.vision.images import find_images

FORMS = ["nested", "tar", "tar with long names", "tar with a link", "zip", "deflated zip"]


@pytest.mark.parametrize("kind", FORMS)
def test_archives_and_folders_hold_the_same_bytes(root, tmp_path, kind):
    found = find_images(pack(root, tmp_path, kind))
    expected = sorted(root.iterdir(), key=lambda path: path.name)
    assert [file.name for file in found] == [path.name for path in expected]
    assert [file.read() for file in found] == [path.read_bytes() for path in expected]


@pytest.mark.parametrize("kind", FORMS)
def test_paths_are_for_people(root, tmp_path, kind):
    """A path goes on into the archive; the file to open is the archive."""
    place = pack(root, tmp_path, kind)
    for file in find_images(place):
        assert file.path.startswith(f"{place}/")
        assert file.path.endswith(f"/{file.name}")
        assert file.container == (file.path if kind == "nested" else str(place))


def test_only_images_are_found(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in ("b.JPG", "a.jpeg", "deep/c.png", "notes.txt", "._1_0_0_2017.jpg", "photo.jpg.part"):
        (tmp_path / name).write_bytes(name.encode())
    assert [file.name for file in find_images(tmp_path)] == ["a.jpeg", "b.JPG", "c.png"]


def test_a_file_can_be_sent_to_another_process(root, tmp_path):
    file = find_images(pack(root, tmp_path, "deflated zip"))[0]
    assert pickle.loads(pickle.dumps(file)).read() == file.read()


def test_compressed_as_a_whole(root, tmp_path):
    with pytest.raises(ValueError, match=r"compressed as a whole.*Unpack it once, tar -xf .*faces\.tar\.gz"):
        find_images(pack(root, tmp_path, "tar.gz"))


def test_not_an_archive(tmp_path):
    (tmp_path / "file.bin").write_bytes(b"something")
    with pytest.raises(ValueError, match=r"Expected a folder, a \.tar or a \.zip"):
        find_images(tmp_path / "file.bin")


def test_zip_archives_with_more_in_their_headers(root, tmp_path):
    """Such as the times of files that other programs write there."""
    paths = sorted(root.iterdir())[:3]
    with zipfile.ZipFile(tmp_path / "faces.zip", "w") as archive:
        for path in paths:
            member = zipfile.ZipInfo(path.name)
            member.extra = struct.pack("<HH4s", 0xCAFE, 4, b"more")
            archive.writestr(member, path.read_bytes())
    assert [file.read() for file in find_images(tmp_path / "faces.zip")] == [path.read_bytes() for path in paths]


def test_unusual_compression(root, tmp_path):
    with zipfile.ZipFile(tmp_path / "faces.zip", "w", zipfile.ZIP_LZMA) as archive:
        archive.write(next(root.iterdir()), "a.jpg")
    with pytest.raises(ValueError, match=r"faces\.zip is encrypted or compressed in an unusual way. Unpack it once"):
        find_images(tmp_path / "faces.zip")
