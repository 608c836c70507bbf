"""The paper's table of fine-tuned models on UTKFace: {ResNet18, GoogLeNet} x {gender, age} x four methods.

    python examples/utkface_table.py --data UTKFace --normalize --weights resnet18=resnet18-f37072fd.pth

Every run leaves a file in --output, and is not repeated when the script is started again; several processes can share
out the work by --backbones, --labels and --seeds. Of every run the checkpoint with the highest accuracy in
validation is tested. A model without --weights is trained plainly first, on the same training set, and all methods
start from there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from fairbatch_lightning import EqualizedOdds, FairBatch, FairnessMonitor, SignedSteps
from fairbatch_lightning.callbacks.baselines import Cutting
from fairbatch_lightning.fairness import Audit
from fairbatch_lightning.vision import UTKFaceDataModule, VisionClassifier

METHODS = ("original", "cutting", "signed steps", "fairbatch")
PAPERS = ("original", "cutting", "fairbatch")
PAPER = {  # accuracy, equalized odds disparity and epochs, in the order of the paper's methods
    ("resnet18", "gender"): (".893 / .086 / 19", ".592 / .099 / 18", ".894 / .063 / 30"),
    ("resnet18", "age"): (".722 / .311 / 10", ".466 / .139 / 20", ".758 / .220 / 10"),
    ("googlenet", "gender"): (".888 / .105 / 20", ".606 / .076 / 20", ".891 / .061 / 11"),
    ("googlenet", "age"): (".746 / .294 / 14", ".495 / .168 / 9", ".741 / .202 / 8"),
}
FINE_TUNING = {"alpha": 0.05, "min_share": 0.02, "min_samples": 20, "update_every": 32}
"""What the paper's rule needs for a few epochs; with the default rule nothing is set."""
ENOUGH = 30
"""The disparity is that of cells with at least so many test samples; that of all cells stands beside it."""


class Run(NamedTuple):
    """One training."""

    backbone: str
    label: str
    method: str
    seed: int


def train(args: argparse.Namespace, run: Run, weights: str | None, keep: Path | None = None) -> dict[str, Any]:
    """Fine-tune a model and test its best checkpoint; return what it predicts. `keep` is a file for that checkpoint."""
    L.seed_everything(run.seed, verbose=False)
    data = UTKFaceDataModule(
        args.data,
        run.label,
        image_size=args.image_size,
        batch_size=args.batch_size,
        normalize=args.normalize,
        keep=True,
        seed=run.seed,
    )
    callback = callback_of(run)
    longer = args.cutting_longer if run.method == "cutting" else 1
    with tempfile.TemporaryDirectory() as folder:
        best = ModelCheckpoint(folder, monitor="val_accuracy", mode="max")
        monitor = FairnessMonitor(groups="race")
        trainer = L.Trainer(
            max_epochs=longer * args.epochs,
            val_check_interval=longer / args.validations,
            callbacks=[*([] if callback is None else [callback]), monitor, best],
            logger=False,
            enable_model_summary=False,
        )
        model = VisionClassifier(data.num_classes, run.backbone, weights=weights, lr=args.lr)
        start = time.perf_counter()
        trainer.fit(model, data)
        seconds = time.perf_counter() - start
        trainer.test(model, data, ckpt_path=best.best_model_path, verbose=False)
        if keep:
            shutil.copy(best.best_model_path, f"{keep}.part")
            os.replace(f"{keep}.part", keep)
    audit = monitor.audits["test"]
    shares = callback.shares.tolist() if isinstance(callback, FairBatch) else None
    return {
        "confusion": audit.confusion.tolist(),
        "labels": audit.label_names,
        "groups": audit.group_names,
        "epochs": longer * args.epochs,
        "seconds": seconds,
        "shares": shares,
        "settings": settings_of(args, run),
    }


def callback_of(run: Run) -> L.Callback | None:
    """Return what a method adds to the plain training."""
    if run.method == "cutting":
        return Cutting(groups="race", seed=run.seed)
    if run.method == "fairbatch":
        return FairBatch("equalized_odds", groups="race", seed=run.seed, verbose=False)
    return signed_steps(run.seed, **FINE_TUNING) if run.method == "signed steps" else None


def signed_steps(seed: int, alpha: float, min_share: float, min_samples: int, update_every: int) -> FairBatch:
    """Return FairBatch with the paper's rule."""
    criterion, rule = EqualizedOdds(min_samples), SignedSteps(alpha, min_share=min_share)
    return FairBatch(criterion, groups="race", rule=rule, update_every=update_every, seed=seed, verbose=False)


def settings_of(args: argparse.Namespace, run: Run) -> dict[str, Any]:
    """Return what must be the same in all runs of a table."""
    names = "epochs", "cutting_longer", "image_size", "batch_size", "validations", "lr", "normalize"
    return {name: getattr(args, name) for name in names} | (FINE_TUNING if run.method == "signed steps" else {})


def starting_weights(args: argparse.Namespace, run: Run) -> str:
    """Return the file that a training starts from, after training it plainly if there is none."""
    given = dict(pair.split("=", 1) for pair in args.weights)
    if run.backbone in given:
        return given[run.backbone]
    file = args.output / f"start_{run.backbone}_{run.label}_{run.seed}.ckpt"
    if not file.exists():
        print(f"{run.backbone} has no weights: plain training on {run.label}, seed {run.seed}")
        train(args, run._replace(method="original"), None, keep=file)
    return str(file)


