"""Labels and groups are found wherever people keep them, without reading samples."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import named_cells
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split

from fairbatch_lightning import FairBatchWarning, GroupIndex
from fairbatch_lightning.cells.lookup import are_values_of, check_findable

LABELS = [0, 1, 1, 0, 1, 0, 1, 1]
RACES = ["b", "a", "b", "b", "a", "c", "c", "a"]
GENDERS = [0, 1, 0, 1, 0, 1, 0, 1]


class Faces(Dataset):
    """Attributes as torchvision's datasets have them, and samples that must not be read."""

    def __init__(self, targets=LABELS, race=RACES, gender=GENDERS):
        self.targets, self.race, self.gender = targets, race, gender

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        raise AssertionError("a sample was read")


class Wrapper(Dataset):
    """Someone's own wrapper that applies a transform."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        raise AssertionError("a sample was read")


EXPECTED = [(str(y), z) for y, z in zip(LABELS, RACES, strict=True)]


@pytest.mark.parametrize(
    "values",
    [
        np.array(RACES),
        np.array(RACES, dtype=object),
        np.array(RACES, dtype="S1"),
        RACES,
        tuple(RACES),
        pd.Series(RACES),
        pd.Series(RACES, index=range(100, 108)),
        pd.Series(RACES, dtype="category"),
    ],
    ids=["numpy", "objects", "bytes", "list", "tuple", "pandas", "pandas-index", "categorical"],
)
def test_arrays_of_strings(values):
    assert named_cells(GroupIndex.from_dataset(Faces(), groups=values)) == EXPECTED


def test_attribute_names():
    assert named_cells(GroupIndex.from_dataset(Faces(), groups="race")) == EXPECTED
    index = GroupIndex.from_dataset(Faces(), labels="gender", groups="race")
    assert index.counts.tolist() == [[1, 2, 1], [2, 1, 1]]


def test_functions_of_the_dataset():
    index = GroupIndex.from_dataset(Faces(), labels=lambda d: d.gender, groups=lambda d: [r in "ab" for r in d.race])
    assert index.group_names == ("False", "True")


def test_functions_of_a_dataset_that_is_wrapped():
    part = Subset(Faces(), [6, 0])
    assert named_cells(GroupIndex.from_dataset(part, groups=lambda d: d.race)) == [EXPECTED[6], EXPECTED[0]]


def test_an_attribute_error_of_a_function_is_its_own():
    """Where there is no dataset inside to try, it is not turned into something else."""
    with pytest.raises(AttributeError, match="ethnicity"):
        GroupIndex.from_dataset(Faces(), groups=lambda d: d.ethnicity)


@pytest.mark.parametrize(
    "groups", ["race", RACES, lambda d: [RACES[i] for i in positions(d)]], ids=["name", "array", "function"]
)
def test_through_subsets(groups):
    dataset = Faces()
    nested = Subset(Subset(dataset, [7, 6, 5, 4, 3]), [4, 0, 2])
    assert named_cells(GroupIndex.from_dataset(nested, groups=groups)) == [EXPECTED[i] for i in (3, 7, 5)]
    part, _ = random_split(dataset, [5, 3], torch.Generator().manual_seed(0))
    assert named_cells(GroupIndex.from_dataset(part, groups=groups)) == [EXPECTED[i] for i in part.indices]


def positions(dataset):
    if isinstance(dataset, Subset):
        inner = positions(dataset.dataset)
        return [inner[i] for i in dataset.indices]
    return list(range(len(dataset)))


def test_through_concat_and_wrappers():
    both = ConcatDataset([Wrapper(Faces()), Subset(Faces(), [2, 0])])
    assert named_cells(GroupIndex.from_dataset(both, groups="race")) == [*EXPECTED, EXPECTED[2], EXPECTED[0]]
    assert named_cells(GroupIndex.from_dataset(Subset(both, [9, 1]), groups="race")) == [EXPECTED[0], EXPECTED[1]]
    as_array = GroupIndex.from_dataset(both, groups=[*RACES, RACES[2], RACES[0]])
    assert named_cells(as_array) == [*EXPECTED, EXPECTED[2], EXPECTED[0]]


def test_a_wrapper_that_leaves_samples_out_is_not_looked_through():
    """It does not say which, so the values would belong to other samples."""

    class Shorter(Wrapper):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return None, LABELS[2 * index], RACES[2 * index]

    with pytest.warns(FairBatchWarning, match="Reading all 4 samples of Shorter"):
        index = GroupIndex.from_dataset(Shorter(Faces()), groups=2)
    assert named_cells(index) == EXPECTED[::2]


def test_tensor_dataset():
    dataset = TensorDataset(torch.zeros(8, 3), torch.tensor(LABELS), torch.tensor(GENDERS))
    assert GroupIndex.from_dataset(dataset).counts.tolist() == [[1, 2], [3, 2]]
    assert GroupIndex.from_dataset(dataset, labels=2, groups=1).counts.tolist() == [[1, 3], [2, 2]]


def test_torchvision_folder_is_not_decoded(tmp_path):
    datasets = pytest.importorskip("torchvision.datasets")
    for name, number in (("cat", 3), ("dog", 2)):
        (tmp_path / name).mkdir()
        for i in range(number):
            (tmp_path / name / f"{i}.png").write_bytes(b"not an image")
    folder = datasets.ImageFolder(tmp_path)
    index = GroupIndex.from_dataset(folder, groups=["x", "y", "x", "y", "x"])
    assert index.label_names == ("cat", "dog")
    assert index.label_values == (0, 1)
    assert index.counts.tolist() == [[2, 1], [1, 1]]
    named = GroupIndex.from_dataset(folder, groups=lambda d: [path.endswith("0.png") for path, _ in d.samples])
    assert named.group_names == ("False", "True")


def test_celeba_style_attributes():
    dataset = Faces()
    dataset.attr, dataset.attr_names = torch.tensor([[0, 1]] * 4 + [[1, 0]] * 4), ["Smiling", "Male", ""]
    index = GroupIndex.from_dataset(dataset, labels="Smiling", groups="Male")
    assert index.counts.tolist() == [[0, 4], [4, 0]]


def test_data_frame_inside_a_dataset():
    dataset = Faces()
    dataset.frame = pd.DataFrame({"ethnicity": RACES})
    assert named_cells(GroupIndex.from_dataset(dataset, groups="ethnicity")) == EXPECTED


def test_hugging_face_columns_are_not_decoded():
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["no", "yes"]), "race": datasets.Value("string")}
    )
    rows = {"image": [{"bytes": b"broken", "path": None}] * 8, "label": LABELS, "race": RACES}
    dataset = datasets.Dataset.from_dict(rows, features=features)
    index = GroupIndex.from_dataset(dataset, groups="race")
    assert index.label_names == ("no", "yes")
    assert index.label_values == (0, 1)
    names = [(["no", "yes"][y], z) for y, z in zip(LABELS, RACES, strict=True)]
    assert named_cells(index) == names
    chosen = dataset.select([5, 1, 3]).with_format("torch")
    assert named_cells(GroupIndex.from_dataset(chosen, groups="race")) == [names[i] for i in (5, 1, 3)]
    by_class = GroupIndex.from_dataset(dataset, labels=GENDERS, groups="label")
    assert by_class.group_names == ("no", "yes")


class Samples(Dataset):
    """A dataset that has its labels and groups only in the samples."""

    def __init__(self, make):
        self.make, self.reads = make, 0

    def __len__(self):
        return 8

    def __getitem__(self, index):
        self.reads += 1
        torch.rand(1)  # a random transform
        return self.make(torch.zeros(3), LABELS[index], RACES[index])


@pytest.mark.parametrize(
    ("make", "labels", "groups"),
    [
        (lambda x, y, z: (x, y, z), None, None),
        (lambda x, y, z: (x, z, y), 2, 1),
        (lambda x, y, z: {"x": x, "label": y, "race": z}, None, "race"),
        (lambda x, y, z: SimpleNamespace(x=x, y=y, race=z), None, "race"),
    ],
    ids=["tuple", "positions", "dict", "object"],
)
def test_last_resort_reads_all_samples_once_with_a_hint(make, labels, groups, capsys):
    state = torch.get_rng_state()
    with pytest.warns(FairBatchWarning, match="Reading all 8 samples of Samples once to learn their"):
        index = GroupIndex.from_dataset(dataset := Samples(make), labels, groups)
    assert named_cells(index) == EXPECTED
    assert dataset.reads == 1 + 8  # a look at the first, and once all of them
    assert torch.equal(torch.get_rng_state(), state)
    assert "Reading groups and labels" in capsys.readouterr().err


class Broken(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.zeros(3), LABELS[index]


@pytest.mark.parametrize(
    ("dataset", "arguments", "message"),
    [
        (Faces(), {"groups": [0, 1, 0]}, "`groups` to have one value for each of the 8 samples of .* but got 3"),
        (Subset(Faces(), [0, 1]), {"groups": [0, 1, 0]}, "each of the 8 samples of .* but got 3"),
        (ConcatDataset([Faces(), Faces()]), {"groups": [0, 1, 0]}, "each of the 16 samples of .* but got 3"),
        (Faces(), {"groups": lambda d: [1]}, "`groups` to have one value for each of the 8 samples of .* but got 1"),
        (Faces(), {"groups": [0.1] * 8}, "`groups` to be categories .* numbers such as 0.1.*torch.bucketize"),
        (Faces(), {"groups": ["a", None] * 4}, "4 of 8 are missing .the first at index 1"),
        (Broken(), {"groups": "race"}, "Found no groups in Broken: it has no attribute, column or sample entry 'race'"),
        (Subset(Broken(), [0, 1]), {}, "Found no groups in Broken: .* any of 'groups', 'group', 'z'. Pass `groups` as"),
    ],
)
def test_bad_input_is_refused(dataset, arguments, message):
    with pytest.raises(ValueError, match=message):
        GroupIndex.from_dataset(dataset, **arguments)


def test_parts_with_other_class_names_are_refused(tmp_path):
    datasets = pytest.importorskip("torchvision.datasets")
    folders = []
    for part, names in (("one", ["cat", "dog"]), ("two", ["cat", "cow"])):
        for name in names:
            (tmp_path / part / name).mkdir(parents=True)
            Image.new("RGB", (2, 2)).save(tmp_path / part / name / "0.png")
        folders.append(datasets.ImageFolder(tmp_path / part))
    with pytest.raises(ValueError, match=r"name their labels alike but got .*'cat', 'dog'.*'cat', 'cow'"):
        GroupIndex.from_dataset(ConcatDataset(folders), groups=[0, 1, 0, 1])


def test_values_are_told_from_where_to_find_them():
    part = Subset(Faces(), [0, 1, 2])
    assert are_values_of(RACES, Faces())
    assert are_values_of(RACES, part)
    assert not are_values_of("race", Faces())
    assert not are_values_of(["race", "gender"], Faces())


@pytest.mark.parametrize("source", [None, "race", 2, ["race", "gender"], {"race": "race"}, lambda d: d.race])
def test_what_can_be_found_in_any_dataset_is_taken(source):
    check_findable("groups", source, "FairnessMonitor")


@pytest.mark.parametrize("source", [RACES, torch.tensor(GENDERS), np.array(RACES)], ids=["list", "tensor", "numpy"])
def test_values_where_there_has_group_datasets_are_refused(source):
    with pytest.raises(ValueError, match=r"`groups` of FairnessMonitor to be the name .* but got values: \w+ of 8"):
        check_findable("groups", source, "FairnessMonitor")


# ---- several values per sample, and what a dataset has --------------------------------------------------------------


class Attributes(Dataset):
    """As torchvision's CelebA: many attributes of every sample, and images that are slow to decode."""

    names = ("Smiling", "Male", "Young", *(f"Other_{number}" for number in range(37)))

    def __init__(self, number=8, label=None):
        self.attr = torch.arange(number * 40).reshape(number, 40) % 2
        self.attr_names, self.reads = [*self.names, ""], 0
        self.identity = list(range(number))
        self.label = label

    def __len__(self):
        return len(self.attr)

    def __getitem__(self, index):
        self.reads += 1
        return torch.zeros(3), self.attr[index]


