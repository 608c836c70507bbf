"""FairnessMonitor on data and models that could be mistaken, and on such that it cannot follow."""

import math

import pytest
import torch
from evaluated import Evaluated, by_hand, held_out
from helpers import Toy, ToyModule, loader, trainer
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate

from fairbatch_lightning import FairBatchWarning, FairnessMonitor


def test_groups_and_labels_as_users_have_them():
    """Several attributes, through a Subset, with labels that are names."""
    data = Toy(seed=1)
    data.targets_as_words = ["no" if y == 0 else "yes" for y in data.targets]
    data.half = [i % 2 for i in range(len(data))]
    part = Subset(data, range(200))
    monitor = FairnessMonitor(groups=["group", "half"], labels="targets_as_words", positive_label="no")
    model = Evaluated()
    trainer(monitor, max_epochs=1).fit(model, loader(), held_out(part))
    audit = monitor.audits["val"]
    assert audit.label_names == ("no", "yes")
    assert audit.positive == 0
    assert audit.group_names[0] == "group=a, half=0"
    assert audit.num_samples == 200


def test_labels_of_an_unknown_class_are_refused():
    class Unlabelled(Toy):
        def __getitem__(self, index):
            return (self.x[index],)

    data = Unlabelled(seed=1)
    data.words = ["no" if y == 0 else "yes" for y in data.targets]
    monitor = FairnessMonitor(groups="group", labels="words")
    with pytest.raises(ValueError, match=r"tells 4 classes apart, but the data has the labels \['no', 'yes'\]"):
        trainer(monitor, max_epochs=1).fit(Evaluated(num_labels=4), loader(), held_out(data))


@pytest.mark.parametrize("order", [["unhired", "hired"], ["hired", "unhired"]])
def test_names_mean_the_classes_that_the_batches_say(order):
    """Not those of the alphabet."""
    data = Toy(seed=1)
    data.words = [order[y] for y in data.targets]
    monitor, model = FairnessMonitor(groups="group", labels="words"), Evaluated()
    trainer(monitor, max_epochs=1).fit(model, loader(), held_out(data))
    assert monitor.audits["val"].label_names == tuple(order)
    assert torch.equal(monitor.audits["val"].confusion, by_hand(model, data))


class Shuffling:
    """Puts the samples of a batch in another order."""

    def __call__(self, samples):
        return default_collate(samples[::-1])


@pytest.mark.parametrize("names", [False, True])
def test_batches_in_another_order_are_refused(names):
    data = Toy(seed=1)
    data.words = [["no", "yes"][y] for y in data.targets]
    monitor = FairnessMonitor(groups="group", labels="words" if names else None)
    with pytest.raises(
        ValueError,
        match=r"FairnessMonitor has paired a batch with the wrong labels: .*in another order. .*`collate_fn`",
    ):
        trainer(monitor).validate(Evaluated(), held_out(data, collate_fn=Shuffling()), verbose=False)


def test_a_class_that_validation_does_not_have_keeps_its_place():
    """Labels 0 and 2 of a model with three classes: the confusion has three rows, one of them empty."""
    data = Toy(seed=1, num_labels=3)
    keep = [i for i, y in enumerate(data.targets) if y != 1]
    monitor = FairnessMonitor(groups="group")
    with pytest.warns(FairBatchWarning, match="tells 3 classes apart, but val data has no samples of 1. If") as caught:
        trainer(monitor, max_epochs=3).fit(
            Evaluated(num_labels=3), loader(Toy(num_labels=3)), held_out(Subset(data, keep))
        )
    assert len([w for w in caught if issubclass(w.category, FairBatchWarning)]) == 1
    confusion = monitor.audits["val"].confusion
    assert confusion.shape == (3, 3, 3)
    assert confusion[:, 1].sum() == 0
    assert confusion[:, 2].sum() > 0


def test_one_group_only_is_undefined_not_fair():
    data = Toy(seed=1)
    alone = Subset(data, [i for i, group in enumerate(data.group) if group == "a"])
    monitor = FairnessMonitor(groups="group")
    run = trainer(monitor, max_epochs=1)
    with pytest.warns(
        FairBatchWarning,
        match="all val samples are of the group a: disparities are NaN",
    ):
        run.fit(Evaluated(), loader(), held_out(alone))
    assert math.isnan(run.callback_metrics["fairness/val/equalized_odds"])
    assert not math.isnan(run.callback_metrics["fairness/val/accuracy"])


