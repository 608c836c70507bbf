"""The paper's methods on logistic regression: callbacks of a Trainer, and two that need many models in turn."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
from data import Problem
from scores import confusion, scores
from synthetic import LogisticRegression, quiet_trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fairbatch_lightning import FairBatch, GroupIndex, Importance, SignedSteps, WorstCase
from fairbatch_lightning.callbacks.baselines import (
    AdversarialDebiasing,
    Boosting,
    Cutting,
    FairnessConstraints,
    GroupDRO,
    Reweighing,
)

GROUPS = 2  # the position of z in a sample
MODELS = {"LBC": 20, "AdaFair": 60}
"""How many models those methods find at most that need more than one; they are solved, see `solved`, not trained."""


class Regression(LogisticRegression):
    """Logistic regression with a learning rate of one's choice."""

    def __init__(self, num_features: int, lr: float) -> None:
        super().__init__(num_features)
        self.lr = lr

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Batches(TensorDataset):
    """A TensorDataset that reads a whole batch at once, which for a table takes a tenth of the time."""

    def __getitems__(self, samples: list[int]) -> list[Tensor]:
        rows = torch.tensor(samples)
        return [tensor[rows] for tensor in self.tensors]


@dataclass
class Trained:
    """What a method has found."""

    logits: Callable[[Tensor], Tensor]
    epochs: int
    """That it takes to train all models that were found."""
    weights: list[Any]
    """Shares of the groups over the updates, or weights of the cells over the models."""
    models: int = 1
    """How many models it took: found in turn, or, of an ensemble, those that decide."""


def fit(problem: Problem, callbacks: list[L.Callback], seed: int) -> Regression:
    """Train one model."""
    L.seed_everything(seed, verbose=False)
    model = Regression(problem.num_features, problem.lr)
    data = Batches(*problem.train.tensors)
    loader = DataLoader(data, problem.batch_size, shuffle=True, collate_fn=list)  # of what is a batch already
    quiet_trainer(problem.epochs, [*callbacks, *problem.callbacks]).fit(model, loader)
    return model.eval().requires_grad_(False)


def solved(x: Tensor, y: Tensor, weights: Tensor) -> Callable[[Tensor], Tensor]:
    """Return logistic regression with weights of the samples, solved by Newton's method instead of trained.

    That is what training comes to in the end, in a small part of the time.
    """
    x, ridge = _with_bias(x), 1e-3
    solution = torch.zeros(x.shape[1], dtype=x.dtype)
    for _ in range(15):
        chances = torch.sigmoid(x @ solution)
        slope = x.T @ (weights * (chances - y)) + ridge * solution
        bend = (x * (weights * chances * (1 - chances)).unsqueeze(1)).T @ x + ridge * torch.eye(len(solution))
        step = torch.linalg.solve(bend, slope)
        solution = solution - step
        if (x @ step).abs().mean() < 1e-3:
            break
    return lambda samples: _with_bias(samples) @ solution


def _with_bias(x: Tensor) -> Tensor:
    return torch.column_stack([x, torch.ones(len(x))]).double()


def with_callback(new: Callable[..., L.Callback]) -> Callable[..., Trained]:
    """Return a method that is one line."""

    def train(problem: Problem, criterion: str, seed: int, **settings: Any) -> Trained:
        callback = new(criterion, groups=GROUPS, seed=seed, **settings)
        model = fit(problem, [callback], seed)
        shares = [record.shares_after.tolist() for record in getattr(callback, "history", [])]
        return Trained(model, problem.epochs, shares)

    return train


def evened(kind: type[Cutting] | type[Boosting]) -> Callable[..., Trained]:
    """Return a method that makes groups equally large, and trains for as many steps as plain training.

    For the criteria about labels it makes all cells equally large: that is what the paper's accuracies tell.
    """

    def train(problem: Problem, criterion: str, seed: int) -> Trained:
        callback = kind(criterion, groups=GROUPS, seed=seed, across_labels=criterion != "demographic_parity")
        kept = len(callback.samples(GroupIndex.from_dataset(problem.train, groups=GROUPS)))
        epochs = max(1, round(problem.epochs * len(problem.train) / kept))
        model = fit(replace(problem, epochs=epochs), [callback], seed)
        return Trained(model, epochs, [])

    return train


