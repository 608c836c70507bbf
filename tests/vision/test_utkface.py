"""UTKFace as a dataset: everything but the pixels is known from file names."""

import re

import numpy as np
import pytest
import torch
from faces import pack, write_faces
from helpers import named_cells
from PIL import Image
from torch.utils.data import DataLoader

from fairbatch_lightning import FairBatchWarning, GroupIndex
from fairbatch_lightning.vision import UTKFace
from fairbatch_lightning.vision.utkface import classes_of


def facts(faces):
    return [
        (file.name, years, gender, race)
        for file, years, gender, race in zip(faces.files, faces.years, faces.genders, faces.races, strict=True)
    ]


def test_knows_everything_from_names(root, monkeypatch):
    monkeypatch.setattr(Image, "open", lambda *_: pytest.fail("an image was opened"))
    faces = UTKFace(root, "age")
    assert len(faces) == len(faces.targets) == 60
    for name, years, gender, race in facts(faces):
        age, female, number, _ = name.split("_")
        assert (years, gender) == (int(age), ("male", "female")[int(female)])
        assert race == ("White", "Black", "Asian", "Indian", "Others")[int(number)]
    assert faces.classes == ["<21", "21-40", "41-60", ">60"]
    assert faces.targets == [(years > 20) + (years > 40) + (years > 60) for years in faces.years]
    assert faces.ages == [faces.classes[target] for target in faces.targets]


@pytest.mark.parametrize("target", ["gender", "race"])
def test_targets_follow_classes(root, target):
    faces = UTKFace(root, target)
    assert [faces.classes[number] for number in faces.targets] == getattr(faces, f"{target}s")


def test_other_cuts(root):
    faces = UTKFace(root, "age", age_cuts=[18])
    assert faces.classes == ["<18", ">17"]
    assert faces.targets == [int(years >= 18) for years in faces.years]


@pytest.mark.parametrize("cuts", [[], [30, 20], [0, 10]])
def test_impossible_cuts(root, cuts):
    with pytest.raises(ValueError, match="growing ages above 0"):
        UTKFace(root, "age", age_cuts=cuts)


def test_unknown_attributes_are_refused(root):
    with pytest.raises(ValueError, match=r"one of \('gender', 'age', 'race'\), but got 'size'"):
        UTKFace(root, "size")
    assert classes_of("gender") == ["male", "female"]


@pytest.mark.parametrize("groups", ["race", "age", ["race", "age"]])
def test_labels_and_groups_are_found_by_their_names(root, groups, monkeypatch):
    monkeypatch.setattr(Image, "open", lambda *_: pytest.fail("an image was opened"))
    faces = UTKFace(root)
    names = {"race": faces.races, "age": faces.ages}
    both = [f"race={race}, age={age}" for race, age in zip(faces.races, faces.ages, strict=True)]
    expected = names[groups] if isinstance(groups, str) else both
    assert named_cells(GroupIndex.from_dataset(faces, groups=groups)) == list(zip(faces.genders, expected, strict=True))


def test_transforms(root):
    faces = UTKFace(root, transform=lambda image: image.size, target_transform=lambda target: target + 10)
    assert faces[3] == ((16, 16), faces.targets[3] + 10)


@pytest.mark.parametrize("kind", ["nested", "tar", "tar with long names", "tar with a link", "zip", "deflated zip"])
def test_archives_and_folders_hold_the_same(root, tmp_path, kind):
    plain = UTKFace(root)
    other = UTKFace(pack(root, tmp_path, kind))
    assert facts(other) == facts(plain)
    assert all(np.array_equal(other.image(i), plain.image(i)) for i in range(len(plain)))


@pytest.mark.slow
def test_archives_work_in_worker_processes(root, tmp_path):
    faces = UTKFace(pack(root, tmp_path, "deflated zip"), transform=np.asarray)
    parallel = DataLoader(faces, batch_size=7, num_workers=2, multiprocessing_context="spawn")
    batches = torch.cat([images for images, _ in parallel])
    assert torch.equal(batches, torch.stack([torch.from_numpy(faces[i][0].copy()) for i in range(len(faces))]))


