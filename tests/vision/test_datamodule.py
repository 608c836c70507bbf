"""UTKFace, split, scaled and in batches."""

import pytest
import torch
from faces import pack, write_faces
from helpers import trainer
from torchvision import models

from fairbatch_lightning import FairBatchWarning
from fairbatch_lightning.vision import UTKFaceDataModule, VisionClassifier


def names_of_parts(data):
    data.setup("fit")
    loaders = {"train": data.train_dataloader(), "val": data.val_dataloader(), "test": data.test_dataloader()}
    return {
        name: sorted(loader.dataset.dataset.files[i].name for i in loader.dataset.indices)
        for name, loader in loaders.items()
    }


def test_parts_are_apart_and_repeatable(root):
    data, again, other = (UTKFaceDataModule(root, image_size=8, seed=seed) for seed in (0, 0, 1))
    parts = [names_of_parts(module) for module in (data, again, other)]
    assert parts[0] == parts[1] != parts[2]
    assert [len(parts[0][name]) for name in ("test", "val", "train")] == [12, 6, 42]
    assert len(set().union(*parts[0].values())) == 60


def test_equal_images_stay_together(tmp_path):
    names = write_faces(tmp_path, number=60)
    for i, name in enumerate(names):  # every image twice, under another name and with another label
        (tmp_path / f"9_{i % 2}_0_{i}.jpg").write_bytes((tmp_path / name).read_bytes())
    parts = names_of_parts(UTKFaceDataModule(tmp_path, image_size=8))
    contents = {part: {(tmp_path / name).read_bytes() for name in found} for part, found in parts.items()}
    assert sum(map(len, contents.values())) == len(set().union(*contents.values())) == 60
    assert len(parts["test"]) == 24


def test_split_does_not_depend_on_the_form(root, tmp_path):
    modules = [UTKFaceDataModule(place, image_size=8) for place in (root, pack(root, tmp_path, "zip"))]
    assert names_of_parts(modules[0]) == names_of_parts(modules[1])


@pytest.mark.parametrize("keep", [False, True])
def test_batches(root, keep):
    data = UTKFaceDataModule(root, "age", image_size=8, batch_size=5, normalize=False, keep=keep)
    data.setup("fit")
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (5, 3, 8, 8)
    assert images.dtype == torch.float32
    assert 0 <= images.min() < images.max() <= 1
    assert data.num_classes == 4
    assert labels.max() < 4
    first = [batch[0] for batch in data.val_dataloader()]
    assert torch.equal(torch.cat(first), torch.cat([batch[0] for batch in data.val_dataloader()]))
    assert len(first) == 1  # nothing is learnt from it, so batches are larger


def test_only_faces_for_training_are_augmented(root):
    data = UTKFaceDataModule(root, image_size=8, batch_size=42)
    data.setup("fit")
    train, test = data.train_dataloader().dataset, data.test_dataloader().dataset
    assert any(not torch.equal(train[0][0], train[0][0]) for _ in range(20))
    assert all(torch.equal(test[0][0], test[0][0]) for _ in range(20))
    still = UTKFaceDataModule(root, image_size=8, augment=False)
    still.setup("fit")
    train = still.train_dataloader().dataset
    assert all(torch.equal(train[0][0], train[0][0]) for _ in range(20))


def test_normalized_as_torchvision_does(root):
    expected = models.ResNet18_Weights.DEFAULT.transforms(crop_size=16, resize_size=16)
    data = UTKFaceDataModule(root, image_size=16)
    data.setup("test")
    part = data.test_dataloader().dataset
    for i in range(3):
        assert torch.allclose(part[i][0], expected(part.dataset.image(part.indices[i])), atol=1e-5)


def test_single_faces_at_the_end_are_dropped(root):
    data = UTKFaceDataModule(root, image_size=8, batch_size=41)
    data.setup("fit")
    assert [len(images) for images, _ in data.train_dataloader()] == [41]
    data.batch_size = 100
    assert [len(images) for images, _ in data.train_dataloader()] == [42]


@pytest.mark.parametrize("fractions", [{"test_fraction": 0}, {"val_fraction": 0.9}, {"val_fraction": -0.1}])
def test_impossible_fractions(root, fractions):
    with pytest.raises(ValueError, match="above 0, and less than 1 together"):
        UTKFaceDataModule(root, **fractions)


def test_too_few_faces(tmp_path):
    write_faces(tmp_path, number=3)
    with pytest.raises(ValueError, match="3 faces are too few to split: none is left for"):
        UTKFaceDataModule(tmp_path).setup()


def test_label_is_not_the_group(root):
    with pytest.raises(ValueError, match="two different attributes but got 'race' for both"):
        UTKFaceDataModule(root, "race")


def test_another_split_than_the_checkpoints_is_noticed(root, tmp_path):
    settings = {"image_size": 16, "batch_size": 10}
    model, run = VisionClassifier(2, weights=None), trainer(max_epochs=1)
    run.fit(model, UTKFaceDataModule(root, **settings))
    run.save_checkpoint(tmp_path / "model.ckpt")
    run.test(model, UTKFaceDataModule(root, **settings), ckpt_path=tmp_path / "model.ckpt", verbose=False)
    with pytest.warns(FairBatchWarning, match="trained with another split of the faces"):
        run.test(model, UTKFaceDataModule(root, seed=1, **settings), ckpt_path=tmp_path / "model.ckpt")


@pytest.mark.parametrize("arguments", [("size",), ("gender", "size")])
def test_unknown_attribute(root, arguments):
    with pytest.raises(ValueError, match=r"one of \('gender', 'age', 'race'\), but got 'size'"):
        UTKFaceDataModule(root, *arguments)
