"""What happened in training runs, as pictures and one HTML page, from their CSV logs."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from fairbatch_lightning.fairness.audit import ACCURACIES, CRITERIA
from fairbatch_lightning.reports.figures import WORDS, confusion_figure, fairness_figure, runs_figure, shares_figure
from fairbatch_lightning.reports.log_format import Run
from fairbatch_lightning.reports.pareto import TradeOffPoint, tradeoff_figure
from fairbatch_lightning.reports.tables import Table, cell_table, number_texts

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
        _add_run(page, run, f"run{number}")
    return page.write()


def _add_run(page: _Page, run: Run, name: str) -> None:
    """Add all that is known of one run; the files of its pictures begin with `name`."""
    page.heading(run.name)
    if run.shares is not None:
        what = f"What FairBatch did: shares, {WORDS[run.shares.unit][0]}, gaps"
        page.figure(shares_figure(run.shares), f"{name}_shares", what)
    for stage, curves in run.curves.items():
        if len(curves.times) > 1:
            caption = f"Accuracy and fairness on {stage} data"
            page.figure(fairness_figure(curves), f"{name}_{_file_name(stage)}", caption)
    for stage, audit in run.audits.items():
        drawn = confusion_figure(audit.confusion, audit.label_names, audit.group_names)
        caption = f"Confusion matrix of every group on {stage} data, the last one logged"
        page.figure(drawn, f"{name}_{_file_name(stage)}_confusion", caption)
        page.table(cell_table(audit))


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

    def table(self, table: Table) -> None:
        def line(row: Sequence[str]) -> str:
            kinds = (' class="text"' if place < table.words else "" for place in range(len(row)))
            return "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True))

        caption = f"<caption>{escape(table.title)}</caption>" if table.title else ""
        head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
        body = "".join(f"<tr>{line(row)}</tr>" for row in table.rows)
        self._parts.append(f'<div class="wide"><table>{caption}<tr>{head}</tr>{body}</table></div>')

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
    ends = [_End(run, stage) for run in runs for stage in run.finals()]
    if not ends:
        return
    worst = [name for name in ACCURACIES if name != "accuracy"]
    for names in (["accuracy", *CRITERIA], [*worst, *(f"{name}_ratio" for name in CRITERIA)]):
        rows = [[end.run.name, f"{end.stage}, {end.num_samples}", *map(end.text, names)] for end in ends]
        page.table(Table("", ["run", "samples", *(name.replace("_", " ") for name in names)], rows, words=2))
    page.note("In brackets: 95% confidence intervals. Of disparities 0 is fair, of ratios 1.")
    if len(ends) > 1:
        page.start_row()
        for criterion in CRITERIA:
            name = criterion.replace("_", " ")
            drawn = tradeoff_figure([end.point(criterion) for end in ends], name)
            page.figure(drawn, f"tradeoff_{criterion}", f"Accuracy and {name} of all runs")
        page.end_row()


class _End:
    """How a run came out on one set of data."""

    def __init__(self, run: Run, stage: str) -> None:
        audit = run.finals()[stage]
        self.run, self.stage, self.num_samples = run, stage, audit.num_samples
        self._values, self._intervals = audit.values(), audit.intervals()

    def text(self, name: str) -> str:
        value, interval = number_texts(self._values[name], self._intervals.get(name))
        return f"{value} ({interval})" if interval else value

    def point(self, criterion: str) -> TradeOffPoint:
        return TradeOffPoint(
            self.run.name if len(self.run.finals()) == 1 else f"{self.run.name}, {self.stage}",
            self._values["accuracy"],
            self._values[criterion],
            disparity_interval=self._intervals[criterion],
            accuracy_interval=self._intervals["accuracy"],
        )


def _add_runs_over_time(page: _Page, runs: Sequence[Run]) -> None:
    """Add the curves of several runs on the same data in one picture."""
    for stage in dict.fromkeys(stage for run in runs for stage in run.curves):
        curves = {run.name: run.curves[stage] for run in runs if stage in run.curves}
        curves = {name: line for name, line in curves.items() if len(line.times) > 1}
        if len(curves) > 1 and len({line.xlabel for line in curves.values()}) == 1:
            figure = runs_figure(curves, ["accuracy", *CRITERIA])
            page.figure(figure, f"runs_{_file_name(stage)}", f"Accuracy and disparities of all runs on {stage} data")


def _file_name(stage: str) -> str:
    return stage.replace("/", "_")
