"""Pictures."""

import torch
from predictions import samples

from fairbatch_lightning.fairness import GroupConfusion
from fairbatch_lightning.reports.curves import SharesOverTime
from fairbatch_lightning.reports.figures import confusion_figure, shares_figure


def test_lines_can_be_told_apart_without_colour():
    """28 groups: no two lines have the same colour and style, nor the same marker and style."""
    many = [f"group {number}" for number in range(28)]
    figure = shares_figure(
        SharesOverTime(["0", "1"], many, torch.rand(3, 2, 28), torch.rand(2, 2, 28), torch.rand(2, 2))
    )
    lines = figure.axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 28
    assert len({(line.get_marker(), line.get_linestyle()) for line in lines}) == 28


def test_pictures_of_many_labels_fit_on_a_page():
    labels = [str(number) for number in range(10)]
    drawn = SharesOverTime(labels, ["a", "b"], torch.rand(3, 10, 2), torch.rand(2, 10, 2), torch.rand(2, 10))
    figure = shares_figure(drawn)
    assert figure.get_size_inches()[0] <= 16
    hundred = SharesOverTime(range(100), ["a", "b"], torch.rand(3, 100, 2), torch.rand(2, 100, 2), torch.rand(2, 100))
    assert len(shares_figure(hundred).axes) == 12 + 12 + 12
    titles = [axes.get_title() for axes in figure.axes]
    assert all(f"shares of label {label}" in titles and f"losses of label {label}" in titles for label in labels)


def test_confusion_matrices_show_what_was_counted():
    preds, target, groups = samples()
    confusion = GroupConfusion(2, 4)
    confusion.update(preds, target, groups)
    axes = confusion_figure(confusion.compute(), group_names=["a", "b", "c", "d"]).axes
    assert [ax.get_title() for ax in axes] == [f"{n} ({int((groups == z).sum())})" for z, n in enumerate("abcd")]
    number = int(confusion.compute()[0, 1, 0])
    assert f"\n{number}" in axes[0].texts[2].get_text()


def test_confusion_matrices_of_many_labels_stay_small():
    width, height = confusion_figure(torch.ones(4, 40, 40, dtype=torch.long)).get_size_inches()
    assert width * height < 600