def test_labels_mean_the_same_class_in_data_that_lacks_one():
    """Labels 1, 2, 3 of three classes; without 3 the others would look like class numbers."""
    data, fewer = Toy(seed=1, num_labels=3), Toy(seed=1, num_labels=3)
    data.label = [int(y) + 1 for y in data.targets]
    keep = [i for i, y in enumerate(fewer.targets) if y != 2]
    fewer.label = [int(y) + 1 for y in fewer.targets]
    model, monitor = Evaluated(num_labels=3), FairnessMonitor(groups="group", labels="label", positive_label=3)
    run = trainer(monitor)
    run.validate(model, held_out(data), verbose=False)
    with pytest.warns(FairBatchWarning, match="no samples of 3"):
        run.test(model, held_out(Subset(fewer, keep)), verbose=False)
    expected = by_hand(model, data, 3)
    assert torch.equal(monitor.audits["val"].confusion, expected)
    assert torch.equal(monitor.audits["test"].confusion[:, :2], expected[:, :2])
    assert monitor.audits["test"].positive == 2
    assert monitor.audits["test"].label_names == ("1", "2", "3")
    monitor = FairnessMonitor(groups="group", labels="label")
    run = trainer(monitor)
    with pytest.warns(FairBatchWarning, match="no samples of"):
        run.validate(model, held_out(Subset(fewer, keep)), verbose=False)  # the batches say that 1 is class 0
    run.test(model, held_out(data), verbose=False)
    assert torch.equal(monitor.audits["test"].confusion, expected)


def test_names_of_classes_that_do_not_occur_do_not_collide():
    data = Toy(seed=1, num_labels=3)
    data.classes = ["1", "2", "3"]
    keep = [i for i, y in enumerate(data.targets) if y != 1]
    monitor = FairnessMonitor(groups="group")
    with pytest.warns(FairBatchWarning, match="no samples of class 1"):
        trainer(monitor).validate(Evaluated(num_labels=3), held_out(Subset(data, keep)), verbose=False)
    assert monitor.audits["val"].label_names == ("1", "class 1", "3")


def test_several_outputs_in_a_step_are_refused():
    class Augmenting(ToyModule):
        def validation_step(self, batch, batch_idx):
            return {"logits": self(batch[0]) + self(-batch[0])} if self.returns else self(batch[0]) + self(-batch[0])

    model = Augmenting()
    model.returns = False
    with pytest.raises(RuntimeError, match=r"cannot tell which output .* test-time augmentation. Return \{\"logits\""):
        trainer(FairnessMonitor(groups="group")).validate(model, held_out(), verbose=False)
    model.returns = True
    monitor = FairnessMonitor(groups="group")
    trainer(monitor).validate(model, held_out(), verbose=False)
    assert monitor.audits["val"].num_samples == 240


def test_an_embedding_is_not_taken_for_logits_in_silence():
    class Embedded(Evaluated):
        def forward(self, x):
            return torch.cat([x, x, x, x], 1)

    with pytest.warns(FairBatchWarning, match="tells 16 classes apart, .* say where the logits are"):
        trainer(FairnessMonitor(groups="group")).validate(Embedded(), held_out(), verbose=False)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([Toy()[0]])


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (lambda: held_out(shuffle=True), ValueError, "FairnessMonitor has to know .* but the DataLoader shuffles"),
        (lambda: DataLoader(Stream(), batch_size=2), TypeError, "map-style dataset. It got DataLoader of Stream"),
        (
            lambda: CombinedLoader({"a": held_out(), "b": held_out()}, "max_size"),
            ValueError,
            "one after the other.*'max_size'",
        ),
    ],
    ids=["shuffled", "stream", "combined"],
)
def test_loaders_whose_samples_are_unknown_are_refused(data, error, message):
    class Any(Evaluated):
        def validation_step(self, batch, batch_idx):
            pass

    run = trainer(FairnessMonitor(groups="group"), max_epochs=1, num_sanity_val_steps=0)
    with pytest.raises(error, match=message):
        run.fit(Any(), loader(), data())


def test_logits_out_of_reach_are_refused():
    class Hiding(ToyModule):
        def validation_step(self, batch, batch_idx):
            self.net(batch[0])

    with pytest.raises(RuntimeError, match=r"FairnessMonitor found no logits .* `validation_step` did not call"):
        trainer(FairnessMonitor(groups="group"), max_epochs=1).fit(Hiding(), loader(), held_out())
    with pytest.raises(ValueError, match=r"`logits` to name a submodule of Hiding but got 'head'. It has \['net'\]"):
        trainer(FairnessMonitor(groups="group", logits="head"), max_epochs=1).fit(Hiding(), loader(), held_out())


def test_settings_that_do_not_fit_the_data_are_refused():
    with pytest.raises(ValueError, match="Found no groups in Toy"):
        trainer(FairnessMonitor(groups="race"), max_epochs=1).fit(Evaluated(), loader(), held_out())
    with pytest.raises(ValueError, match=r"`positive_label` to be one of the data's labels \[0, 1\] but got 'maybe'"):
        trainer(FairnessMonitor(groups="group", positive_label="maybe"), max_epochs=1).fit(
            Evaluated(), loader(), held_out()
        )


@pytest.mark.parametrize(
    ("options", "loaders"),
    [
        ({"groups": "race"}, held_out),
        ({"groups": "group", "logits": "head"}, held_out),
        ({"groups": "group"}, lambda: held_out(shuffle=True)),
    ],
    ids=["groups", "logits", "shuffled"],
)
def test_mistakes_are_found_before_the_training(options, loaders):
    run = trainer(FairnessMonitor(**options), max_epochs=1, num_sanity_val_steps=1)
    with pytest.raises(ValueError, match=r"Found no groups|name a submodule|shuffles"):
        run.fit(Evaluated(), loader(), loaders())
    assert run.global_step == 0
