"""Small generated images with UTKFace's file names: gender shows in their colour, age in their brightness."""

import tarfile
import zipfile

import numpy as np
from PIL import Image


def write_faces(folder, number=60, size=16, seed=0):
    """Write images into a folder; return their names."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for i in range(number):
        age, gender, race = int(random.integers(1, 90)), int(random.integers(2)), int(random.integers(5))
        pixels = random.integers(0, 60, (size, size, 3)) + age
        pixels[:, :, 0] += 100 * gender
        names.append(f"{age}_{gender}_{race}_{20170116000000000 + i}.jpg.chip.jpg")
        Image.fromarray(pixels.astype(np.uint8)).save(folder / names[-1], quality=95)
    return names


def pack(root, folder, kind):
    """Return the faces of a folder in another form: packed into an archive, or in deeper folders."""
    if kind == "nested":
        for number, path in enumerate(sorted(root.iterdir())):
            (folder / f"part{number % 3}" / "deep").mkdir(parents=True, exist_ok=True)
            (folder / f"part{number % 3}" / "deep" / path.name).write_bytes(path.read_bytes())
        return folder
    if kind.startswith("tar"):
        inside = "long" * 40 if "long" in kind else "UTKFace"
        path = folder / ("faces.tar.gz" if kind == "tar.gz" else "faces.tar")
        with tarfile.open(path, "w:gz" if kind == "tar.gz" else "w") as tar:
            tar.add(root, inside)
            if "link" in kind:
                link = tarfile.TarInfo("UTKFace/link.jpg")
                link.type, link.linkname = tarfile.SYMTYPE, "elsewhere.jpg"
                tar.addfile(link)
        return path
    compression = zipfile.ZIP_DEFLATED if "deflated" in kind else zipfile.ZIP_STORED
    with zipfile.ZipFile(folder / "faces.zip", "w", compression) as archive:
        for path in root.iterdir():
            archive.write(path, f"UTKFace/{path.name}")
    return folder / "faces.zip"
