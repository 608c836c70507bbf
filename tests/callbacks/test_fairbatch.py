"""The one line in a real Trainer."""

import pickle

import pytest
import pytorch_lightning
import torch
from by_hand import ToyData, fit, reference_run
from helpers import GROUPS, Toy, ToyModule, loader, trainer
from torch.nn import functional
from torch.utils.data import DataLoader

from fairbatch_lightning import DemographicParity, EqualizedOdds, EqualOpportunity, FairBatch, FairSampler, SignedSteps


@pytest.mark.parametrize("num_labels", [2, 3])
def test_equals_the_parts_put_together_by_hand(num_labels):
    """Batches, losses, shares and weights of a Trainer with the callback are those of a plain loop."""
    callback = FairBatch("equalized_odds", groups="group", estimate="exact", rule=SignedSteps(alpha=0.05))
    module = fit(callback, ToyModule(num_labels), loader(Toy(num_labels=num_labels)), max_epochs=6)
    expected, batches, losses, shares = reference_run(6, num_labels=num_labels)
    assert module.batches == batches
    for record, loss in zip(callback.history, losses, strict=True):
        torch.testing.assert_close(record.losses, loss, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(callback.shares, shares)
    assert (callback.shares - callback.history[0].shares_before).abs().max() > 0.04
    torch.testing.assert_close(module.net.weight, expected.net.weight)


def test_history_tells_the_story():
    callback = FairBatch(groups="group", rule=SignedSteps(alpha=0.05))
    assert callback.shares is None
    assert callback.counts is None
    assert callback.history == []
    fit(callback, max_epochs=4)
    assert [record.epoch for record in callback.history] == [0, 1, 2, 3]
    assert [record.step for record in callback.history] == [12, 24, 36, 48]
    assert callback.counts.sum() == 240
    for before, after in zip(callback.history, callback.history[1:], strict=False):
        assert torch.equal(before.shares_after, after.shares_before)
    assert torch.equal(callback.history[-1].shares_after, callback.shares)
    for record in callback.history:
        assert record.gap_max == record.gaps.max()
        spread = record.losses.max(1).values - record.losses.min(1).values
        torch.testing.assert_close(record.gaps, spread)


def test_a_second_fit_starts_afresh():
    callback = FairBatch(groups="group", rule=SignedSteps(alpha=0.05))
    first = fit(callback)
    second = fit(callback)
    assert first.batches == second.batches
    assert len(callback.history) == 3


def test_a_used_callback_can_be_pickled():
    """As the processes of `ddp_spawn` need it; what happened in the fit comes along."""
    callback = FairBatch(groups="group", rule=SignedSteps(alpha=0.05))
    fit(callback, data=loader(num_workers=1, persistent_workers=True))
    callback.log = callback.log_dict = None  # Lightning's, bound to the module
    copy = pickle.loads(pickle.dumps(callback))
    assert torch.equal(copy.shares, callback.shares)
    assert torch.equal(copy.counts, callback.counts)
    assert len(copy.history) == 3
    assert copy.state_dict() == {}
    copy.teardown(trainer(), None, "validate")
    fit(copy)
    assert torch.equal(copy.shares, callback.shares)


def test_updates_within_an_epoch():
    callback = FairBatch(groups="group", rule=SignedSteps(alpha=0.05), update_every=5)
    module = fit(callback, max_epochs=2)
    assert [record.step for record in callback.history] == [5, 10, 15, 20]
    index = callback.index
    expected = FairSampler(Toy().targets, Toy().group, 20, drop_last=False)
    batches = []
    for epoch in range(2):
        expected.set_epoch(epoch)
        for batch in expected.batches():
            batches.append(batch)
            if len(batches) % 5 == 0:
                expected.shares = callback.history[len(batches) // 5 - 1].shares_after
    assert module.batches == batches
    assert index.group_names == GROUPS


def test_intersectional_groups_have_readable_names():
    dataset = Toy()
    dataset.age = ["old" if i % 2 else "young" for i in range(240)]
    callback = FairBatch(groups=["group", "age"], rule=SignedSteps(alpha=0.05))
    fit(callback, data=loader(dataset), max_epochs=1)
    assert callback.shares.shape == (2, 6)
    assert callback.index.group_names[0] == "group=a, age=old"


def test_criterion_object_and_string_are_the_same():
    by_string, by_object = FairBatch("equalized_odds", groups="group"), FairBatch(EqualizedOdds(), groups="group")
    assert fit(by_string).batches == fit(by_object).batches


def test_alpha_can_be_a_schedule():
    callback = FairBatch(groups="group", rule=SignedSteps(alpha=lambda update: 0.1 / 2**update))
    fit(callback)
    moved = [(r.shares_after - r.shares_before).clamp(min=0).sum().item() for r in callback.history]
    assert moved == pytest.approx([0.1, 0.05, 0.025])


def test_error_as_loss_counts_wrong_predictions():
    callback = FairBatch(groups="group", estimate="exact", loss="error")
    module = fit(callback, max_epochs=1)
    dataset = Toy()
    with torch.no_grad():
        wrong = module(dataset.x).argmax(1) != dataset.targets
    for y in range(2):
        for z in range(3):
            cell = (dataset.targets == y) & (dataset.group_ids == z)
            assert float(callback.history[0].losses[y, z]) == pytest.approx(float(wrong[cell].double().mean()))


def test_demographic_parity_measures_against_the_positive_label():
    callback = FairBatch(DemographicParity(positive_label=0), groups="group", rule="paper")
    module = fit(callback, max_epochs=1)
    dataset = Toy()
    with torch.no_grad():
        losses = functional.cross_entropy(module(dataset.x), torch.zeros(240, dtype=torch.long), reduction="none")
    for y in range(2):
        for z in range(3):
            cell = (dataset.targets == y) & (dataset.group_ids == z)
            assert float(callback.history[0].losses[y, z]) == pytest.approx(float(losses[cell].mean()), rel=1e-5)


class OtherNamespace(pytorch_lightning.LightningModule):
    """ToyModule for `pytorch_lightning`, which has its own copy of every class."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.lr, self.batches = torch.nn.Linear(4, 2), 0.1, []

    forward = ToyModule.forward
    training_step = ToyModule.training_step
    configure_optimizers = ToyModule.configure_optimizers


def test_works_in_both_of_lightnings_namespaces():
    module, callback = OtherNamespace(), FairBatch(groups="group", rule=SignedSteps(alpha=0.05))
    run = pytorch_lightning.Trainer(
        max_epochs=3, callbacks=[callback], logger=False, enable_checkpointing=False, accelerator="cpu"
    )
    run.fit(module, loader())
    assert module.batches == fit(FairBatch(groups="group", rule=SignedSteps(alpha=0.05))).batches
    assert len(callback.history) == 3


class Watching(ToyModule):
    """Keeps what each batch of a validation or test held, and how many hooks there were on the module."""

    def __init__(self):
        super().__init__()
        self.held_out, self.hooks = [], []

    def validation_step(self, batch, batch_idx):
        x, y, index = batch
        self.held_out.append(index.tolist())
        self.hooks.append(len(self._forward_hooks))
        self.log("loss", functional.cross_entropy(self(x), y))

    test_step = validation_step

    def seen(self):
        """Return both, and start anew."""
        seen, self.held_out, self.hooks = (self.held_out, self.hooks), [], []
        return seen


def test_validate_and_test_are_untouched():
    """Outside of a fit they see their own batches in their own order, no hook watches, and nothing is updated."""
    module, callback = Watching(), FairBatch(groups="group", rule=SignedSteps(alpha=0.05))
    run, in_order = trainer(callback), [list(range(first, first + 20)) for first in range(0, 240, 20)]
    run.validate(module, ToyData(), verbose=False)
    assert module.seen() == (in_order, [0] * 12)
    assert (callback.index, callback.shares, callback.history, callback.state_dict()) == (None, None, [], {})
    run.fit(module, ToyData())
    history, shares = callback.history, callback.shares
    assert len(history) == 3
    assert module.seen()[0] == in_order[:2] + 3 * in_order  # after the sanity check, once in every epoch
    data = DataLoader(Toy(130, seed=5), batch_size=130)
    for evaluate in (run.test, run.validate):
        (values,) = evaluate(module, data, verbose=False)
        assert module.seen() == ([list(range(130))], [0])
        loss = functional.cross_entropy(module(data.dataset.x), data.dataset.targets)
        assert values == {"loss": pytest.approx(float(loss), rel=1e-5)}
    assert callback.history == history
    assert torch.equal(callback.shares, shares)


class WithTinyCell(Toy):
    """The cell (1, "c") has three samples, which no model gets right."""

    def __init__(self):
        super().__init__()
        tiny = ((self.targets == 1) & (self.group_ids == 2)).nonzero().flatten()
        self.targets[tiny[3:]] = 0
        self.x[tiny[:3]] = -self.x[self.targets == 1].mean(0) * 20


@pytest.mark.parametrize("min_samples", [1, 10])
def test_cells_of_few_samples_can_be_left_alone(min_samples):
    criterion, rule = EqualizedOdds(min_samples=min_samples), SignedSteps(alpha=0.02)
    data, callback = WithTinyCell(), FairBatch(criterion, groups="group", rule=rule)
    trainer(callback, max_epochs=5).fit(ToyModule(), loader(data))
    assert int(callback.counts[1, 2]) == 3
    before, after = callback.history[0].shares_before[1], callback.shares[1]
    if min_samples == 1:
        assert after[2] > before[2] + 0.05
    else:
        assert after[2] == before[2]
        gap = callback.history[-1].losses[1, :2]
        assert float(callback.history[-1].gaps[1]) == pytest.approx(float(gap.max() - gap.min()))


class TestIntroduction:
    """After the first batch FairBatch says what it has found: once, unless it is not wanted."""

    def said(self, capsys, callback, data=None, module=None, **options):
        trainer(callback, max_epochs=2, **options).fit(module or ToyModule(), data or loader())
        return capsys.readouterr().out

    def test_is_said_once(self, capsys):
        said = self.said(capsys, FairBatch(groups="group"))
        assert said.splitlines() == [
            "FairBatch, EqualizedOdds(min_samples=1). Shares are updated every batch, 24 times in all.",
            "  labels  0, 1; the same as those that `cross_entropy` gets",
            "  groups  a, b, c",
            "  cells   of 20 to 56 samples, fewest in (label 1, group a)",
            "  logits  `self(x)`",
        ]

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"update_every": 5}, "Shares are updated every 5 batches."),
            ({"update_every": "epoch"}, "Shares are updated after every epoch."),
            ({"estimate": "exact"}, "Shares are updated after every epoch."),
            ({"logits": "net"}, "logits  `net`"),
        ],
    )
    def test_names_when_and_where(self, capsys, settings, words):
        assert words in self.said(capsys, FairBatch(groups="group", **settings))

    def test_says_if_labels_could_not_be_checked(self, capsys):
        class ByHand(ToyModule):
            def training_step(self, batch, batch_idx):
                x, hidden = batch
                return (self(x)[:, 0] * hidden.sum(1)).mean()

        class Hidden(Toy):
            def __getitem__(self, index):
                return self.x[index], torch.full((3,), float(self.targets[index]))

        said = self.said(capsys, FairBatch(groups="group"), loader(Hidden()), ByHand())
        assert "labels  0, 1; not checked: found nothing in the batches to compare them with" in said

    def test_is_silent_if_not_wanted(self, capsys):
        assert self.said(capsys, FairBatch(groups="group", verbose=False)) == ""


def test_names_whose_second_is_the_models_first_class_need_a_positive_label():
    """By the alphabet "unhired" would be the positive one of equal opportunity."""

    class Words(Toy):
        def __init__(self):
            super().__init__()
            self.numbers, self.targets = self.targets, [["unhired", "hired"][y] for y in self.targets]

        def __getitem__(self, index):
            return self.x[index], self.numbers[index], index

    for criterion in ("equal_opportunity", "demographic_parity"):
        with pytest.raises(ValueError, match=r"the second is 'unhired', but .*\(positive_label='hired'\)"):
            trainer(FairBatch(criterion, groups="group")).fit(ToyModule(), loader(Words()))
    fine = FairBatch(EqualOpportunity(positive_label="hired"), groups="group")
    trainer(fine).fit(ToyModule(), loader(Words()))
    trainer(FairBatch("equalized_odds", groups="group")).fit(ToyModule(), loader(Words()))
