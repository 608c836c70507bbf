"""The Pareto front."""

import math

import numpy as np

from fairbatch_lightning.reports.pareto import TradeOffPoint, pareto_front, tradeoff_figure


def test_pareto_front_against_brute_force():
    rng = np.random.default_rng(0)
    for _ in range(50):
        numbers = rng.integers(5, size=(8, 2)) / 5
        points = [TradeOffPoint(str(i), accuracy, disparity) for i, (accuracy, disparity) in enumerate(numbers)]
        best = {
            (p.accuracy, p.disparity)
            for p in points
            if not any(
                (q.accuracy >= p.accuracy and q.disparity < p.disparity)
                or (q.accuracy > p.accuracy and q.disparity <= p.disparity)
                for q in points
            )
        }
        assert {(p.accuracy, p.disparity) for p in pareto_front(points)} == best


def test_undefined_points_are_left_out_of_the_curve():
    figure = tradeoff_figure([TradeOffPoint("a", 0.9, 0.1), TradeOffPoint("b", 0.8, math.nan)], "equalized odds")
    assert [text.get_text() for text in figure.axes[0].texts] == ["a"]
    assert [p.name for p in pareto_front([TradeOffPoint("b", 0.8, math.nan), TradeOffPoint("a", 0.9, 0.1)])] == ["a"]
