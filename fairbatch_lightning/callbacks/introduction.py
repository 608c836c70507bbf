"""What FairBatch says about itself when training begins, so that wrong cells are seen at a glance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fairbatch_lightning.cells.index import GroupIndex
from fairbatch_lightning.rules.criteria import Criterion

MOST = 8
"""How many labels and groups are listed."""


def introduction(
    criterion: Criterion,
    index: GroupIndex,
    classes: Mapping[int | str, int] | None,
    *,
    checked: str,
    logits: str,
    updates: str,
) -> str:
    """Return five lines: what is made equal and when, the labels, groups and cells, and where the logits come from.

    Args:
        criterion: What must become equal.
        index: The cells of the training data.
        classes: Which of the model's classes labels are; None if that is not known.
        checked: What the labels were compared with; empty if there was nothing.
        logits: Where the logits come from.
        updates: When the shares are updated.

    >>> from fairbatch_lightning import EqualizedOdds
    >>> index = GroupIndex.from_values(["no", "yes", "yes", "no"], ["a", "a", "b", "a"])
    >>> known = {"no": 0, "yes": 1}
    >>> print(introduction(EqualizedOdds(), index, known, checked="those in batches", logits="`net`", updates="-"))
    FairBatch, EqualizedOdds(min_samples=1). Shares are updated -.
      labels  no = class 0, yes = class 1; the same as those in batches
      groups  a, b
      cells   of 1 to 2 samples, fewest in (label yes, group a); empty: (label no, group b)
      logits  `net`
    """
    labels = [
        name if classes is None or str(classes[value]) == name else f"{name} = class {classes[value]}"
        for value, name in zip(index.label_values, index.label_names, strict=True)
    ]
    compared = f"the same as {checked}" if checked else "not checked: found nothing in the batches to compare them with"
    return "\n".join(
        (
            f"FairBatch, {criterion}. Shares are updated {updates}.",
            f"  labels  {_listed(labels)}; {compared}",
            f"  groups  {_listed(index.group_names)}",
            f"  cells   {_cells(index)}",
            f"  logits  {logits}",
        )
    )


def _listed(names: Sequence[str]) -> str:
    separator = "; " if any(", " in name for name in names) else ", "
    more = [f"... ({len(names)} in all)"] if len(names) > MOST else []
    return separator.join([*names[:MOST], *more])


def _cells(index: GroupIndex) -> str:
    """Return how large the cells are, and which are the smallest."""
    present = index.counts > 0
    smallest, largest = int(index.counts[present].min()), int(index.counts.max())
    words = f"of {smallest} to {largest} samples" if smallest < largest else f"of {smallest} samples each"
    if smallest < largest:
        label, group = (index.counts == smallest).nonzero()[0].tolist()
        words += f", fewest in {index.cell_name(label, group)}"
    empty = [index.cell_name(*cell) for cell in (~present).nonzero().tolist()]
    return words + (f"; empty: {_listed(empty)}" if empty else "")
