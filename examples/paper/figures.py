"""Draw the paper's figures, from what `run.py` left and from some more trainings.

    python examples/paper/figures.py --data DIRECTORY

Most curves are kept in --output, next to the results of `run.py`, and not measured again. The figures, in --pictures:

| file | shows | paper |
|---|---|---|
| share_path.png | how FairBatch moves the shares over the surface of the disparity, on COMPAS | Figure 1a |
| curves.png | the disparity over the epochs, of all methods that train one model | Figures 3 to 5 |
| models.png | the disparity over the models, of LBC and AdaFair | Figures 3 to 5 |
| tradeoff_*.png | accuracy and disparity for several tolerances | Figure 6 |
| class_weights.png | the weights of the cells in AdaFair's models and FairBatch's batches | Figure 7 |
| importance.png | the disparity over the epochs, with and without importance sampling | Figure 8 |

All but the first are of the synthetic data. What is missing in --output is left out, and said.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning as L
import torch

from data import Problem, problem  # isort: skip - first: it tells where the other examples are
from matplotlib.figure import Figure
from methods import CANDIDATES, GROUPS, METHODS, MODELS, solved
from run import Run, save
from scores import confusion, confusion_of, scores
from synthetic import quiet
from torch import Tensor
from torch.utils.data import TensorDataset
from tqdm.auto import tqdm

from fairbatch_lightning import GroupIndex, LossRank
from fairbatch_lightning.cells.index import natural_shares
from fairbatch_lightning.reports.curves import FairnessCurves
from fairbatch_lightning.reports.figures import runs_figure
from fairbatch_lightning.reports.pareto import TradeOffPoint, tradeoff_figure

CRITERIA = ("equal_opportunity", "demographic_parity")
LOW = {"equal_opportunity": 0.023, "demographic_parity": 0.051}
"""A disparity that counts as low: a fifth of that of plain training."""
TOLERANCES = {  # in units of the gap, which differ
    "equal_opportunity": (0.0, 0.1, 0.2, 0.3, float("inf")),
    "demographic_parity": (0.0, 0.5, 0.8, 1.0, 1.2, float("inf")),
}


class Watch(L.Callback):
    """Measures accuracy and disparity on some samples after every epoch."""

    def __init__(self, samples: TensorDataset, criterion: str) -> None:
        self._samples, self._criterion = samples, criterion
        self.scores: list[tuple[float, float]] = []

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.scores.append(scores(confusion_of(module, self._samples), self._criterion))


class Curves:
    """Curves of trainings on the synthetic data, each measured once."""

    def __init__(self, folder: Path, data: Path | None, epochs: int | None) -> None:
        loaded = problem("synthetic", data, 0)
        self._folder, self._problem = folder, loaded if epochs is None else replace(loaded, epochs=epochs)

    def curve(self, method: str, criterion: str, seed: int, setting: Mapping[str, Any]) -> list[tuple[float, float]]:
        """Return accuracy and disparity on the test set after every epoch."""
        name = "_".join(f"{key}={value}" for key, value in setting.items())
        file = self._folder / f"curve_{criterion}_{method}_{name}_{self._problem.epochs}_{seed}.json"
        if not file.exists():
            watch = Watch(self._problem.test, criterion)
            METHODS[method](self._problem.watched_by(watch), criterion, seed, **setting)
            save(file, watch.scores)
        return [tuple(pair) for pair in json.loads(file.read_text())]

    def disparities(self, method: str, criterion: str, seeds: Sequence[int], setting: Mapping) -> list[float]:
        """Return the mean disparity over seeds after every epoch."""
        found = [self.curve(method, criterion, seed, setting) for seed in seeds]
        return [fmean(disparity for _, disparity in epoch) for epoch in zip(*found, strict=True)]


def result(folder: Path, *run: Any) -> dict[str, Any] | None:
    """Return what `run.py` found, or say that it is missing."""
    file = Run(*run).file(folder)
    if not file.exists():
        print(f"Left out, for lack of {file}")
        return None
    return json.loads(file.read_text())


def over(what: str, found: dict[str, list[float]]) -> FairnessCurves:
    """Return curves by name over epochs or models, counted from 1."""
    return FairnessCurves(range(1, len(next(iter(found.values()))) + 1), found, {}, xlabel=what)


def methods_over_epochs(folder: Path, curves: Curves) -> Figure:
    """Draw the disparities of all methods of one model, with the settings that were chosen, over the epochs."""
    runs = {}
    single = [method for method in METHODS if method not in MODELS and method != "FairDRO"]  # for equalized odds
    for method in tqdm(single, "curves"):
        found = {}
        for criterion in CRITERIA:
            known = result(folder, "synthetic", criterion, method, 0) if method in CANDIDATES else {"setting": {}}
            if known is not None:
                found[criterion] = curves.disparities(method, criterion, [0], known["setting"])
        if len(found) == len(CRITERIA):
            epochs = min(map(len, found.values()))  # of Cutting they differ
            runs[method] = over("epoch", {name: curve[:epochs] for name, curve in found.items()})
    figure = runs_figure(runs, CRITERIA)
    for panel in figure.axes:
        panel.get_legend().remove()
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    figure.set_size_inches(10, 3.6)
    return figure


def disparities_over_models(folder: Path, data: Path | None) -> Figure | None:
    """Draw the disparities of the methods that need many models, by how many they may have."""
    given, runs = problem("synthetic", data, 0), {}
    for method in MODELS:
        known = {criterion: result(folder, "synthetic", criterion, method, 0) for criterion in CRITERIA}
        if not all(one and "models" in one for one in known.values()):
            return None
        numbers = range(1, max(one["models"] for one in known.values()) + 1)
        found = {}
        for criterion, one in known.items():
            models = [METHODS[method](given, criterion, 0, **one["setting"], rounds=number) for number in numbers]
            found[criterion] = [scores(confusion_of(model.logits, given.test), criterion)[1] for model in models]
        runs[method] = over("models", found)
    return runs_figure(runs, CRITERIA)


def importance_over_epochs(curves: Curves, seeds: Sequence[int]) -> Figure:
    """Draw FairBatch's disparity over the epochs with and without importance sampling; print when it is low."""
    runs = {}
    for name, setting in (("FairBatch", {}), ("LossRank(3, 0.998)", {"importance": LossRank(3, 0.998)})):
        found = {}
        for criterion in tqdm(CRITERIA, name):
            found[criterion] = curves.disparities("FairBatch", criterion, seeds, setting)
            each = [curves.disparities("FairBatch", criterion, [seed], setting) for seed in seeds]
            first = [low_from(disparities, LOW[criterion]) for disparities in each]
            end = found[criterion][-1]
            print(f"{name}, {criterion}: at most {LOW[criterion]} from epochs {first} on, ends at {end:.3f}")
        runs[name] = over("epoch", found)
    return runs_figure(runs, CRITERIA)


