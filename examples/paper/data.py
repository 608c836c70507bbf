"""The paper's data sets, from the files as they were published, with its preprocessing (that of AIF360).

| name | files in the data's directory | from |
|---|---|---|
| synthetic | synthetic.npz; without a directory, generated | the authors, github.com/yuji-roh/fairbatch |
| compas | compas-scores-two-years.csv | github.com/propublica/compas-analysis |
| adult | adult.data, adult.test | archive.ics.uci.edu/dataset/2/adult |

Files may also be in a sub-directory, `raw`. Those of COMPAS and Adult can be downloaded, which compares checksums. The
split of the synthetic data is the authors'; of the others a fifth is left for the test, by the seed, as the paper's own
split is not published.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import lightning as L
import numpy as np
import torch
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parent.parent))  # for this and all that import it: the examples next to it
from synthetic import generate, load

Table = tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]
"""Features `(N, F)`, labels `(N,)` and groups `(N,)` of 0 and 1, and the features' names."""

SOURCES = {  # where a file was published, and its SHA-256
    "compas-scores-two-years.csv": (
        "https://raw.githubusercontent.com/propublica/compas-analysis/master/compas-scores-two-years.csv",
        "c451db85908b2f7fef1d83203bedf6b71ecda0d5af468d82ae62178f91d0cc7d",
    ),
    "adult.data": (
        "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/adult.data",
        "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
    ),
    "adult.test": (
        "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/adult.test",
        "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
    ),
}
ADULT_COLUMNS = (
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education-num",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital-gain",
    "capital-loss",
    "hours-per-week",
    "native-country",
    "income",
)
ADULT_NUMBERS = ("age", "education-num", "capital-gain", "capital-loss", "hours-per-week")
ADULT_CATEGORIES = ("workclass", "education", "marital-status", "occupation", "relationship", "native-country")


@dataclass(frozen=True)
class Problem:
    """A data set as the paper trains on it; samples are (x, y, z)."""

    name: str
    train: TensorDataset
    test: TensorDataset
    batch_size: int
    lr: float
    epochs: int
    callbacks: tuple[L.Callback, ...] = ()
    """Of every training, besides those of the method."""

    @property
    def num_features(self) -> int:
        return int(self.train.tensors[0].shape[1])

    def watched_by(self, *callbacks: L.Callback) -> Problem:
        return replace(self, callbacks=(*self.callbacks, *callbacks))


def find(directory: Path, name: str, *, download: bool = False) -> Path:
    """Return a file of the data's directory; if it is missing, download it or say where to get it."""
    for path in (directory / name, directory / "raw" / name):
        if path.exists():
            return path
    if not download or name not in SOURCES:
        raise FileNotFoundError(f"There is no {name} in {directory}, nor in its sub-directory raw. {__doc__}")
    directory.mkdir(parents=True, exist_ok=True)
    url, checksum = SOURCES[name]
    torch.hub.download_url_to_file(url, str(directory / name), hash_prefix=checksum)  # leaves nothing if it differs
    return directory / name


def one_hot(columns: dict[str, list[str]]) -> tuple[np.ndarray, list[str]]:
    """Return columns of 0 and 1 for every value of each column, and their names."""
    parts, names = [], []
    for column, values in columns.items():
        for value in sorted(set(values)):
            parts.append(np.array(values) == value)
            names.append(f"{column}={value}")
    return np.stack(parts, 1).astype(np.float32), names


def compas(directory: Path, *, download: bool = False) -> Table:
    """Read COMPAS: 5,278 people, whether they were arrested again within two years, and their sex (1: female)."""
    with find(directory, "compas-scores-two-years.csv", download=download).open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if _kept_of_compas(row)]
    sex = np.array([row["sex"] == "Female" for row in rows])
    race = np.array([row["race"] == "Caucasian" for row in rows])
    priors = ["0" if row["priors_count"] == "0" else _more_priors(int(row["priors_count"])) for row in rows]
    columns = {"age_cat": [row["age_cat"] for row in rows], "priors_count": priors}
    columns["c_charge_degree"] = [row["c_charge_degree"] for row in rows]
    categories, names = one_hot(columns)
    x = np.column_stack([sex, race, categories]).astype(np.float32)
    y = np.array([int(row["two_year_recid"]) for row in rows])
    return x, y, sex.astype(np.int64), ["sex", "race", *names]


