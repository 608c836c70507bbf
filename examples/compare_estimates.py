"""Compare the ways to measure losses, FairBatch(estimate=...), on real data: accuracy, disparity, shares and time.

    python examples/compare_estimates.py DATA --tasks synthetic compas adult --out estimates

DATA is a directory with synthetic.npz (the authors' data, see synthetic.py), compas.npz and adult.npz (arrays x, y and
z), and for the task utkface utkface64.tar (all faces at 64 px) and weights/resnet18_backbone.pth. Prints a table per
task and criterion: mean and standard deviation over seeds, and the difference to the exact estimate with its 95%
confidence interval over seeds, paired. Writes every run with its path of shares to OUT/runs.json, which also lets an
interrupted comparison go on, and draws the paths.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import matplotlib as mpl
import numpy as np
import torch
from synthetic import DISPARITIES, SHORT, T_975, LogisticRegression, load
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, random_split
from tqdm.auto import tqdm

from fairbatch_lightning import FairBatch, SignedSteps
from fairbatch_lightning.fairness.disparities import group_confusion
from fairbatch_lightning.vision import UTKFace
from fairbatch_lightning.vision.utkface import RACES, square

ESTIMATES = ["plain", "exact", "sampled", "online", "validation"]


@dataclass
class Task:
    """A data set with the settings to train on it."""

    epochs: dict[str, int]
    batch_size: int
    lr: float
    alpha: float
    update_every: int | str = "epoch"
    groups: int = 2


TASKS = {
    "synthetic": Task({"EO": 300, "ED": 400, "DP": 450}, batch_size=100, lr=0.0005, alpha=0.005),
    "compas": Task({"EO": 200, "ED": 200, "DP": 200}, batch_size=200, lr=0.002, alpha=0.005),
    "adult": Task({"EO": 100, "ED": 100, "DP": 100}, batch_size=1000, lr=0.01, alpha=0.01),
    "utkface": Task({"ED": 4}, batch_size=32, lr=0.0003, alpha=0.02, update_every=25, groups=5),
}


class Rows(Dataset):
    """Hands out whole batches at once: with small models, fetching samples one by one takes longer than training."""

    def __init__(self, x: np.ndarray, y: np.ndarray, z: np.ndarray) -> None:
        self.x, self.targets, self.groups = (torch.as_tensor(values) for values in (x, y, z))

    def __len__(self) -> int:
        return len(self.x)

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [values[indices] for values in (self.x, self.targets, self.groups)]


def loader(dataset: Dataset, batch_size: int, shuffle: bool) -> DataLoader:
    return DataLoader(dataset, batch_size, shuffle=shuffle, collate_fn=lambda batch: batch)


class Classifier(LogisticRegression):
    """A logistic regression or a ResNet18 with a validation loop."""

    def __init__(self, example: Tensor, lr: float, weights: Path | None) -> None:
        super().__init__(example.numel() if example.ndim == 1 else 1)
        self.lr, self.net = lr, None
        if example.ndim == 3:
            from torchvision.models import resnet18

            self.net = resnet18()
            self.net.load_state_dict(torch.load(weights, weights_only=True), strict=False)
            self.net.fc = nn.Linear(self.net.fc.in_features, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.net is None else self.net(x / 255).squeeze(1)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", functional.binary_cross_entropy_with_logits(self(batch[0]), batch[1].float()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def datasets(task: str, data: Path, seed: int) -> tuple[Any, Any]:
    """Return the training and test set; the authors' split, or a random one of four to one."""
    if task == "synthetic":
        return tuple(Rows(*part.tensors) for part in load(data / "synthetic.npz"))
    if task == "utkface":
        x, y, z = faces(data / "utkface64.tar", number=5000)
    else:
        file = np.load(data / f"{task}.npz")
        x, y, z = file["x"], file["y"], file["z"]
        x = (x - x.mean(0)) / np.maximum(x.std(0), 1e-6)
    order = np.random.default_rng(seed).permutation(len(y))
    parts = order[len(y) // 5 :], order[: len(y) // 5]
    train, test = (Rows(x[i], y[i], z[i]) for i in parts)
    return train, test


def faces(path: Path, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return some faces at 32 px, their gender and race."""
    found = UTKFace(path, "gender", transform=square(32))
    some = sorted(np.random.default_rng(0).permutation(len(found))[:number])
    images = torch.stack([found[i][0] for i in some]).float().numpy()
    races = np.array([RACES.index(race) for race in found.races])
    return images, np.array(found.targets)[some], races[some]


def run(task: str, criterion: str, estimate: str, seed: int, data: Path) -> dict[str, Any]:
    """Train one model; return its accuracy and disparity on the test set, and what FairBatch did."""
    settings = TASKS[task]
    train, test = datasets(task, data, seed)
    held_out = None
    if estimate == "validation":
        train, held_out = random_split(train, [0.8, 0.2], torch.Generator().manual_seed(seed))
    L.seed_everything(seed, verbose=False)
    model = Classifier(test.x[0], settings.lr, data / "weights" / "resnet18_backbone.pth")
    every = "epoch" if estimate == "validation" else settings.update_every
    fair = None
    if estimate != "plain":
        rule = SignedSteps(alpha=settings.alpha)
        fair = FairBatch(
            criterion, "groups", rule=rule, estimate=estimate, update_every=every, seed=seed, verbose=False
        )
    often = {"val_check_interval": settings.update_every, "check_val_every_n_epoch": None}
    trainer = L.Trainer(
        max_epochs=settings.epochs[SHORT[criterion]],
        callbacks=[fair] if fair else [],
        accelerator="cpu",
        barebones=True,
        **({} if settings.update_every == "epoch" else often),
    )
    loaders = loader(train, settings.batch_size, shuffle=True), held_out and loader(held_out, 1000, shuffle=False)
    start = time.perf_counter()
    trainer.fit(model, *loaders)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        predictions = (model.eval()(test.x) > 0).long()
    confusion = group_confusion(predictions, test.targets, test.groups, num_labels=2, num_groups=settings.groups)
    history = fair.history if fair else []
    return {
        "accuracy": float((predictions == test.targets).float().mean()),
        "disparity": float(DISPARITIES[criterion](confusion)),
        "seconds per epoch": seconds / trainer.max_epochs,
        "shares": [record.shares_after.flatten().tolist() for record in history],
    }


def table(runs: dict[str, Any], task: str, criterion: str, seeds: int) -> str:
    """Return the rows of one task and criterion as Markdown."""
    short = SHORT[criterion]
    lines = [
        f"**{task}, {short}**, {TASKS[task].epochs[short]} epochs, {seeds} seeds\n",
        f"| estimate | accuracy | {short} disparity | its difference to exact | path of shares | time per epoch |",
        "|---|---|---|---|---|---|",
    ]
    found = {e: [runs.get(f"{task} {criterion} {e} {seed}") for seed in range(seeds)] for e in ESTIMATES}
    found = {estimate: rows for estimate, rows in found.items() if None not in rows}
    for estimate, rows in found.items():
        accuracy, disparity = (spread([row[name] for row in rows]) for name in ("accuracy", "disparity"))
        exact = found.get("exact") if estimate not in ("plain", "exact") else None
        cells = [
            estimate,
            accuracy,
            disparity,
            difference(rows, exact),
            path(rows, exact),
            cost(rows, found.get("plain")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def spread(values: list[float]) -> str:
    return f"{np.mean(values):.3f} ± {np.std(values):.3f}"


def difference(rows: list[dict], exact: list[dict] | None) -> str:
    """Return the mean of the paired differences in disparity, with its 95% confidence interval."""
    if exact is None or len(rows) < 2:
        return ""
    values = np.array([a["disparity"] - b["disparity"] for a, b in zip(rows, exact, strict=True)])
    half = T_975[min(len(rows), 10) - 1] * values.std(ddof=1) / np.sqrt(len(rows))
    return f"{values.mean():+.4f} ± {half:.4f}"


def path(rows: list[dict], exact: list[dict] | None) -> str:
    """Return how far the shares were from the exact estimate's, on average over all updates."""
    if exact is None or any(len(a["shares"]) != len(b["shares"]) for a, b in zip(rows, exact, strict=True)):
        return ""
    pairs = [np.array(a["shares"]) - np.array(b["shares"]) for a, b in zip(rows, exact, strict=True) if a["shares"]]
    return f"off by {np.mean([np.abs(pair).max(1).mean() for pair in pairs]):.3f}" if pairs else ""


def cost(rows: list[dict], plain: list[dict] | None) -> str:
    """Return the time of an epoch, and its ratio to plain training with the same seed."""
    times = [row["seconds per epoch"] for row in rows]
    if plain is None:
        return f"{np.median(times):.3f} s"
    ratio = np.median([time / other["seconds per epoch"] for time, other in zip(times, plain, strict=True)])
    return f"{np.median(times):.3f} s, {ratio:.2f} x plain"


def draw(runs: dict[str, Any], task: str, criterion: str, path: Path) -> None:
    """Draw how the first group's shares went in the first seed, one line per estimate and label."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for estimate, style in zip(ESTIMATES[1:], ("-", "--", ":", "-."), strict=True):
        shares = np.array(runs.get(f"{task} {criterion} {estimate} 0", {}).get("shares", []))
        if len(shares):
            cells = shares.shape[1] // 2
            for label, colour in enumerate(("black", "tab:orange")):
                axes.plot(shares[:, label * cells], style, color=colour, label=f"{estimate}, label {label}")
    axes.set(xlabel="update", ylabel="share of the first group", title=f"{task}, {SHORT[criterion]}", ylim=(0, 1))
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=["synthetic", "compas", "adult"])
    parser.add_argument("--criteria", nargs="+", choices=list(SHORT), default=list(SHORT))
    parser.add_argument("--estimates", nargs="+", choices=ESTIMATES, default=ESTIMATES)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int, help="for all tasks; default: those in this file")
    parser.add_argument("--threads", type=int, default=1, help="of torch; small models want one")
    parser.add_argument("--out", type=Path, default=Path("estimates"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for name in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(f"{name}.utilities.rank_zero").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "runs.json"
    runs = json.loads(path.read_text()) if path.exists() else {}
    for task in args.tasks:
        criteria = [criterion for criterion in args.criteria if SHORT[criterion] in TASKS[task].epochs]
        for criterion in criteria:
            if args.epochs:
                TASKS[task].epochs[SHORT[criterion]] = args.epochs
            for seed in tqdm(range(args.seeds), f"{task}, {SHORT[criterion]}", leave=False):
                for estimate in args.estimates:
                    key = f"{task} {criterion} {estimate} {seed}"
                    if key not in runs:
                        runs[key] = run(task, criterion, estimate, seed, args.data)
                        path.write_text(json.dumps(runs))
            print(table(runs, task, criterion, args.seeds), flush=True)
            draw(runs, task, criterion, args.out / f"{task}_{SHORT[criterion]}.png")


if __name__ == "__main__":
    main()