def audit_of(result: dict[str, Any], min_samples: int = 1) -> Audit:
    """Return how fair the model of a run is."""
    confusion = torch.tensor(result["confusion"])
    positive = 1 if len(result["labels"]) == 2 else None
    return Audit(confusion, tuple(result["labels"]), tuple(result["groups"]), positive, min_samples=min_samples)


def short(number: float) -> str:
    """Return a number below 1 as text, without the zero in front."""
    return f"{number:.3f}".replace("0.", ".")


def spread(values: list[float]) -> str:
    """Return mean and standard deviation as text."""
    return short(fmean(values)) + (f" ± {short(stdev(values))}" if len(values) > 1 else "")


def disparity_text(results: list[dict[str, Any]], min_samples: int) -> str:
    """Return mean and spread of the disparity over runs, and the mean of the ends of its confidence intervals."""
    audits = [audit_of(result, min_samples) for result in results]
    low, high = (fmean(ends) for ends in zip(*(audit.intervals()["equalized_odds"] for audit in audits), strict=True))
    return f"{spread([audit.values()['equalized_odds'] for audit in audits])} ({short(low)} to {short(high)})"


def mean_difference(results: list[dict[str, Any]]) -> str:
    """Return by how much the rates of a group differ from all groups' on average, over cells with enough samples."""
    means = []
    for result in results:
        counts = torch.tensor(result["confusion"]).double()  # (groups, labels, predictions)
        rates, overall = (part / part.sum(-1, keepdim=True) for part in (counts, counts.sum(0)))
        means.append(float((rates - overall).abs()[counts.sum(2) >= ENOUGH].mean()))
    return spread(means)


def paired(results: dict[Run, dict[str, Any]], backbone: str, label: str, method: str, name: str) -> str:
    """Return what a method changes against the original, seed by seed: mean and spread of the differences."""
    differences = []
    for run, result in results.items():
        other = results.get(run._replace(method="original"))
        if run[:3] == (backbone, label, method) and other is not None:
            differences.append(audit_of(result, ENOUGH).values()[name] - audit_of(other, ENOUGH).values()[name])
    sign = spread(differences) if differences else "-"
    return f"+{sign}" if differences and fmean(differences) > 0 else sign


def table(results: dict[Run, dict[str, Any]]) -> str:
    """Return the paper's table, with ours beside it, in Markdown."""
    header = [
        "model",
        "label",
        "method",
        "accuracy",
        f"ED, cells of {ENOUGH}+",
        "ED, all cells",
        "mean difference",
        "epochs",
        "seeds",
    ]
    header += ["against original: accuracy", "ED", "paper: accuracy / ED / epochs"]
    lines = [header, ["---"] * len(header)]
    for backbone, label in dict.fromkeys(run[:2] for run in results):
        papers = dict(zip(PAPERS, PAPER.get((backbone, label), ("", "", "")), strict=True))
        for method in METHODS:
            found = [result for run, result in results.items() if run[:3] == (backbone, label, method)]
            if not found:
                continue
            change = [paired(results, backbone, label, method, name) for name in ("accuracy", "equalized_odds")]
            lines.append(
                [
                    backbone,
                    label,
                    method,
                    spread([audit_of(result).values()["accuracy"] for result in found]),
                    disparity_text(found, ENOUGH),
                    disparity_text(found, 1),
                    mean_difference(found),
                    str(found[0]["epochs"]),
                    str(len(found)),
                    *(change if method != "original" else ["", ""]),
                    papers.get(method, ""),
                ]
            )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="UTKFace: a folder, .tar or .zip")
    parser.add_argument("--weights", nargs="*", default=[], metavar="MODEL=FILE", help="pretrained weights")
    parser.add_argument("--output", type=Path, default=Path("utkface_table"), help="directory for results")
    parser.add_argument("--backbones", nargs="+", default=["resnet18", "googlenet"])
    parser.add_argument("--labels", nargs="+", default=["gender", "age"])
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--cutting-longer", type=int, default=2, help="epochs of Cutting, which are shorter, are so many"
    )
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--validations", type=int, default=8, help="in each epoch, to choose a checkpoint by")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--normalize", action="store_true", help="scale colours as torchvision's weights want it")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    results = {}
    for run in itertools.starmap(Run, itertools.product(args.backbones, args.labels, args.methods, args.seeds)):
        file = args.output / f"{'_'.join(map(str, run)).replace(' ', '-')}.json"
        if not file.exists():
            print(f"{run.backbone}, {run.label}, {run.method}, seed {run.seed}")
            result = train(args, run, starting_weights(args, run))
            file.with_suffix(".part").write_text(json.dumps(result))
            os.replace(file.with_suffix(".part"), file)
        results[run] = json.loads(file.read_text())
        if results[run]["settings"] != (settings := settings_of(args, run)):
            parser.error(
                f"{file} is of a run with {results[run]['settings']}, not {settings}. Choose another --output."
            )
    print(table(results))


if __name__ == "__main__":
    main()