def _kept_of_compas(row: dict[str, str]) -> bool:
    days = row["days_b_screening_arrest"]
    return (
        days != ""
        and -30 <= int(days) <= 30
        and row["is_recid"] != "-1"
        and row["c_charge_degree"] != "O"
        and row["score_text"] != "N/A"
        and row["race"] in ("African-American", "Caucasian")
    )


def _more_priors(number: int) -> str:
    return "1 to 3" if number <= 3 else "More than 3"


def adult(directory: Path, *, download: bool = False) -> Table:
    """Read Adult: 43,131 people, whether they earn more than 50,000 dollars, and their sex (1: male)."""
    files = [find(directory, name, download=download) for name in ("adult.test", "adult.data")]
    rows = [row for file in files for row in _rows_of_adult(file)]
    numbers = np.array([[float(row[name]) for name in ADULT_NUMBERS] for row in rows], np.float32)
    categories, names = one_hot({column: [row[column] for row in rows] for column in ADULT_CATEGORIES})
    sex, race = (np.array([row[k] == v for row in rows]) for k, v in (("sex", "Male"), ("race", "White")))
    x = np.column_stack([numbers[:, :2], race, sex, numbers[:, 2:], categories]).astype(np.float32)
    y = np.array([row["income"].startswith(">50K") for row in rows]).astype(np.int64)
    kept = np.array([row["race"] in ("White", "Black") for row in rows])  # values of the others keep their columns
    names = [*ADULT_NUMBERS[:2], "race", "sex", *ADULT_NUMBERS[2:], *names]
    return x[kept], y[kept], sex[kept].astype(np.int64), names


def _rows_of_adult(path: Path) -> Iterable[dict[str, str]]:
    with path.open() as file:
        for line in file:
            values = [value.strip() for value in line.split(",")]
            if len(values) == len(ADULT_COLUMNS) and "?" not in values:
                yield dict(zip(ADULT_COLUMNS, values, strict=True))


def split(table: Table, seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Return a training set and a test set, 4:1, with features scaled by the training set's mean and deviation."""
    x, y, z, _ = table
    order = np.random.default_rng(seed).permutation(len(y))
    cut = len(y) // 5
    train = x[order[cut:]]
    mean, deviation = train.mean(0), train.std(0)
    scaled = (x - mean) / np.where(deviation > 0, deviation, 1)
    tensors = torch.tensor(scaled, dtype=torch.float32), torch.tensor(y), torch.tensor(z)
    return tuple(TensorDataset(*(tensor[part] for tensor in tensors)) for part in (order[cut:], order[:cut]))


def problem(name: str, directory: Path | None, seed: int, *, download: bool = False) -> Problem:
    """Return one of the paper's problems; of COMPAS and Adult the split depends on the seed.

    Args:
        name: "synthetic", "compas" or "adult".
        directory: Where the data is; None for synthetic data that is generated.
        seed: Decides the split.
        download: Whether to download what is missing in the directory.
    """
    if name == "synthetic":
        generated = generate(2000, seed=0), generate(1000, seed=1)
        parts = generated if directory is None else load(find(directory, "synthetic.npz"))
        return Problem(name, *parts, batch_size=100, lr=0.0005, epochs=450)
    if directory is None:
        raise FileNotFoundError(f"Give the directory with the data, --data. {__doc__}")
    read = {"compas": compas, "adult": adult}[name]
    settings = {"compas": (200, 0.0005, 300), "adult": (1000, 0.0005, 200)}[name]
    return Problem(name, *split(read(directory, download=download), seed), *settings)
