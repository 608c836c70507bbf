"""Pictures of what FairBatch did. Needs matplotlib, which is imported only here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from fairbatch_lightning.callback import FairBatch

# Okabe and Ito's colours, which the colour-blind can tell apart; line styles do the same in greyscale.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def plot_history(fairbatch: FairBatch, path: str | Path) -> None:
    """Save a picture of the shares and losses of every cell and of the largest gap over the updates.

    Args:
        fairbatch: The callback, after training.
        path: Where to save it; the ending decides the format.
    """
    index, history = fairbatch.index, fairbatch.history
    if index is None or not history:
        raise ValueError("Expected a FairBatch callback that has trained for at least one update.")
    from matplotlib.figure import Figure

    num_labels = index.shape[0]
    figure = Figure(figsize=(4.2 * (num_labels + 1), 6.4), layout="constrained")
    panels = figure.subplots(2, num_labels + 1, squeeze=False)
    shares = torch.stack([history[0].shares_before, *(record.shares_after for record in history)])
    losses = torch.stack([record.losses for record in history])
    for label, name in enumerate(index.label_names):
        _draw_cells(panels[0][label], shares[:, label], index.group_names, first=0)
        panels[0][label].set(title=f"label {name}", ylabel="share of the label's draws", ylim=(0, None))
        _draw_cells(panels[1][label], losses[:, label], index.group_names, first=1)
        panels[1][label].set(ylabel="mean loss", xlabel="update", ylim=(0, None))
    _draw_gaps(panels[0][-1], torch.stack([record.gaps for record in history]), index.label_names)
    panels[1][-1].axis("off")
    panels[1][-1].legend(*panels[0][0].get_legend_handles_labels(), title="group", loc="upper left", frameon=False)
    figure.savefig(path, dpi=150)


def _draw_cells(axes: Any, values: torch.Tensor, names: tuple[str, ...], first: int) -> None:
    for group, name in enumerate(names):
        style = {"color": _COLOURS[group % 7], "linestyle": _STYLES[group % 4], "marker": _MARKERS[group % 7]}
        axes.plot(range(first, first + len(values)), values[:, group], markersize=3, label=name, **style)
    _tidy(axes)


def _draw_gaps(axes: Any, gaps: torch.Tensor, names: tuple[str, ...]) -> None:
    for label, name in enumerate(names):
        axes.plot(range(1, len(gaps) + 1), gaps[:, label], color="black", linestyle=_STYLES[label % 4], label=name)
    axes.set(title="gap between groups", xlabel="update", ylabel="largest minus smallest loss", ylim=(0, None))
    axes.legend(title="label", frameon=False)
    _tidy(axes)


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.xaxis.get_major_locator().set_params(integer=True)
