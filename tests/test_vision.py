"""UTKFace, its DataModule, and torchvision's models as classifiers."""

import copy
import hashlib
import os
import re
import tarfile
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from faces import write_faces
from helpers import trainer
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import models

from fairbatch_lightning import FairBatch, FairBatchWarning, FairnessMonitor
from fairbatch_lightning.vision import UTKFace, UTKFaceDataModule, VisionClassifier
from fairbatch_lightning.vision.backbones import classification_models


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("utkface") / "UTKFace"
    write_faces(folder)
    return folder


def facts(faces):
    return [
        (file.name, years, gender, race)
        for file, years, gender, race in zip(faces.files, faces.years, faces.genders, faces.races, strict=True)
    ]


class TestDataset:
    def test_knows_everything_from_names(self, root, monkeypatch):
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
    def test_targets_follow_classes(self, root, target):
        faces = UTKFace(root, target)
        assert [faces.classes[number] for number in faces.targets] == getattr(faces, f"{target}s")

    def test_other_cuts(self, root):
        faces = UTKFace(root, "age", age_cuts=[18])
        assert faces.classes == ["<18", ">17"]
        assert faces.targets == [int(years >= 18) for years in faces.years]

    @pytest.mark.parametrize("cuts", [[], [30, 20], [0, 10]])
    def test_impossible_cuts(self, root, cuts):
        with pytest.raises(ValueError, match="growing ages above 0"):
            UTKFace(root, "age", age_cuts=cuts)

    @pytest.mark.parametrize("kind", ["nested", "tar", "tar with long names", "tar with a link", "zip", "deflated zip"])
    def test_archives_and_folders_hold_the_same(self, root, tmp_path, kind):
        plain = UTKFace(root)
        other = UTKFace(pack(root, tmp_path, kind))
        assert facts(other) == facts(plain)
        assert all(np.array_equal(other.image(i), plain.image(i)) for i in range(len(plain)))

    @pytest.mark.slow
    def test_archives_work_in_worker_processes(self, root, tmp_path):
        faces = UTKFace(pack(root, tmp_path, "deflated zip"), transform=np.asarray)
        parallel = DataLoader(faces, batch_size=7, num_workers=2, multiprocessing_context="spawn")
        batches = torch.cat([images for images, _ in parallel])
        assert torch.equal(batches, torch.stack([torch.from_numpy(faces[i][0].copy()) for i in range(len(faces))]))

    def test_compressed_as_a_whole(self, root, tmp_path):
        with pytest.raises(ValueError, match=r"compressed as a whole.*Unpack it once, tar -xf .*faces\.tar\.gz"):
            UTKFace(pack(root, tmp_path, "tar.gz"))

    def test_odd_names_are_left_out_with_one_message(self, root, tmp_path):
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

    def test_files_in_several_folders_count_once(self, root, tmp_path):
        write_faces(tmp_path / "UTKFace", number=5)
        write_faces(tmp_path / "more" / "crop_part1", number=3)
        with pytest.warns(FairBatchWarning, match="Left out 3 of 8 images that are there twice"):
            assert len(UTKFace(tmp_path)) == 5

    def test_faces_and_the_photographs_they_are_from_count_once(self, tmp_path):
        names = write_faces(tmp_path / "faces", number=3)
        for name in names:
            (tmp_path / name.removesuffix(".chip.jpg")).write_bytes(b"a photograph")
        with pytest.warns(FairBatchWarning, match="Left out 3 of 6 images that are there twice"):
            assert sorted(file.name for file in UTKFace(tmp_path).files) == sorted(names)

    def test_missing(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"nowhere.*susanqq\.github\.io.*non-commercial research only"):
            UTKFace(tmp_path / "nowhere")
        with pytest.raises(FileNotFoundError, match=r"Found no images in .*susanqq"):
            UTKFace(tmp_path)
        Image.new("RGB", (8, 8)).save(tmp_path / "me.jpg")
        with pytest.raises(FileNotFoundError, match=r"Found 1 images but none whose name begins with \[age\]"):
            UTKFace(tmp_path)

    def test_not_an_archive(self, tmp_path):
        (tmp_path / "file.bin").write_bytes(b"something")
        with pytest.raises(ValueError, match=r"Expected a folder, a \.tar or a \.zip"):
            UTKFace(tmp_path / "file.bin")

    @pytest.mark.parametrize(
        ("content", "workers"), [(b"", 0), (b"not a JPEG", 0), pytest.param("cut short", 1, marks=pytest.mark.slow)]
    )
    def test_corrupt_image_is_named(self, tmp_path, content, workers):
        names = write_faces(tmp_path, number=8, size=64)
        path = tmp_path / sorted(names)[5]
        path.write_bytes(path.read_bytes()[:700] if content == "cut short" else content)
        faces = UTKFace(tmp_path, transform=np.asarray)
        with pytest.raises(RuntimeError, match=re.escape(str(path))):
            list(DataLoader(faces, batch_size=4, num_workers=workers))
        with pytest.raises(RuntimeError, match=re.escape(str(path))):
            UTKFace(tmp_path, keep=8)

    def test_kept_images_are_scaled(self, root):
        kept, plain = UTKFace(root, keep=8), UTKFace(root)
        image, target = kept[7]
        assert image.shape == (3, 8, 8)
        assert image.dtype == torch.uint8
        assert target == plain.targets[7]
        expected = np.asarray(plain.image(7).resize((8, 8), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
        assert np.abs(image.numpy().astype(int) - expected).max() <= 1

    def test_what_is_not_square_loses_its_borders(self, tmp_path):
        pixels = np.zeros((20, 40, 3), np.uint8)
        pixels[:, 10:30] = 255
        Image.fromarray(pixels).save(tmp_path / "20_0_0_2017.png")
        assert UTKFace(tmp_path, keep=20)[0][0].min() > 250


def pack(root, folder, kind):
    """Return the faces in another form."""
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


class TestDataModule:
    def test_parts_are_apart_and_repeatable(self, root):
        data, again, other = (UTKFaceDataModule(root, image_size=8, seed=seed) for seed in (0, 0, 1))
        parts = [names_of_parts(module) for module in (data, again, other)]
        assert parts[0] == parts[1] != parts[2]
        assert [len(parts[0][name]) for name in ("test", "val", "train")] == [12, 6, 42]
        assert len(set().union(*parts[0].values())) == 60

    def test_equal_images_stay_together(self, tmp_path):
        names = write_faces(tmp_path, number=60)
        for i, name in enumerate(names):  # every image twice, under another name and with another label
            (tmp_path / f"9_{i % 2}_0_{i}.jpg").write_bytes((tmp_path / name).read_bytes())
        parts = names_of_parts(UTKFaceDataModule(tmp_path, image_size=8))
        contents = {part: {(tmp_path / name).read_bytes() for name in found} for part, found in parts.items()}
        assert sum(map(len, contents.values())) == len(set().union(*contents.values())) == 60
        assert len(parts["test"]) == 24

    def test_split_does_not_depend_on_the_form(self, root, tmp_path):
        modules = [UTKFaceDataModule(place, image_size=8) for place in (root, pack(root, tmp_path, "zip"))]
        assert names_of_parts(modules[0]) == names_of_parts(modules[1])

    @pytest.mark.parametrize("keep", [False, True])
    def test_batches(self, root, keep):
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

    def test_only_faces_for_training_are_augmented(self, root):
        data = UTKFaceDataModule(root, image_size=8, batch_size=42)
        data.setup("fit")
        train, test = data.train_dataloader().dataset, data.test_dataloader().dataset
        assert any(not torch.equal(train[0][0], train[0][0]) for _ in range(20))
        assert all(torch.equal(test[0][0], test[0][0]) for _ in range(20))
        still = UTKFaceDataModule(root, image_size=8, augment=False)
        still.setup("fit")
        train = still.train_dataloader().dataset
        assert all(torch.equal(train[0][0], train[0][0]) for _ in range(20))

    def test_normalized_as_torchvision_does(self, root):
        expected = models.ResNet18_Weights.DEFAULT.transforms(crop_size=16, resize_size=16)
        data = UTKFaceDataModule(root, image_size=16)
        data.setup("test")
        part = data.test_dataloader().dataset
        for i in range(3):
            assert torch.allclose(part[i][0], expected(part.dataset.image(part.indices[i])), atol=1e-5)

    def test_single_faces_at_the_end_are_dropped(self, root):
        data = UTKFaceDataModule(root, image_size=8, batch_size=41)
        data.setup("fit")
        assert [len(images) for images, _ in data.train_dataloader()] == [41]
        data.batch_size = 100
        assert [len(images) for images, _ in data.train_dataloader()] == [42]

    @pytest.mark.parametrize("fractions", [{"test_fraction": 0}, {"val_fraction": 0.9}, {"val_fraction": -0.1}])
    def test_impossible_fractions(self, root, fractions):
        with pytest.raises(ValueError, match="above 0, and less than 1 together"):
            UTKFaceDataModule(root, **fractions)

    def test_too_few_faces(self, tmp_path):
        write_faces(tmp_path, number=3)
        with pytest.raises(ValueError, match="3 faces are too few to split: none is left for"):
            UTKFaceDataModule(tmp_path).setup()

    def test_label_is_not_the_group(self, root):
        with pytest.raises(ValueError, match="two different attributes but got 'race' for both"):
            UTKFaceDataModule(root, "race")

    def test_another_split_than_the_checkpoints_is_noticed(self, root, tmp_path):
        settings = {"image_size": 16, "batch_size": 10}
        model, run = VisionClassifier(2, weights=None), trainer(max_epochs=1)
        run.fit(model, UTKFaceDataModule(root, **settings))
        run.save_checkpoint(tmp_path / "model.ckpt")
        run.test(model, UTKFaceDataModule(root, **settings), ckpt_path=tmp_path / "model.ckpt", verbose=False)
        with pytest.warns(FairBatchWarning, match="trained with another split of the faces"):
            run.test(model, UTKFaceDataModule(root, seed=1, **settings), ckpt_path=tmp_path / "model.ckpt")

    @pytest.mark.parametrize("arguments", [("size",), ("gender", "size")])
    def test_unknown_attribute(self, root, arguments):
        with pytest.raises(ValueError, match=r"one of \('gender', 'age', 'race'\), but got 'size'"):
            UTKFaceDataModule(root, *arguments)


def names_of_parts(data):
    data.setup("fit")
    loaders = {"train": data.train_dataloader(), "val": data.val_dataloader(), "test": data.test_dataloader()}
    return {
        name: sorted(loader.dataset.dataset.files[i].name for i in loader.dataset.indices)
        for name, loader in loaders.items()
    }


class TestClassifier:
    @pytest.mark.parametrize("backbone", classification_models())
    def test_every_model_gets_a_new_head(self, backbone):
        if "regnet" in backbone and not backbone.endswith("_400mf"):
            return  # all alike, too large to build, and not to be built without memory
        with torch.device("cpu" if "regnet" in backbone else "meta"):
            model = VisionClassifier(7, backbone, weights=None).model
        shapes = [tuple(weight.shape) for weight in model.parameters()]
        assert sum(shape[0] == 7 for shape in shapes) in (1, 2)  # with or without bias
        assert not any(shape[0] == 1000 for shape in shapes)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "backbone", ["googlenet", "inception_v3", "squeezenet1_1", "vit_b_16", "shufflenet_v2_x0_5"]
    )
    def test_logits(self, backbone):
        model = VisionClassifier(3, backbone, weights=None)
        size = {"inception_v3": 96, "vit_b_16": 224}.get(backbone, 64)
        assert model.train()(torch.randn(2, 3, size, size)).shape == (2, 3)

    def test_googlenet_has_no_auxiliary_heads(self):
        model = VisionClassifier(3, "googlenet", weights=None).train()
        assert isinstance(model(torch.randn(2, 3, 32, 32)), torch.Tensor)
        assert not [name for name, _ in model.named_parameters() if "aux" in name]

    def test_unknown_backbone(self):
        with pytest.raises(ValueError, match=r"such as resnet18.* but got 'resnet_18'"):
            VisionClassifier(2, "resnet_18")

    def test_weights_from_a_file(self, tmp_path):
        published = models.resnet18()
        torch.save(published.state_dict(), tmp_path / "resnet18.pth")
        model = VisionClassifier(3, weights=str(tmp_path / "resnet18.pth")).model
        own = model.state_dict()
        assert own["fc.weight"].shape == (3, 512)
        assert all(torch.equal(own[key], value) for key, value in published.state_dict().items() if "fc." not in key)

    def test_weights_of_googlenet_with_auxiliary_heads(self, tmp_path):
        published = models.googlenet(init_weights=True)
        torch.save(published.state_dict(), tmp_path / "googlenet.pth")
        own = VisionClassifier(3, "googlenet", weights=str(tmp_path / "googlenet.pth")).model.state_dict()
        assert torch.equal(own["conv1.conv.weight"], published.state_dict()["conv1.conv.weight"])

    def test_weights_without_a_head(self, tmp_path):
        state = {key: value for key, value in models.resnet18().state_dict().items() if "fc." not in key}
        torch.save(state, tmp_path / "backbone.pth")
        own = VisionClassifier(3, weights=str(tmp_path / "backbone.pth")).model.state_dict()
        assert torch.equal(own["conv1.weight"], state["conv1.weight"])

    def test_weights_of_another_model(self, tmp_path):
        torch.save(models.resnet34().state_dict(), tmp_path / "resnet34.pth")
        with pytest.raises(ValueError, match=r"weights of a resnet18 but got some with the unknown layer1\.2\.bn1"):
            VisionClassifier(3, weights=str(tmp_path / "resnet34.pth"))

    @pytest.mark.parametrize("content", [[1, 2], {"a": 1}, {}])
    def test_file_without_weights(self, tmp_path, content):
        torch.save(content, tmp_path / "other.pth")
        with pytest.raises(ValueError, match=r"other\.pth to hold a dict of tensors"):
            VisionClassifier(3, weights=str(tmp_path / "other.pth"))

    def test_file_that_would_run_code(self, tmp_path):
        torch.save({"model": Evil()}, tmp_path / "evil.pth")
        with pytest.raises(ValueError, match=r"evil\.pth to hold weights and nothing else"):
            VisionClassifier(3, weights=str(tmp_path / "evil.pth"))

    def test_no_such_file(self):
        with pytest.raises(ValueError, match=r"one of \['IMAGENET1K_V1', 'DEFAULT'\] or a file.* no such file"):
            VisionClassifier(3, weights="here.pth")

    def test_offline(self, tmp_path, monkeypatch):
        """The real download, of an address that leads nowhere."""
        monkeypatch.setenv("TORCH_HOME", str(tmp_path))
        weights = models.ResNet18_Weights.DEFAULT
        monkeypatch.setattr(weights, "_value_", replace(weights.value, url="http://localhost:1/resnet18-0.pth"))
        with pytest.raises(
            RuntimeError, match=r"Could not download.*weights='resnet18-0\.pth', or put it into .*check"
        ):
            VisionClassifier(3)

    @pytest.mark.parametrize("backbone", ["resnet18", "googlenet", "mnasnet0_5"])
    def test_downloaded(self, backbone, tmp_path, monkeypatch):
        """The real download, of a file on this machine; then the same file without a download."""
        published = models.get_model(
            backbone, **({"init_weights": True} if backbone == "googlenet" else {})
        ).state_dict()
        torch.save(published, tmp_path / "file.pth")
        digest = hashlib.sha256((tmp_path / "file.pth").read_bytes()).hexdigest()[:8]
        path = (tmp_path / "file.pth").rename(tmp_path / f"{backbone}-{digest}.pth")
        monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
        weights = models.get_model_weights(backbone).DEFAULT
        monkeypatch.setattr(weights, "_value_", replace(weights.value, url=path.as_uri()))
        downloaded, from_file = VisionClassifier(3, backbone), VisionClassifier(3, backbone, weights=str(path))
        first = next(key for key in published if key.endswith("weight"))
        assert torch.equal(downloaded.model.state_dict()[first], published[first])
        from_file.load_state_dict(downloaded.state_dict())  # the same but for the new heads
        images = torch.randn(2, 3, 64, 64)
        assert torch.equal(downloaded.eval()(images), from_file.eval()(images))

    def test_old_files_of_weights(self, tmp_path):
        """They lack counters that torch had not invented, and have old names in DenseNets."""
        published = models.densenet121().state_dict()
        old = {
            re.sub(r"(denselayer\d+\.(?:norm|conv))([12])", r"\1.\2", key): value
            for key, value in published.items()
            if "num_batches_tracked" not in key
        }
        assert set(old) - set(published)
        torch.save(old, tmp_path / "old.pth")
        own = VisionClassifier(3, "densenet121", weights=str(tmp_path / "old.pth")).model.state_dict()
        assert all(torch.equal(own[key], value) for key, value in published.items() if "classifier" not in key)

    def test_weights_for_larger_images(self):
        with pytest.raises(
            ValueError, match=r"images of \(224, 224\) pixels.*IMAGENET1K_SWAG_E2E_V1 are for \(384, 384\)"
        ):
            VisionClassifier(3, "vit_b_16", weights="IMAGENET1K_SWAG_E2E_V1")

    def test_frozen_backbone_does_not_change(self, root):
        model = VisionClassifier(2, weights=None, freeze=True)
        before = copy.deepcopy(model.model.state_dict())
        trainer(max_epochs=2).fit(model, UTKFaceDataModule(root, image_size=16, batch_size=10))
        changed = {key for key, value in model.model.state_dict().items() if not torch.equal(value, before[key])}
        assert changed == {"fc.weight", "fc.bias"}

    def test_checkpoint_needs_no_weights(self, root, tmp_path):
        torch.save(models.resnet18().state_dict(), tmp_path / "resnet18.pth")
        model, run = VisionClassifier(2, weights=str(tmp_path / "resnet18.pth")), trainer(max_epochs=1)
        run.fit(model, UTKFaceDataModule(root, image_size=16, batch_size=10))
        run.save_checkpoint(tmp_path / "model.ckpt")
        (tmp_path / "resnet18.pth").unlink()
        again = VisionClassifier.load_from_checkpoint(tmp_path / "model.ckpt")
        assert torch.equal(again.model.fc.weight, model.model.fc.weight)
        with pytest.raises(ValueError, match="falls to 0 in 4 steps, but this training has 8"):
            trainer(max_epochs=2).fit(
                again, UTKFaceDataModule(root, image_size=16, batch_size=10), ckpt_path=tmp_path / "model.ckpt"
            )
        onward = VisionClassifier(2, weights=str(tmp_path / "model.ckpt"))
        assert torch.equal(onward.model.fc.weight, model.model.fc.weight)

    def test_end_of_training_must_be_known(self, root):
        with pytest.raises(ValueError, match=r"Expected Trainer\(max_epochs"):
            trainer(max_epochs=-1).fit(VisionClassifier(2, weights=None), UTKFaceDataModule(root, image_size=16))


class Evil:
    def __reduce__(self):
        return os.system, ("echo",)


def test_the_one_line(tmp_path):
    """Nothing but the callback: labels, groups and logits are found."""
    write_faces(tmp_path, number=400)
    data = UTKFaceDataModule(tmp_path, image_size=16, batch_size=40)
    fairbatch, monitor = FairBatch("equalized_odds", groups="race"), FairnessMonitor(groups="race")
    run = trainer(fairbatch, monitor, max_epochs=2)
    model = VisionClassifier(data.num_classes, weights=None)
    run.fit(model, data)
    run.test(model, data, verbose=False)
    assert fairbatch.index.label_names == ("male", "female")
    assert fairbatch.index.group_names == ("Asian", "Black", "Indian", "Others", "White")
    assert int(fairbatch.counts.sum()) == 280
    assert len(fairbatch.history) == 2
    assert monitor.audits["test"].num_samples == 80
    assert run.callback_metrics["test_accuracy"] == pytest.approx(monitor.audits["test"].values()["accuracy"])