def refusal(dataset, **arguments):
    with pytest.raises(ValueError, match=r"Expected|Found") as error:
        GroupIndex.from_dataset(dataset, **arguments)
    return str(error.value)


@pytest.mark.parametrize("where", ["samples", "attribute", "part"])
def test_several_values_per_sample_are_refused_after_one_look(where):
    dataset = Attributes()
    if where == "attribute":
        dataset.targets = dataset.attr
    message = refusal(Subset(dataset, [0, 1, 2]) if where == "part" else dataset, groups="Male")
    assert dataset.reads <= 1
    assert "`labels` to hold one value per sample" in message
    assert "(40,)" in message or "(8, 40)" in message
    assert "labels='Smiling'" in message
    assert all(f"'{name}'" in message for name in ("Smiling", "Male", "identity"))
    assert "lambda data: data." in message
    found = GroupIndex.from_dataset(dataset, labels="Smiling", groups=lambda data: data.attr[:, 1])
    assert len(found) == 8


def test_several_values_per_sample_where_there_is_nothing_else():
    dataset = TensorDataset(torch.zeros(8, 3), torch.zeros(8, 40), torch.zeros(8, 1))
    message = refusal(dataset)
    assert "`labels` to hold one value per sample but got an array of shape (8, 40)" in message
    assert "labels=lambda data: data.tensors[1][:, 0]" in message