def low_from(disparities: Sequence[float], limit: float) -> int | None:
    """Return the epoch, from 1, from which on the disparity is at most the limit until the end.

    >>> low_from([0.3, 0.1, 0.3, 0.1, 0.1], 0.1), low_from([0.1, 0.3], 0.1)
    (4, None)
    """
    above = [epoch for epoch, disparity in enumerate(disparities, 1) if disparity > limit]
    last = above[-1] if above else 0
    return last + 1 if last < len(disparities) else None


def tolerances(curves: Curves, criterion: str, seeds: Sequence[int]) -> Figure:
    """Draw accuracy against disparity for several tolerances."""
    points = []
    for tolerance in tqdm(TOLERANCES[criterion], f"tolerances, {criterion}"):
        ends = [curves.curve("FairBatch", criterion, seed, {"tolerance": tolerance})[-1] for seed in seeds]
        accuracy, disparity = (fmean(values) for values in zip(*ends, strict=True))
        print(f"{criterion}, tolerance {tolerance:g}: accuracy {accuracy:.3f}, disparity {disparity:.3f}")
        points.append(TradeOffPoint("plain" if tolerance == float("inf") else f"{tolerance:g}", accuracy, disparity))
    return tradeoff_figure(points, criterion.replace("_", " "))


def surface(given: Problem, grid: Tensor) -> Tensor:
    """Return the disparity of equalized odds on the training set, by the second group's shares of both labels."""
    x, y, z = given.train.tensors
    counts = torch.zeros(4).index_add(0, 2 * y + z, torch.ones(len(y))).view(2, 2)
    found = torch.zeros(len(grid), len(grid))
    for row, share_of_0 in enumerate(grid):
        for column, share_of_1 in enumerate(grid):
            shares = torch.tensor([[1 - share_of_0, share_of_0], [1 - share_of_1, share_of_1]])
            weights = (shares * counts.sum(1, keepdim=True) / counts)[y, z]
            found[row, column] = scores(confusion(solved(x, y, weights)(x), given.train), "equalized_odds")[1]
    return found


