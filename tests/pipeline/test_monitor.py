"""FairnessMonitor in real Trainers: what it measures, against an evaluation of the model by hand."""

import copy
import math
import pickle
import types
from contextlib import nullcontext

import lightning as L
import pytest
import pytorch_lightning
import torch
from evaluated import Evaluated, by_hand, held_out
from helpers import GROUPS, Toy, ToyModule, loader, trainer
from torch.utils.data import Subset

from fairbatch_lightning import FairBatch, FairBatchWarning, FairnessMonitor, SignedSteps
from fairbatch_lightning.fairness import disparities as d


class Returning(ToyModule):
    """Does not call `self(x)` but returns the logits."""

    def validation_step(self, batch, batch_idx):
        return {"logits": self.net(batch[0])}


class Named(ToyModule):
    """Calls a submodule only."""

    def validation_step(self, batch, batch_idx):
        self.net(batch[0])


class Embedding(ToyModule):
    """What `self(x)` returns is not the logits."""

    def validation_step(self, batch, batch_idx):
        self(batch[0])
        return {"logits": self.net(batch[0])}

    def forward(self, x):
        return -self.net(x)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])


class Binary(Evaluated):
    """One logit per sample."""

    def __init__(self, columns=False):
        super().__init__(num_labels=1)
        self.columns = columns

    def forward(self, x):
        return self.net(x) if self.columns else self.net(x).squeeze(1)

    def training_step(self, batch, batch_idx):
        logits = self(batch[0]).flatten()
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, batch[1].float())


class Wrapping(Evaluated):
    """An object with `logits`, like Hugging Face's."""

    def forward(self, x):
        return types.SimpleNamespace(logits=self.net(x))

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self(batch[0]).logits, batch[1])


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (Evaluated, {}),
        (Returning, {}),
        (Named, {"logits": "net"}),
        (Embedding, {}),
        (Binary, {}),
        (lambda: Binary(columns=True), {}),
        (Wrapping, {}),
        (lambda: Evaluated(num_labels=4), {}),
    ],
    ids=["forward", "returned", "named", "embedding", "(B,)", "(B, 1)", "object", "many labels"],
)
def test_counts_are_those_of_an_evaluation_by_hand(module, options):
    model = module()
    labels = 4 if model.net.out_features == 4 else 2
    monitor = FairnessMonitor(groups="group", **options)
    run = trainer(monitor, max_epochs=2, num_sanity_val_steps=2)
    validation = Toy(seed=1, num_labels=labels)
    run.fit(model, loader(Toy(num_labels=labels)), held_out(validation))
    expected = by_hand(model, validation, labels)
    assert torch.equal(monitor.audits["val"].confusion, expected)
    assert monitor.audits["val"].group_names == GROUPS
    assert len(monitor.history) == 2
    logged = run.callback_metrics
    assert float(logged["fairness/val/equalized_odds"]) == pytest.approx(float(d.equalized_odds_disparity(expected)))
    assert float(logged["fairness/val/demographic_parity"]) == pytest.approx(
        float(d.demographic_parity_disparity(expected))
    )
    opportunity = d.equal_opportunity_disparity(expected, 1 if labels == 2 else None)
    assert float(logged["fairness/val/equal_opportunity"]) == pytest.approx(float(opportunity))
    assert float(logged["fairness/val/accuracy"]) == pytest.approx(float(d.accuracy(expected)))
    assert float(logged["fairness/val/worst_group_accuracy"]) == pytest.approx(float(d.worst_group_accuracy(expected)))
    right = expected.diagonal(dim1=1, dim2=2) / expected.sum(2)
    assert float(logged["fairness/val/worst_cell_accuracy"]) == pytest.approx(float(right.min()))
    for group, accuracy in zip(GROUPS, d.group_accuracy(expected), strict=True):
        assert float(logged[f"fairness/val/group_accuracy/{group}"]) == pytest.approx(float(accuracy))
    ratio = d.demographic_parity_disparity(expected, 1 if labels == 2 else None, "ratio")
    assert float(logged["fairness/val/demographic_parity_ratio"]) == pytest.approx(float(ratio))


NAMES = {
    f"fairness/val/{name}"
    for name in (
        "accuracy",
        "worst_group_accuracy",
        "worst_cell_accuracy",
        "equal_opportunity",
        "equalized_odds",
        "demographic_parity",
        "equal_opportunity_ratio",
        "equalized_odds_ratio",
        "demographic_parity_ratio",
    )
}


def test_names_do_not_depend_on_the_data():
    for data in (Toy(seed=1), Toy(seed=2, num_samples=40), Subset(Toy(), [0, 1, 2])):
        monitor = FairnessMonitor(groups="group")
        run = trainer(monitor, max_epochs=1)
        with pytest.warns(FairBatchWarning) if len(data) == 3 else nullcontext():
            run.fit(Evaluated(), loader(), held_out(data))
        assert set(run.callback_metrics) >= NAMES
        rest = set(run.callback_metrics) - NAMES - {"train_loss"}
        assert all(name.startswith("fairness/val/group_accuracy/") for name in rest)


def test_test_and_validate_on_their_own():
    model, monitor = Evaluated(), FairnessMonitor(groups="group")
    run = trainer(monitor)
    (result,) = run.test(model, held_out(Toy(seed=3)), verbose=False)
    assert result["fairness/test/accuracy"] == pytest.approx(float(d.accuracy(by_hand(model, Toy(seed=3)))))
    (result,) = run.validate(model, held_out(), verbose=False)
    assert result["fairness/val/accuracy"] == pytest.approx(float(d.accuracy(by_hand(model, Toy(seed=1)))))
    assert list(monitor.audits) == ["test", "val"]
    assert [record.stage for record in monitor.history] == ["test", "val"]