def test_a_name_that_a_dataset_does_not_have():
    """What it has is listed, the most similar name first."""
    dataset = Faces()
    dataset.frame = pd.DataFrame({"ethnicity": RACES, "age": GENDERS})
    dataset.__class__ = type("Labelled", (Faces,), {"__getitem__": lambda self, index: (None, self.targets[index])})
    for given in (dataset, Subset(dataset, [0, 1]), ConcatDataset([dataset, dataset])):
        message = refusal(given, groups="etnicity")
        assert "Found no groups in Labelled: it has no attribute, column or sample entry 'etnicity'" in message
        assert "Did you mean groups='ethnicity'? It has 'ethnicity', 'age', 'gender', 'race', 'targets'." in message


def test_a_function_that_works_on_the_parts_of_a_concatenation():
    both = ConcatDataset([Faces(), Subset(Faces(), [2, 0])])
    for source in (lambda data: data.race, lambda data: list(data.race)):
        assert named_cells(GroupIndex.from_dataset(both, groups=source)) == [*EXPECTED, EXPECTED[2], EXPECTED[0]]
    with pytest.raises(AttributeError, match="ethnicity"):
        GroupIndex.from_dataset(both, groups=lambda data: data.ethnicity)


def test_through_a_wrapper_that_holds_a_subset():
    class Transformed(Dataset):
        def __init__(self, subset):
            self.subset = subset

        def __len__(self):
            return len(self.subset)

        def __getitem__(self, index):
            raise AssertionError("a sample was read")

    wrapped = Transformed(Subset(Faces(), [6, 0]))
    for source in ("race", RACES, lambda data: data.race):
        assert named_cells(GroupIndex.from_dataset(wrapped, groups=source)) == [EXPECTED[6], EXPECTED[0]]
    assert are_values_of(RACES, wrapped)


def test_a_position_as_a_text():
    """As a command line has it; a column of that name comes first."""
    dataset = TensorDataset(torch.zeros(8, 3), torch.tensor(LABELS), torch.tensor(GENDERS))
    assert GroupIndex.from_dataset(dataset, labels="2", groups="1").counts.tolist() == [[1, 3], [2, 2]]
    with pytest.warns(FairBatchWarning, match="Reading all 8 samples"):
        index = GroupIndex.from_dataset(Samples(lambda x, y, z: (x, y, z)), "1", "2")
    assert named_cells(index) == EXPECTED
    named = Faces()
    named.frame = pd.DataFrame({"2": RACES})
    assert named_cells(GroupIndex.from_dataset(named, groups="2")) == EXPECTED