def share_path(data: Path | None, epochs: int | None) -> Figure | None:
    """Draw the paths of the shares over the surface of the disparity on COMPAS, by the paper's rule and the default."""
    try:
        grid, given = torch.linspace(0.02, 0.98, 33), problem("compas", data, 0)
    except FileNotFoundError:
        print("Left out, for lack of COMPAS in --data: share_path")
        return None
    figure = Figure(figsize=(6.4, 5), layout="constrained")
    panel = figure.subplots()
    colours = panel.contourf(grid, grid, surface(given, grid), levels=16, cmap="Blues")
    figure.colorbar(colours, label="equalized odds disparity of a model trained with these shares")
    start = natural_shares(GroupIndex.from_dataset(given.train, groups=GROUPS).counts).float().unsqueeze(0)
    shorter = replace(given, epochs=epochs or given.epochs)
    for method, settings, name, style in (
        ("FairBatch", {"alpha": 0.02}, "SignedSteps(alpha=0.02), the paper's", "k-"),
        ("FairBatch, adaptive", {}, "Adaptive()", "r-"),
    ):
        trained = METHODS[method](shorter, "equalized_odds", 0, **settings)
        path = torch.cat([start, torch.tensor(trained.weights)])[:, :, 1]
        panel.plot(path[:, 1], path[:, 0], style, label=name)
        panel.plot(*path[-1].flip(0), style[0] + "o")
    panel.set(xlabel="share of women among the rearrested", ylabel="share of women among the others")
    panel.legend(loc="upper left")
    return figure


def class_weights(folder: Path, data: Path | None) -> Figure | None:
    """Draw the weights of the cells, in AdaFair's models and in FairBatch's batches."""
    known = {name: result(folder, "synthetic", "equalized_odds", name, 0) for name in ("AdaFair", "FairBatch")}
    if not all(known.values()):
        return None
    y = problem("synthetic", data, 0).train.tensors[1]
    rows = torch.bincount(y) / len(y)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for panel, name, unit in zip(figure.subplots(1, 2), known, ("model", "epoch"), strict=True):
        weights = torch.tensor(known[name]["weights"])
        weights = weights if name == "AdaFair" else weights * rows.unsqueeze(1)
        for number, style in enumerate(("C0-", "C0--", "C1-", "C1--")):
            panel.plot(weights.flatten(1)[:, number], style, label=f"y={number // 2}, z={number % 2}")
        panel.set(title=name, xlabel=unit, ylabel="weight of the cell", ylim=(0, None))
        panel.legend(frameon=False)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


Drawing = Callable[[argparse.Namespace, Curves], Figure | None]
FIGURES: dict[str, Drawing] = {
    "share_path": lambda args, _: share_path(args.data, args.epochs),
    "class_weights": lambda args, _: class_weights(args.output, args.data),
    "curves": lambda args, curves: methods_over_epochs(args.output, curves),
    "models": lambda args, _: disparities_over_models(args.output, args.data),
    "importance": lambda args, curves: importance_over_epochs(curves, range(args.seeds)),
    "tradeoff_equal_opportunity": lambda args, curves: tolerances(curves, "equal_opportunity", range(args.seeds)),
    "tradeoff_demographic_parity": lambda args, curves: tolerances(curves, "demographic_parity", range(args.seeds)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the directory with the data")
    parser.add_argument("--output", type=Path, default=Path("paper_results"), help="where the results of run.py are")
    parser.add_argument("--pictures", type=Path, default=Path("paper_results"), help="directory for the figures")
    parser.add_argument("--figures", nargs="+", default=list(FIGURES), choices=list(FIGURES))
    parser.add_argument("--seeds", type=int, default=3, help="of tolerances and importance sampling")
    parser.add_argument("--epochs", type=int, help="of every model; default: as in run.py")
    args = parser.parse_args()
    quiet()
    args.pictures.mkdir(parents=True, exist_ok=True)
    curves = Curves(args.output, args.data, args.epochs)
    for name in args.figures:
        if (figure := FIGURES[name](args, curves)) is not None:
            figure.savefig(args.pictures / f"{name}.png", dpi=100)


if __name__ == "__main__":
    main()
