"""The paper's data: as it was published, and split by the seed."""

import hashlib

import numpy as np
import pytest
import torch

COMPAS = """\
id,sex,age_cat,race,priors_count,days_b_screening_arrest,c_charge_degree,is_recid,score_text,two_year_recid
1,Male,25 - 45,African-American,0,-1,F,0,Low,0
2,Female,Less than 25,Caucasian,2,30,M,1,High,1
3,Male,Greater than 45,Caucasian,4,0,F,1,Low,1
4,Male,25 - 45,Other,0,-1,F,0,Low,0
5,Male,25 - 45,Caucasian,0,31,F,0,Low,0
6,Male,25 - 45,Caucasian,0,,F,0,Low,0
7,Male,25 - 45,Caucasian,0,0,O,0,Low,0
8,Male,25 - 45,Caucasian,0,0,F,-1,Low,0
9,Male,25 - 45,Caucasian,0,0,F,0,N/A,0
"""
ADULT = """\
39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, Cuba, <=50K
50, Private, 83311, HS-grad, 9, Divorced, Sales, Husband, Black, Female, 0, 0, 13, United-States, >50K
38, ?, 1, HS-grad, 9, Divorced, ?, Husband, White, Male, 0, 0, 40, United-States, >50K
30, Private, 2, HS-grad, 9, Divorced, Sales, Husband, Other, Male, 0, 0, 40, Peru, >50K

"""
ADULT_TEST = """\
|1x3 Cross validator
25, Private, 226802, 11th, 7, Never-married, Sales, Own-child, Black, Male, 0, 0, 40, United-States, >50K.
"""


def test_compas(module, tmp_path):
    (tmp_path / "compas-scores-two-years.csv").write_text(COMPAS)
    x, y, z, names = module("data").compas(tmp_path)
    assert y.tolist() == [0, 1, 1]
    assert z.tolist() == [0, 1, 0]
    second = dict(zip(names, x[1].tolist(), strict=True))
    assert {name for name, value in second.items() if value} == {
        "sex",
        "race",
        "age_cat=Less than 25",
        "priors_count=1 to 3",
        "c_charge_degree=M",
    }


def test_adult(module, tmp_path):
    """Rows with missing values and of other races are left out; the latter's values have columns all the same."""
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "adult.data").write_text(ADULT)
    (tmp_path / "raw" / "adult.test").write_text(ADULT_TEST)
    x, y, z, names = module("data").adult(tmp_path)
    assert y.tolist() == [1, 0, 1]
    assert z.tolist() == [1, 1, 0]
    first = dict(zip(names, x[0].tolist(), strict=True))
    assert (first["age"], first["hours-per-week"], first["race"], first["education=11th"]) == (25, 40, 0, 1)
    assert "native-country=Peru" in names
    assert "fnlwgt" not in names


def test_missing_files(module, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"(?s)no adult.test in .*archive.ics.uci.edu"):
        module("data").problem("adult", tmp_path, 0)
    with pytest.raises(FileNotFoundError, match="Give the directory"):
        module("data").problem("compas", None, 0)


def test_download(module, tmp_path, monkeypatch):
    """A file with another checksum is refused, and not left where the next run would take it for good."""
    data = module("data")
    source = tmp_path / "source"
    source.write_text("as published")
    checksum = hashlib.sha256(b"as published").hexdigest()
    monkeypatch.setattr(data, "SOURCES", {"adult.data": (source.as_uri(), checksum)})
    found = data.find(tmp_path / "new" / "directory", "adult.data", download=True)
    assert found.read_text() == "as published"
    source.write_text("as changed")
    assert data.find(found.parent, "adult.data", download=True).read_text() == "as published"
    found.unlink()
    with pytest.raises(RuntimeError, match="invalid hash value"):
        data.find(found.parent, "adult.data", download=True)
    assert not list(found.parent.iterdir())
    with pytest.raises(FileNotFoundError, match=r"no adult.test"):
        data.find(found.parent, "adult.test", download=True)


def test_split_is_by_the_seed_and_scaled_by_the_training_set(module):
    random = np.random.default_rng(0)
    x = np.column_stack([random.normal(5, 3, 100), np.ones(100)])
    table = x, random.integers(2, size=100), random.integers(2, size=100), ["a", "b"]
    train, test = module("data").split(table, 0)
    assert (len(train), len(test)) == (80, 20)
    torch.testing.assert_close(train.tensors[0].mean(0), torch.zeros(2), atol=1e-5, rtol=0)
    assert train.tensors[0][:, 0].std(correction=0) == pytest.approx(1, abs=1e-5)
    again, other = (module("data").split(table, seed)[0].tensors[0] for seed in (0, 1))
    assert torch.equal(again, train.tensors[0])
    assert not torch.equal(other, train.tensors[0])
