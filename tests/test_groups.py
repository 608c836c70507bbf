"""Labels and groups are found wherever people keep them, without reading samples."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split

from fairbatch_lightning import FairBatchWarning, GroupIndex

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


def cells(index):
    """Return the (label name, group name) of every sample."""
    labels, groups = index.labels_and_groups(slice(None))
    return [(index.label_names[y], index.group_names[z]) for y, z in zip(labels, groups, strict=True)]


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
    assert cells(GroupIndex.from_dataset(Faces(), groups=values)) == EXPECTED


@pytest.mark.parametrize(
    "convert",
    [
        list,
        np.array,
        torch.tensor,
        pd.Series,
        lambda v: torch.tensor(v).float(),
        lambda v: torch.tensor(v).unsqueeze(1),
        lambda v: [torch.tensor(i) for i in v],
        lambda v: np.array(v, dtype=np.uint8),
        lambda v: np.array(v, dtype=object),
    ],
)
def test_arrays_of_integers(convert):
    index = GroupIndex.from_values(convert(LABELS), convert(GENDERS))
    assert index.counts.tolist() == [[1, 2], [3, 2]]
    assert index.label_values == (0, 1)
    assert index.group_names == ("0", "1")


@pytest.mark.parametrize("values", [[-1, 1, 1, -1], [7, 10**12, 10**12, 7]])
def test_any_integers_are_labels(values):
    index = GroupIndex.from_values(values, [0, 0, 1, 1])
    assert index.label_values == (min(values), max(values))
    assert index.counts.tolist() == [[1, 1], [1, 1]]


def test_booleans_have_names():
    index = GroupIndex.from_values([0, 1], np.array([True, False]))
    assert index.group_names == ("False", "True")


def test_groups_are_never_relabelled_by_what_is_present():
    """Group ids follow the values' order, and unlike ids names stay with their values in a subset."""
    part = GroupIndex.from_dataset(Subset(Faces(), [0, 2, 5]), groups="race")
    assert part.group_names == ("b", "c")


def test_attribute_names():
    assert cells(GroupIndex.from_dataset(Faces(), groups="race")) == EXPECTED
    index = GroupIndex.from_dataset(Faces(), labels="gender", groups="race")
    assert index.counts.tolist() == [[1, 2, 1], [2, 1, 1]]


def test_functions_of_the_dataset():
    index = GroupIndex.from_dataset(Faces(), labels=lambda d: d.gender, groups=lambda d: [r in "ab" for r in d.race])
    assert index.group_names == ("False", "True")


def test_functions_of_a_dataset_that_is_wrapped():
    part = Subset(Faces(), [6, 0])
    assert cells(GroupIndex.from_dataset(part, groups=lambda d: d.race)) == [EXPECTED[6], EXPECTED[0]]


def test_several_attributes_combine_and_only_pairs_that_occur_count():
    index = GroupIndex.from_dataset(Faces(), groups=["race", "gender"])
    assert index.group_names == (
        "race=a, gender=0",
        "race=a, gender=1",
        "race=b, gender=0",
        "race=b, gender=1",
        "race=c, gender=0",
        "race=c, gender=1",
    )
    names = [f"race={r}, gender={g}" for r, g in zip(RACES, GENDERS, strict=True)]
    assert [group for _, group in cells(index)] == names
    by_dict = GroupIndex.from_dataset(Faces(), groups={"race": RACES, "gender": "gender"})
    assert cells(by_dict) == cells(index)


def test_pairs_that_do_not_occur_make_no_group():
    index = GroupIndex.from_dataset(Faces(), groups={"race": RACES, "again": RACES, "gender": GENDERS})
    assert len(index.group_names) == 6


@pytest.mark.parametrize(
    "groups", ["race", RACES, lambda d: [RACES[i] for i in positions(d)]], ids=["name", "array", "function"]
)
def test_through_subsets(groups):
    dataset = Faces()
    nested = Subset(Subset(dataset, [7, 6, 5, 4, 3]), [4, 0, 2])
    assert cells(GroupIndex.from_dataset(nested, groups=groups)) == [EXPECTED[i] for i in (3, 7, 5)]
    part, _ = random_split(dataset, [5, 3], torch.Generator().manual_seed(0))
    assert cells(GroupIndex.from_dataset(part, groups=groups)) == [EXPECTED[i] for i in part.indices]