def test_odd_names_are_left_out_with_one_message(root, tmp_path):
    names = write_faces(tmp_path, number=5)
    image = Image.new("RGB", (8, 8))
    odd = ["39_1_20170116174525125.jpg.chip.jpg", "61_1_20170109142408075.jpg.chip.jpg", "me.png"]
    readable = ["24_0_1_20170116220224657 .jpg.chip.jpg", "55_0_0_20170116232725357jpg.chip.jpg"]
    for name in odd + readable:
        image.save(tmp_path / name)
    (tmp_path / "landmarks.txt").write_text("no image")
    (tmp_path / "._1_0_0_2017.jpg").write_bytes(b"what macOS leaves behind")
    with pytest.warns(FairBatchWarning) as caught:
        faces = UTKFace(tmp_path)
    assert sorted(file.name for file in faces.files) == sorted(names + readable)
    (message,) = (str(warning.message) for warning in caught)
    assert "Left out 3 of 10 images" in message
    assert all(name in message for name in odd)


def test_files_in_several_folders_count_once(root, tmp_path):
    write_faces(tmp_path / "UTKFace", number=5)
    write_faces(tmp_path / "more" / "crop_part1", number=3)
    with pytest.warns(FairBatchWarning, match="Left out 3 of 8 images that are there twice"):
        assert len(UTKFace(tmp_path)) == 5


def test_faces_and_the_photographs_they_are_from_count_once(tmp_path):
    names = write_faces(tmp_path / "faces", number=3)
    for name in names:
        (tmp_path / name.removesuffix(".chip.jpg")).write_bytes(b"a photograph")
    with pytest.warns(FairBatchWarning, match="Left out 3 of 6 images that are there twice"):
        assert sorted(file.name for file in UTKFace(tmp_path).files) == sorted(names)


def test_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere.*susanqq\.github\.io.*non-commercial research only"):
        UTKFace(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"Found no images in .*susanqq"):
        UTKFace(tmp_path)
    Image.new("RGB", (8, 8)).save(tmp_path / "me.jpg")
    with pytest.raises(FileNotFoundError, match=r"Found 1 images but none whose name begins with \[age\]"):
        UTKFace(tmp_path)


def test_not_an_archive(tmp_path):
    (tmp_path / "file.bin").write_bytes(b"something")
    with pytest.raises(ValueError, match=r"Expected a folder, a \.tar or a \.zip"):
        UTKFace(tmp_path / "file.bin")


@pytest.mark.parametrize(
    ("content", "workers"), [(b"", 0), (b"not a JPEG", 0), pytest.param("cut short", 1, marks=pytest.mark.slow)]
)
def test_corrupt_image_is_named(tmp_path, content, workers):
    names = write_faces(tmp_path, number=8, size=64)
    path = tmp_path / sorted(names)[5]
    path.write_bytes(path.read_bytes()[:700] if content == "cut short" else content)
    faces = UTKFace(tmp_path, transform=np.asarray)
    with pytest.raises(RuntimeError, match=re.escape(str(path))):
        list(DataLoader(faces, batch_size=4, num_workers=workers))
    with pytest.raises(RuntimeError, match=re.escape(str(path))):
        UTKFace(tmp_path, keep=8)


def test_kept_images_are_scaled(root):
    kept, plain = UTKFace(root, keep=8), UTKFace(root)
    image, target = kept[7]
    assert image.shape == (3, 8, 8)
    assert image.dtype == torch.uint8
    assert target == plain.targets[7]
    expected = np.asarray(plain.image(7).resize((8, 8), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    assert np.abs(image.numpy().astype(int) - expected).max() <= 1


def test_what_is_not_square_loses_its_borders(tmp_path):
    pixels = np.zeros((20, 40, 3), np.uint8)
    pixels[:, 10:30] = 255
    Image.fromarray(pixels).save(tmp_path / "20_0_0_2017.png")
    assert UTKFace(tmp_path, keep=20)[0][0].min() > 250