@pytest.mark.parametrize("stages", ["test", ["test"], ("test",)])
def test_only_the_stages_asked_for(stages):
    monitor = FairnessMonitor(groups="group", stages=stages)
    run = trainer(monitor, max_epochs=1)
    run.fit(Evaluated(), loader(), held_out(shuffle=True))  # not looked at
    assert not monitor.history
    run.test(Evaluated(), held_out(), verbose=False)
    assert [record.stage for record in monitor.history] == ["test"]


def test_several_loaders():
    model, monitor = Evaluated(), FairnessMonitor(groups="group")
    run = trainer(monitor, max_epochs=1)
    run.fit(model, loader(), [held_out(), held_out(Toy(seed=2), batch_size=7)])
    for number, seed in enumerate((1, 2)):
        expected = by_hand(model, Toy(seed=seed))
        assert torch.equal(monitor.audits[f"val_{number}"].confusion, expected)
        logged = run.callback_metrics[f"fairness/val_{number}/equalized_odds"]
        assert float(logged) == pytest.approx(float(d.equalized_odds_disparity(expected)))


def test_part_of_the_data_and_several_validations_per_epoch():
    monitor = FairnessMonitor(groups="group")
    run = trainer(monitor, max_epochs=2, val_check_interval=4, limit_val_batches=3)
    run.fit(Evaluated(), loader(), held_out(batch_size=20))
    assert [record.step for record in monitor.history] == [4, 8, 12, 16, 20, 24]
    assert monitor.audits["val"].num_samples == 60
    figure = monitor.plot()
    assert figure.axes[0].get_xlabel() == "step"


def test_next_to_fairbatch_with_the_validation_estimate():
    model, monitor = Evaluated(), FairnessMonitor(groups="group")
    fairbatch = FairBatch(groups="group", estimate="validation", rule=SignedSteps(alpha=0.05))
    trainer(monitor, fairbatch, max_epochs=2).fit(model, loader(), held_out())
    assert len(fairbatch.history) == 2
    assert torch.equal(monitor.audits["val"].confusion, by_hand(model, Toy(seed=1)))


def test_in_a_trainer_of_the_other_namespace():
    class Module(pytorch_lightning.LightningModule):
        __init__, forward, training_step = ToyModule.__init__, ToyModule.forward, ToyModule.training_step
        configure_optimizers = ToyModule.configure_optimizers
        validation_step = Evaluated.validation_step

    def init(self):
        pytorch_lightning.LightningModule.__init__(self)
        self.net, self.lr, self.batches = torch.nn.Linear(4, 2), 0.1, []

    Module.__init__ = init
    model, monitor = Module(), FairnessMonitor(groups="group")
    run = pytorch_lightning.Trainer(
        max_epochs=1, callbacks=[monitor], logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    run.fit(model, loader(), held_out())
    assert torch.equal(monitor.audits["val"].confusion, by_hand(model, Toy(seed=1)))


def test_leaves_no_trace():
    model, monitor = Evaluated(), FairnessMonitor(groups="group")
    run = trainer(monitor, max_epochs=1)
    run.fit(model, loader(), held_out())
    assert not model._forward_hooks
    assert pickle.loads(pickle.dumps(monitor)).history == monitor.history
    copy.deepcopy(monitor)

    class Broken(Evaluated):
        def validation_step(self, batch, batch_idx):
            raise RuntimeError("broken")

    model = Broken()
    with pytest.raises(RuntimeError, match="broken"):
        trainer(monitor, max_epochs=1, num_sanity_val_steps=0).fit(model, loader(), held_out())
    assert not model._forward_hooks


def test_training_is_the_same_with_and_without():
    weights = []
    for callbacks in ([], [FairnessMonitor(groups="group")]):
        model = Evaluated()
        L.seed_everything(0)
        trainer(*callbacks, max_epochs=2).fit(model, loader(), held_out())
        weights.append((model.net.weight.detach().clone(), model.batches))
    assert torch.equal(weights[0][0], weights[1][0])
    assert weights[0][1] == weights[1][1]


class Sigmoid(Binary):
    """Gives probabilities instead of logits."""

    def forward(self, x):
        return torch.sigmoid(self.net(x)).squeeze(1)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.binary_cross_entropy(self(batch[0]), batch[1].float())


def test_probabilities_are_noticed():
    model, monitor = Sigmoid(), FairnessMonitor(groups="group")
    with pytest.warns(FairBatchWarning, match=r"probabilities rather than logits, use FairnessMonitor.threshold=0.5"):
        trainer(monitor, max_epochs=2).fit(model, loader(), held_out())
    monitor = FairnessMonitor(groups="group", threshold=0.5)
    model = Sigmoid()
    trainer(monitor, max_epochs=2).fit(model, loader(), held_out())
    assert torch.equal(monitor.audits["val"].confusion, by_hand(model, Toy(seed=1)))


def test_a_diverged_model_is_not_fair():
    class Diverged(Evaluated):
        def forward(self, x):
            return self.net(x) * (torch.nan if not self.training else 1)

    monitor = FairnessMonitor(groups="group")
    run = trainer(monitor, max_epochs=1)
    with pytest.warns(FairBatchWarning, match="the logits of 240 val samples are NaN: the model has diverged"):
        run.fit(Diverged(), loader(), held_out())
    assert all(math.isnan(run.callback_metrics[name]) for name in NAMES)