def positions(dataset):
    if isinstance(dataset, Subset):
        inner = positions(dataset.dataset)
        return [inner[i] for i in dataset.indices]
    return list(range(len(dataset)))


def test_through_concat_and_wrappers():
    both = ConcatDataset([Wrapper(Faces()), Subset(Faces(), [2, 0])])
    assert cells(GroupIndex.from_dataset(both, groups="race")) == [*EXPECTED, EXPECTED[2], EXPECTED[0]]
    assert cells(GroupIndex.from_dataset(Subset(both, [9, 1]), groups="race")) == [EXPECTED[0], EXPECTED[1]]
    as_array = GroupIndex.from_dataset(both, groups=[*RACES, RACES[2], RACES[0]])
    assert cells(as_array) == [*EXPECTED, EXPECTED[2], EXPECTED[0]]


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
    assert cells(GroupIndex.from_dataset(dataset, groups="ethnicity")) == EXPECTED


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
    assert cells(index) == names
    chosen = dataset.select([5, 1, 3]).with_format("torch")
    assert cells(GroupIndex.from_dataset(chosen, groups="race")) == [names[i] for i in (5, 1, 3)]
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
    assert cells(index) == EXPECTED
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
        (Faces(), {"groups": torch.zeros(8, 2)}, r"one value per sample but got an array of shape \(8, 2\)"),
        (Faces(), {"groups": ["a", float("nan")] * 4}, "4 of 8 are missing .the first at index 1"),
        (Faces(), {"groups": pd.Series(["a", None] * 4, dtype="string")}, "4 of 8 are missing .the first at index 1"),
        (Faces(), {"groups": [1.0, float("inf")] * 4}, "numbers such as inf"),
        (Faces(), {"groups": ["a", None] * 4}, "4 of 8 are missing .the first at index 1"),
        (Faces(), {"groups": pd.Series(["a", None] * 4)}, "4 of 8 are missing .the first at index 1"),
        (Faces(), {"groups": [1.0, float("nan")] * 4}, "4 of 8 are missing .the first at index 1"),
        (
            Faces(),
            {"groups": np.array([1j] * 8)},
            "`groups` to hold integers or strings but got values of type complex",
        ),
        (Broken(), {"groups": "race"}, "Found no groups in Broken: it has no attribute, column or sample entry 'race'"),
        (Subset(Broken(), [0, 1]), {}, "Found no groups in Broken: .* any of 'groups', 'group', 'z'. Pass `groups` as"),
        (Faces(), {"groups": {}}, "`groups` to name at least one attribute"),
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


def test_label_by_value_or_name():
    index = GroupIndex.from_values(["no", "yes"], [0, 1])
    assert index.row_of("yes") == 1
    index = GroupIndex.from_values([-1, 1], [0, 1])
    assert (index.row_of(1), index.row_of("-1")) == (1, 0)
    with pytest.raises(ValueError, match=r"label 2 to be one of the data's labels \[-1, 1\]"):
        index.row_of(2)


@pytest.mark.parametrize(("num_labels", "num_groups", "offset"), [(2, 2, 0), (30, 20, -7), (300, 3, 60_000)])
def test_millions_of_samples(num_labels, num_groups, offset):
    """Worked off in parts; NumPy's own sort does it in one."""
    random = np.random.default_rng(0)
    labels, groups = random.integers(num_labels, size=2_500_000), random.integers(num_groups, size=2_500_000)
    index = GroupIndex.from_values(labels + offset, groups)
    expected = labels * num_groups + groups
    assert np.array_equal(index.cells, expected)
    assert np.array_equal(index.order, np.argsort(expected, kind="stable"))
    assert np.array_equal(index.counts.flatten(), np.bincount(expected))
    assert np.array_equal(index.edges, np.concatenate([[0], np.cumsum(np.bincount(expected))]))