def plain(problem: Problem, criterion: str, seed: int) -> Trained:
    """Train as everybody does."""
    model = fit(problem, [], seed)
    return Trained(model, problem.epochs, [])


def rates(logits: Tensor, problem: Problem) -> Tensor:
    """Return the rates of positive predictions on the training set, `(3, 3)`.

    Rows: among samples of label 0, of label 1, and among all; columns: of group 0, of group 1, and of both.
    """
    counts = confusion(logits, problem.train).double()  # (Z, Y, Yhat)
    counts = torch.cat([counts, counts.sum(0, keepdim=True)])
    counts = torch.cat([counts, counts.sum(1, keepdim=True)], 1)
    return (counts[:, :, 1] / counts.sum(2)).T


def bias_weights(multipliers: Tensor, criterion: str) -> Tensor:
    """Return the weights of the cells `(Y, Z)` for multipliers of the same shape (Jiang and Nachum, 2020).

    For equalized odds every label has multipliers of its own; else the positive label's tell both labels' weights.

    >>> bias_weights(torch.zeros(2, 2), "equalized_odds").tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """
    if criterion != "equalized_odds":
        multipliers = torch.stack([-multipliers[1], multipliers[1]])
    return 2 * torch.sigmoid(multipliers)


def violations(found: Tensor, criterion: str) -> Tensor:
    """Return by how much each group is better off than all together, `(Y, Z)`, for rates as of `rates`."""
    better = found[:, :2] - found[:, 2:]
    if criterion == "demographic_parity":
        return torch.stack([torch.zeros_like(better[2]), better[2]])
    return torch.stack([-better[0] if criterion == "equalized_odds" else torch.zeros_like(better[0]), better[1]])


def label_bias_correction(
    problem: Problem, criterion: str, seed: int, *, rounds: int = MODELS["LBC"], step: float = 2.0
) -> Trained:
    """LBC: find a whole model, change the weights of the cells by how unfair it is, and again."""
    multipliers, history = torch.zeros(2, 2), []
    x, y, z = problem.train.tensors
    for _ in range(rounds):
        weights = bias_weights(multipliers, criterion)
        history.append(weights.tolist())
        model = solved(x, y, weights[y, z])
        multipliers = multipliers - step * violations(rates(model(x), problem), criterion).float()
    return Trained(model, rounds * problem.epochs, history, rounds)


def fairness_costs(found: Tensor, y: Tensor, z: Tensor, criterion: str, tolerance: float) -> Tensor:
    """Return how much more a sample counts because its cell is worse off, `(N,)` (Iosifidis and Ntoutsi, 2019).

    With "equalized_odds" that is the difference of the groups' true positive rates for positives of the group with the
    lower one, and of the true negative rates likewise; with "equal_opportunity" only the former; with
    "demographic_parity" the difference of the rates of positive predictions for positives (the FairBatch paper, B.3).
    """
    costs, found = torch.zeros(2, 2), found[:, :2]
    rows = {"equalized_odds": [(0, 1 - found[0]), (1, found[1])], "equal_opportunity": [(1, found[1])]}
    for label, rate in rows.get(criterion, [(1, found[2])]):
        gap = float(rate.max() - rate.min())
        if gap > tolerance:
            costs[label, int(rate.argmin())] = gap
    return costs[y, z]


