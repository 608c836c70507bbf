"""The estimate on held-out data: it takes the losses of the validation loop, and refuses those it cannot place."""

import pytest
import torch
from estimating import WithValidation, cell_means, fit, held_out
from helpers import Toy, ToyModule, loader, trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities import CombinedLoader
from torch.nn import functional
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler

from fairbatch_lightning import FairBatch, FairBatchWarning, FairSampler, ValidationEstimate


class TestValidation:
    def test_measures_the_validation_set(self):
        module, dataset = WithValidation(), Toy(130, seed=5)
        callback = fit(module, estimate="validation", validation=held_out())
        for record, passes in zip(callback.history, module.epochs(), strict=True):
            expected, counts = cell_means([entry for entry in passes if not entry[0]], dataset)
            assert counts.sum() == 130
            torch.testing.assert_close(record.losses, expected)

    @pytest.mark.parametrize("early", [False, True])
    def test_the_sanity_check_is_not_a_measurement(self, early):
        """Not even if the training data is known by then, as a schedule needs it that asks how long training is."""

        class Scheduled(WithValidation):
            def configure_optimizers(self):
                assert not early or self.trainer.estimated_stepping_batches == 36
                return super().configure_optimizers()

        callback = fit(Scheduled(), estimate="validation", validation=held_out(), num_sanity_val_steps=2)
        assert [record.epoch for record in callback.history] == [0, 1, 2]

    def test_updates_after_every_validation(self):
        callback = fit(WithValidation(), estimate="validation", validation=held_out(), val_check_interval=4)
        assert [record.step for record in callback.history] == list(range(4, 37, 4))
        callback = fit(
            WithValidation(), estimate="validation", validation=held_out(), check_val_every_n_epoch=2, epochs=4
        )
        assert [record.epoch for record in callback.history] == [1, 3]

    def test_sampler_follows_within_the_epoch(self):
        module, data = WithValidation(), Toy()
        callback = fit(module, estimate="validation", validation=held_out(), val_check_interval=4, epochs=1)
        sampler = FairSampler(data.targets, data.group, 20, drop_last=False)
        stream, expected = sampler.batches(), []
        for record in callback.history:
            assert not torch.equal(record.shares_before, record.shares_after)
            expected += [next(stream) for _ in range(4)]
            sampler.shares = record.shares_after
        assert [samples for mode, samples, _ in module.epochs()[0] if mode] == expected

    def test_part_of_the_validation_set(self):
        module, dataset = WithValidation(), Toy(130, seed=5)
        callback = fit(module, estimate="validation", validation=held_out(), limit_val_batches=2, epochs=1)
        expected, counts = cell_means([entry for entry in module.epochs()[0] if not entry[0]], dataset)
        assert counts.sum() == 80
        torch.testing.assert_close(callback.history[0].losses, expected)

    def test_standalone_validation_changes_nothing(self):
        module = WithValidation()
        callback = FairBatch(groups="group", estimate="validation")
        run = trainer(callback, max_epochs=2)
        run.fit(module, loader(), held_out())
        run.validate(module, held_out(), verbose=False)
        run.test(TestStep(), held_out(), verbose=False)
        assert len(callback.history) == 2

    def test_one_of_several_loaders(self):
        module = WithValidation()
        both = [DataLoader(Toy(30, seed=6), batch_size=40), held_out()]
        callback = fit(module, estimate=ValidationEstimate(loader=1), validation=both, epochs=1)
        expected, counts = cell_means([p for p in module.epochs()[0] if not p[0]][1:], Toy(130, seed=5))
        assert counts.sum() == 130
        torch.testing.assert_close(callback.history[0].losses, expected)

    def test_sources_of_its_own(self):
        """Groups given as an array are those of the training set only."""
        train, other = Toy(), Toy(130, seed=5)
        callback = FairBatch(groups=train.group, estimate=ValidationEstimate(groups=other.group))
        trainer(callback, max_epochs=1).fit(WithValidation(), loader(train), held_out())
        assert callback.history[0].losses.isfinite().all()

    def test_groups_unknown_in_training_are_left_out_with_a_word(self):
        train = Toy()
        known = Subset(train, [i for i in range(240) if train.group[i] != "c"])
        with pytest.warns(FairBatchWarning, match=r"\d+ of the 130 validation samples are left out.*'c'"):
            callback = fit(WithValidation(), loader(known), "validation", validation=held_out(), epochs=1)
        assert callback.history[0].losses.shape == (2, 2)

    def test_groups_missing_in_validation_take_no_part(self):
        other = Toy(130, seed=5)
        some = Subset(other, [i for i in range(130) if other.group[i] != "c"])
        callback = fit(WithValidation(), None, "validation", validation=DataLoader(some, batch_size=40), epochs=1)
        assert callback.history[0].losses[:, 2].isnan().all()
        before, after = callback.history[0].shares_before, callback.history[0].shares_after
        assert torch.equal(before[:, 2], after[:, 2])
        assert not torch.equal(before, after)

    def test_values_are_logged_for_other_callbacks(self):
        callback = FairBatch(groups="group", estimate="validation")
        run = trainer(callback, EarlyStopping("fairbatch/gap_max", patience=9), max_epochs=2)
        run.fit(WithValidation(), loader(), held_out())
        assert float(run.callback_metrics["fairbatch/gap_max"]) == pytest.approx(callback.history[-1].gap_max)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"validation": None}, "needs a validation loop"),
            ({"limit_val_batches": 0}, "needs a validation loop"),
            ({"validation": held_out(shuffle=True)}, "shuffles.*Use shuffle=False"),
            ({"validation": held_out(sampler=SubsetRandomSampler(range(99)))}, "shuffles"),
            ({"validation": held_out(num_workers=1, in_order=False)}, "in_order=False"),
            (
                {
                    "validation": CombinedLoader([held_out(), held_out()], "max_size"),
                    "estimate": ValidationEstimate(loader=0),
                },
                "one after the other.*'max_size'",
            ),
            ({"fairbatch": {"groups": Toy().group}}, r"ValidationEstimate\(groups=...\)"),
            ({"estimate": ValidationEstimate(groups=["x"] * 130)}, "130 of the 130 validation samples are left out"),
            ({"validation": [held_out(), held_out()]}, r"got 2. Name it by its position"),
            ({"estimate": ValidationEstimate(loader=3)}, "from 0 to 0.*but got 3"),
            ({"estimate": ValidationEstimate(loader="val")}, "from 0 to 0.*but got 'val'"),
            ({"estimate": ValidationEstimate(groups="nothing")}, "looks for labels and groups in the validation set"),
            ({"fairbatch": {"update_every": 3}}, "val_check_interval"),
        ],
    )
    def test_what_cannot_work_is_refused(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            fit(module := WithValidation(), **{"estimate": "validation", "validation": held_out(), **arguments})
        assert not [entry for entry in module.passes if entry != "epoch"]  # before any training

    def test_returned_logits_win_over_the_modules_output(self):
        class Embedding(ToyModule):
            def __init__(self):
                super().__init__()
                self.head = torch.nn.Linear(2, 2)

            def step(self, batch):
                logits = self.head(self(batch[0]))
                return {"loss": functional.cross_entropy(logits, batch[1]), "logits": logits}

            def training_step(self, batch, batch_idx):
                return self.step(batch)

            def validation_step(self, batch, batch_idx):
                return self.step(batch)

        module, dataset = Embedding(), Toy(130, seed=5)
        callback = fit(module, estimate="validation", validation=held_out(), epochs=1)
        with torch.no_grad():
            losses = functional.cross_entropy(module.head(module(dataset.x)), dataset.targets, reduction="none")
        cell = (dataset.targets == 1) & (dataset.group_ids == 2)
        assert float(callback.history[0].losses[1, 2]) == pytest.approx(float(losses[cell].mean()), rel=1e-5)

    def test_validation_without_logits_is_refused(self):
        class NoForward(ToyModule):
            def validation_step(self, batch, batch_idx):
                self.net(batch[0])

        with pytest.raises(RuntimeError, match="`validation_step` did not call"):
            fit(NoForward(), estimate="validation", validation=held_out())

    def test_returned_logits_will_do(self):
        class Returns(ToyModule):
            def validation_step(self, batch, batch_idx):
                return {"logits": self.net(batch[0])}

        callback = fit(Returns(), estimate="validation", validation=held_out(), epochs=1)
        assert callback.history[0].losses.isfinite().all()


class TestStep(ToyModule):
    __test__ = False

    def test_step(self, batch, batch_idx):
        pass
