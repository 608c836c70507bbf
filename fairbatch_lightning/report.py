"""`fairbatch report`: what happened in training runs, as pictures and one HTML page, from their CSV logs."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from fairbatch_lightning.audit import ACCURACIES, CELL_HEADER, CRITERIA
from fairbatch_lightning.csv_logs import Run
from fairbatch_lightning.plots import (
    TradeOffPoint,
    confusion_figure,
    fairness_figure,
    runs_figure,
    shares_figure,
    tradeoff_figure,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1100px; margin: 2rem auto;
       padding: 0 1rem; }
h2 { border-top: 1px solid #ccc; padding-top: 1rem; margin-top: 2.5rem; }
figure { margin: 1.5rem 0; } figcaption { color: #555; } img { max-width: 100%; height: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-size: .85rem; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid #ddd; white-space: nowrap; }
td:not(.text) { text-align: right; font-variant-numeric: tabular-nums; } th { text-align: left; }
small { color: #555; } .wide { overflow-x: auto; }
.row { display: flex; flex-wrap: wrap; gap: 1rem; } .row figure { flex: 1 1 300px; margin: 0; }
"""


def write_report(runs: Sequence[Run], output: Path) -> Path:
    """Write pictures and `report.html` into a directory, and return the page's path."""
    if not any(run.shares or run.curves or run.audits for run in runs):
        raise ValueError(
            f"Expected a log of FairBatch or FairnessMonitor but {', '.join(run.name for run in runs)} has neither"
            " `fairbatch/...` nor `fairness/...` columns. Add one of the callbacks to the Trainer."
        )
    output.mkdir(parents=True, exist_ok=True)
    page = _Page(output)
    _add_summary(page, runs)
    _add_runs_over_time(page, runs)
    for number, run in enumerate(runs):
        page.heading(run.name)
        if run.shares is not None:
            page.figure(shares_figure(run.shares), f"run{number}_shares", "What FairBatch did: shares, losses, gaps")
        for stage, curves in run.curves.items():
            if len(curves.times) > 1:
                drawn = fairness_figure(curves.times, curves.values, curves.by_group, curves.xlabel)
                page.figure(drawn, f"run{number}_{_file_name(stage)}", f"Accuracy and fairness on {stage} data")
        for stage, audit in run.audits.items():
            drawn = confusion_figure(audit.confusion, audit.label_names, audit.group_names)
            caption = f"Confusion matrix of every group on {stage} data, the last one logged"
            page.figure(drawn, f"run{number}_{_file_name(stage)}_confusion", caption)
            page.table(CELL_HEADER, audit.cell_rows(), words=2)
    return page.write()


class _Page:
    """An HTML page that needs no other file; its pictures are also saved as PNG files next to it."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._parts = ["<h1>Fairness report</h1>"]

    def heading(self, text: str) -> None:
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def note(self, text: str) -> None:
        self._parts.append(f"<p><small>{escape(text)}</small></p>")

    def start_row(self) -> None:
        self._parts.append('<div class="row">')

    def end_row(self) -> None:
        self._parts.append("</div>")

    def figure(self, figure: Figure, name: str, caption: str) -> None:
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=110)
        (self._output / f"{name}.png").write_bytes(image.getvalue())
        source = "data:image/png;base64," + base64.b64encode(image.getvalue()).decode()
        text = escape(caption)
        self._parts.append(f'<figure><img src="{source}" alt="{text}"><figcaption>{text}</figcaption></figure>')

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> None:
        """Add a table whose first columns are words, the others numbers."""
        head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
        body = ""
        for row in rows:
            kinds = (' class="text"' if place < words else "" for place in range(len(row)))
            body += (
                "<tr>" + "".join(f"<td{kind}>{escape(c)}</td>" for c, kind in zip(row, kinds, strict=True)) + "</tr>"
            )
        self._parts.append(f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>')

    def write(self) -> Path:
        path = self._output / "report.html"
        head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        body = "\n".join(self._parts)
        path.write_text(
            f'<!doctype html><html lang="en"><head>{head}<title>Fairness report</title><style>{_STYLE}</style></head>'
            f"<body>{body}</body></html>\n",
            encoding="utf-8",
        )
        return path


def _add_summary(page: _Page, runs: Sequence[Run]) -> None:
    """Add how the runs came out, and where they are between accuracy and fairness."""
    numbers = [
        (run, stage, audit, audit.values(), audit.intervals()) for run in runs for stage, audit in run.finals().items()
    ]
    if not numbers:
        return
    for names in (("accuracy", *CRITERIA), (*ACCURACIES[1:], *(f"{name}_ratio" for name in CRITERIA))):
        rows = [
            [run.name, f"{stage}, {audit.num_samples}", *(_with_interval(values[n], intervals.get(n)) for n in names)]
            for run, stage, audit, values, intervals in numbers
        ]
        page.table(["run", "samples", *(name.replace("_", " ") for name in names)], rows, words=2)
    page.note("In brackets: 95% confidence intervals. Of disparities 0 is fair, of ratios 1.")
    if len(numbers) > 1:
        page.start_row()
        for criterion in CRITERIA:
            points = [
                TradeOffPoint(
                    run.name if len(run.finals()) == 1 else f"{run.name}, {stage}",
                    values["accuracy"],
                    values[criterion],
                    disparity_interval=intervals[criterion],
                    accuracy_interval=intervals["accuracy"],
                )
                for run, stage, _, values, intervals in numbers
            ]
            name = criterion.replace("_", " ")
            page.figure(tradeoff_figure(points, name), f"tradeoff_{criterion}", f"Accuracy and {name} of all runs")
        page.end_row()


def _add_runs_over_time(page: _Page, runs: Sequence[Run]) -> None:
    """Add the curves of several runs on the same data in one picture."""
    for stage in dict.fromkeys(stage for run in runs for stage in run.curves):
        drawn = [run for run in runs if stage in run.curves and len(run.curves[stage].times) > 1]
        units = {run.curves[stage].xlabel for run in drawn}
        if len(drawn) > 1 and len(units) == 1:
            curves = {run.name: (run.curves[stage].times, run.curves[stage].values) for run in drawn}
            figure = runs_figure(curves, ["accuracy", *CRITERIA], units.pop())
            page.figure(figure, f"runs_{_file_name(stage)}", f"Accuracy and disparities of all runs on {stage} data")


def _with_interval(value: float, interval: tuple[float, float] | None) -> str:
    if math.isnan(value):
        return "undefined"
    known = interval is not None and not math.isnan(interval[0])
    return f"{value:.3f}" + (f" ({interval[0]:.3f} to {interval[1]:.3f})" if interval is not None and known else "")


def _file_name(stage: str) -> str:
    return stage.replace("/", "_")