def adafair(
    problem: Problem, criterion: str, seed: int, *, rounds: int = MODELS["AdaFair"], tolerance: float = 0.0
) -> Trained:
    """AdaFair: boosting, in which samples of a group that the ensemble so far treats worse count more as well.

    In the end as many of the models have a vote as make error plus disparity on the training set least.
    """
    history, sums = [], []
    x, y, z = problem.train.tensors
    weights = torch.full((len(y),), 1 / len(y), dtype=torch.float64)
    models: list[tuple[float, Callable[[Tensor], Tensor]]] = []
    votes = torch.zeros(len(y), dtype=torch.float64)
    for _ in range(rounds):
        history.append(torch.zeros(4).double().index_add(0, 2 * y + z, weights).view(2, 2).tolist())
        model = solved(x, y, weights * len(y))
        logits = model(x)
        wrong = (logits > 0).long() != y
        error = float(weights[wrong].sum().clamp(1e-6, 1 - 1e-6))
        vote = 0.5 * math.log((1 - error) / error)
        if vote <= 0 and models:
            break  # no better than a guess by these weights: the ensemble would only get worse
        models.append((vote, model))
        votes = votes + vote * torch.sign(logits)
        accuracy, disparity = scores(confusion(votes, problem.train), criterion)
        sums.append(1 - accuracy + disparity)
        confidence = (2 * torch.sigmoid(logits) - 1).abs()
        costs = fairness_costs(rates(votes, problem), y, z, criterion, tolerance)
        weights = weights * torch.exp(vote * confidence * wrong) * torch.where(wrong, 1 + costs, 1)
        weights = weights / weights.sum()
    best = models[: sums.index(min(sums)) + 1]
    return Trained(
        lambda samples: sum(vote * torch.sign(model(samples)) for vote, model in best),
        len(history) * problem.epochs,
        history,
        len(best),
    )


def independent(criterion: str, **settings: Any) -> Reweighing:
    """Return reweighing, which is the same for all criteria."""
    return Reweighing(**settings)


def robust(criterion: str, **settings: Any) -> GroupDRO:
    """Return GroupDRO, which is the same for all criteria."""
    return GroupDRO(**settings)


def classwise(criterion: str, groups: int, seed: int, **rule: Any) -> FairBatch:
    """Return FairDRO, which is for equalized odds."""
    return FairBatch("equalized_odds", groups, rule=WorstCase(**rule), seed=seed, verbose=False)


def fairbatch(
    criterion: str, groups: int, seed: int, *, importance: Importance | None = None, **rule: Any
) -> FairBatch:
    """Return FairBatch with settings of its rule."""
    return FairBatch(criterion, groups, rule=SignedSteps(**rule), importance=importance, seed=seed, verbose=False)


def by_error(criterion: str, groups: int, seed: int, **rule: Any) -> FairBatch:
    """Return FairBatch that compares the groups' rates of errors, which the criteria are about, not their losses."""
    return FairBatch(criterion, groups, rule=SignedSteps(**rule), loss="error", seed=seed, verbose=False)


def bare_line(criterion: str, groups: int, seed: int) -> FairBatch:
    """Return FairBatch as it is out of the box."""
    return FairBatch(criterion, groups, seed=seed, verbose=False)


METHODS: dict[str, Callable[..., Trained]] = {
    "LR": plain,
    "Cutting": evened(Cutting),
    "Boosting": evened(Boosting),
    "RW": with_callback(independent),
    "LBC": label_bias_correction,
    "FC": with_callback(FairnessConstraints),
    "AD": with_callback(AdversarialDebiasing),
    "AdaFair": adafair,
    "GroupDRO": with_callback(robust),
    "FairDRO": with_callback(classwise),
    "FairBatch": with_callback(fairbatch),
    "FairBatch, errors": with_callback(by_error),
    "FairBatch, adaptive": with_callback(bare_line),
}
CANDIDATES: dict[str, list[dict[str, Any]]] = {
    "LBC": [{"step": step} for step in (0.5, 2.0)],
    "FC": [{"weight": weight} for weight in (0.3, 1.0, 3.0, 10.0)],
    "AD": [{"weight": weight} for weight in (0.5, 2.0, 8.0)],
    "FairDRO": [{"radius": radius} for radius in (0.1, 0.5)],
    "FairBatch": [{"alpha": alpha} for alpha in (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)],
    "FairBatch, errors": [{"pull": pull} for pull in (0.0, 3.0)],
}
"""The settings to choose from by cross-validation; other methods have none, or are used as they are by default."""
