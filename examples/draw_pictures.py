"""Draw the pictures of the documentation from what `fairbatch demo` left behind.

fairbatch demo && python examples/draw_pictures.py fairbatch_demo docs/images
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from fairbatch_lightning.fairness import Audit
from fairbatch_lightning.fairness.disparities import equal_opportunity_rates
from fairbatch_lightning.reports.figures import confusion_figure, fairness_figure, shares_figure
from fairbatch_lightning.reports.log_format import read_run
from fairbatch_lightning.vision.faces import HEADS, LABELS, draw_faces


def before_and_after(plain: Audit, fair: Audit) -> Figure:
    """Draw some faces, and the error of every cell without and with FairBatch."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    grid = figure.add_gridspec(len(LABELS), len(HEADS) + 5)
    groups = plain.group_names
    for row, label in enumerate(LABELS):
        mouths = np.full(len(groups), 1.3 if label == "smiling" else -1.3)
        faces = draw_faces(mouths, groups, np.random.default_rng(row + 3), size=64)
        for column, group in enumerate(groups):
            panel = figure.add_subplot(grid[row, column])
            panel.imshow(faces[column].permute(1, 2, 0).numpy())
            panel.set(xticks=[], yticks=[])
            if row == 0:
                panel.set_title(group, fontsize="medium")
            if column == 0:
                panel.set_ylabel(label)
    panel = figure.add_subplot(grid[:, len(groups) :])
    errors = [100 * (1 - equal_opportunity_rates(audit.confusion, None).by_group.numpy()) for audit in (plain, fair)]
    cells = [(y, z) for y in range(len(LABELS)) for z in range(len(groups))]
    places = np.arange(len(cells))
    for shift, values, name, style in (
        (-0.2, errors[0], "plain", {"color": "white", "edgecolor": "#D55E00", "hatch": "///"}),
        (0.2, errors[1], "with FairBatch", {"color": "#0072B2"}),
    ):
        bars = panel.bar(places + shift, [values[z, y] for y, z in cells], 0.38, label=name, **style)
        panel.bar_label(bars, fmt="%.0f", fontsize="small")
    panel.set_xticks(places, [f"{LABELS[y]}\n{groups[z]}" for y, z in cells])
    panel.set(ylabel="wrong on the test set, %", title="the same ResNet18, one line apart")
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, loc="upper right")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path, help="the demo's output directory")
    parser.add_argument("output", type=Path, help="directory for the pictures")
    args = parser.parse_args()
    plain, fair = (read_run(name, args.demo / name / "metrics.csv") for name in ("plain", "fairbatch"))
    audit = fair.audits["test"]
    pictures = {
        "before_and_after": before_and_after(plain.audits["test"], audit),
        "shares": shares_figure(fair.shares),
        "fairness": fairness_figure(fair.curves["val"]),
        "confusion": confusion_figure(audit.confusion, audit.label_names, audit.group_names),
    }
    args.output.mkdir(parents=True, exist_ok=True)
    for name, figure in pictures.items():
        figure.savefig(args.output / f"{name}.png", dpi=100)


if __name__ == "__main__":
    main()
