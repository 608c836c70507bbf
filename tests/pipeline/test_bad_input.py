"""Every wrong input is refused at once, by an error that says how to mend it."""

import numpy as np
import pytest
import torch
from helpers import Toy, ToyModule, loader, trainer
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler

from fairbatch_lightning import DemographicParity, EqualizedOdds, EqualOpportunity, FairBatch, SignedSteps


def fit(callback, data, module=None, **kwargs):
    module = ToyModule() if module is None else module
    trainer(callback, **{"max_epochs": 2, **kwargs}).fit(module, data)
    return module


# ---- refused when the callback is made ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"criterion": "equal_odds"}, "`criterion` to be one of .'equal_opportunity', .* but got 'equal_odds'"),
        ({"criterion": ["equalized_odds"]}, "`criterion` to be one of"),
        ({"criterion": None}, "`criterion` to be one of .* or an object of Criterion but got None"),
        ({"criterion": EqualizedOdds}, "`criterion` to be one of .* but got <class"),
        ({"rule": "fast"}, r"`rule` to be one of \['adaptive', 'paper'\] or an object of UpdateRule but got 'fast'"),
        ({"rule": 0.05}, "`rule` to be one of .* but got 0.05"),
        ({"rule": None}, "`rule` to be one of .* but got None"),
        ({"loss": "mse"}, '`loss` to be None, "error" or a function'),
        ({"logits": torch.nn.Linear(2, 2)}, "`logits` to be the name of a submodule but got Linear"),
        ({"estimate": "fast"}, "`estimate` to be one of .* or an object of Estimate but got 'fast'"),
        ({"estimate": 3}, "`estimate` to be one of"),
        ({"update_every": 0}, '`update_every` to be "auto", "epoch" or a positive number of batches but got 0'),
        ({"update_every": 2.5}, '`update_every` to be "auto", "epoch" or a positive number of batches but got 2.5'),
        ({"update_every": "step"}, '`update_every` to be "auto", "epoch" or a positive number'),
        ({"update_every": 5, "estimate": "validation"}, '`update_every` to be "auto" with estimate="validation"'),
        ({"seed": -1}, "`seed` to be an integer of at least 0 but got -1"),
    ],
)
def test_settings_are_checked_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        FairBatch(**{"groups": "group", **arguments})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SignedSteps(alpha=0), "`alpha` to be a number above 0 but got 0"),
        (lambda: SignedSteps(alpha=-1), "`alpha` to be a number above 0 but got -1"),
        (lambda: SignedSteps(tolerance=-0.1), "`tolerance` to be a number of at least 0"),
        (lambda: SignedSteps(min_share=2), "`min_share` to be a number from 0 to 1 but got 2"),
        (lambda: SignedSteps(compare="mean"), "`compare` to be one of"),
        (lambda: EqualizedOdds(min_samples=0), "`min_samples` to be an integer of at least 1 but got 0"),
    ],
)
def test_settings_of_its_parts_are_checked_at_once(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "name", ["alpha", "threshold", "min_share", "compare", "pull", "positive_label", "min_samples"]
)
def test_settings_of_its_parts_are_not_its_own(name):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        FairBatch(groups="group", **{name: 1})


# ---- refused before training starts ---------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        yield from Toy()


class OwnBatches:
    def __init__(self):
        self.sampler = range(240)

    def __iter__(self):
        yield from (list(range(i, i + 20)) for i in range(0, 240, 20))

    def __len__(self):
        return 12


def one_group_of_positives():
    """Return a dataset whose positive label has samples of a single group."""
    dataset = Toy(120)
    dataset.targets, dataset.group = torch.tensor([0, 1] * 60), ["a", "a", "b", "a"] * 30
    return dataset


@pytest.mark.parametrize(
    ("data", "arguments", "message"),
    [
        (lambda: DataLoader(Stream(), 20), {}, "cannot choose the samples of Stream: .* Use a map-style dataset"),
        (
            lambda: [loader(), loader()],
            {},
            r"got 2. Name it, FairBatch\(loader=0\), or join the datasets with .*ConcatDataset",
        ),
        (lambda: {"a": loader(), "b": loader()}, {}, "Name it, FairBatch.loader='a'."),
        (lambda: [loader(), loader()], {"loader": 2}, r"`loader` to be one of \[0, 1\] but got 2"),
        (lambda: DataLoader(Toy(), batch_size=None), {}, "has batch_size=None.* give the DataLoader a batch_size"),
        (lambda: DataLoader(Toy(), batch_sampler=OwnBatches()), {}, "OwnBatches but cannot tell its batch size. Give"),
        (lambda: DataLoader(Toy(), batch_sampler=SomeBatches()), {}, "all 240 samples, but your SomeBatches draws 60"),
        (lambda: {"a": [loader(), loader()], "b": loader()}, {"loader": "b"}, "but got containers inside of it"),
        (loader, {"criterion": DemographicParity(2)}, r"`positive_label` to be one of .*\[0, 1\] but got 2"),
        (loader, {"criterion": EqualOpportunity(-1)}, r"`positive_label` to be one of .*\[0, 1\] but got -1"),
        (
            lambda: loader(Toy(num_labels=3)),
            {"criterion": "demographic_parity"},
            r"`positive_label` for demographic parity, .* 3 labels \[0, 1, 2\]: DemographicParity\(positive_label",
        ),
        (lambda: Batches(), {}, "needs a torch.utils.data.DataLoader for training but got Batches"),
        (
            lambda: DataLoader(Toy(), 20, sampler=SubsetRandomSampler(range(100))),
            {},
            r"all 240 samples, but your SubsetRandomSampler draws 100. If it leaves some out, use .*Subset\(dataset",
        ),
        (
            loader,
            {"groups": ["a"] * 100},
            "`groups` to have one value for each of the 240 samples of .* but got 100",
        ),
        (loader, {"groups": np.linspace(0, 1, 240)}, "`groups` to be categories .* numbers such as 0.00"),
        (
            loader,
            {"groups": "ethnicity"},
            "Found no groups in Toy: .* 'ethnicity'. It has 'group', .*. Pass `groups` as the name",
        ),
        (loader, {"groups": [0] * 240}, "at least two groups to compare, .* Check the arguments `groups`"),
        (
            loader,
            {"criterion": EqualizedOdds(min_samples=1000)},
            "a label with 1000 samples of at least two",
        ),
        (
            loader,
            {"rule": SignedSteps(min_share=0.4)},
            "`min_share` to be at most 1/3 because a label has 3 groups, but got 0.4",
        ),
        (loader, {"criterion": EqualOpportunity(7)}, r"`positive_label` to be one of .*\[0, 1\] but got 7"),
        (
            lambda: loader(one_group_of_positives()),
            {"criterion": "equal_opportunity"},
            "at least two groups to compare",
        ),
        (loader, {"logits": "head"}, r"`logits` to name a submodule of ToyModule but got 'head'. It has \['net'\]"),
        (lambda: loader(batch_size=400, drop_last=True), {}, "240 samples on 1 process.* do not fill a batch of 400"),
    ],
)
def test_data_is_checked_before_training(data, arguments, message):
    module = ToyModule()
    with pytest.raises((ValueError, TypeError), match=message):
        fit(FairBatch(**{"groups": "group", **arguments}), data(), module)
    assert module.batches == []
    assert not module._forward_hooks


class SomeBatches:
    """Three batches of 20, of samples that its author chose."""

    batch_size = 20

    def __iter__(self):
        yield from (list(range(i, i + 20)) for i in range(0, 60, 20))

    def __len__(self):
        return 3


class Batches:
    def __iter__(self):
        yield from loader()


# ---- refused on the first batch -------------------------------------------------------------------------------------


class NoForward(ToyModule):
    """Computes its logits where no hook sees them."""

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        self.batches.append(index.tolist())
        return functional.cross_entropy(functional.linear(x, self.net.weight, self.net.bias), y)


class ReturnsScalar(NoForward):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "logits": torch.zeros(())}


class TwoViews(NoForward):
    """Passes two views of every sample at once."""

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        self.batches.append(index.tolist())
        return functional.cross_entropy(self(torch.cat([x, -x])), torch.cat([y, y]))


class DropsSamples(NoForward):
    def training_step(self, batch, batch_idx):
        x, y, index = batch
        self.batches.append(index.tolist())
        return functional.cross_entropy(self(x[:15]), y[:15])


class OtherName(NoForward):
    def forward(self, x):
        return {"preds": functional.linear(x, self.net.weight, self.net.bias)}

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        self.batches.append(index.tolist())
        return functional.cross_entropy(self(x)["preds"], y)


class ManualReturns(NoForward):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, _, index = batch
        self.batches.append(index.tolist())
        return {"logits": functional.linear(x, self.net.weight, self.net.bias)}


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (NoForward, r'no call of the module or any part of it.*FairBatch\(logits="net"\), or return'),
        (ReturnsScalar, "found no logits for a batch of 20 samples"),
        (TwoViews, r"a tensor \(40, 2\) of `self\(x\)`; a tensor \(40, 2\) of `net`. It has 2 rows for every sample"),
        (DropsSamples, r"a tensor \(15, 2\) of `self\(x\)`.* Samples seem to be dropped on the way"),
        (OtherName, r"output is a mapping with preds: a tensor \(20, 2\), in which no entry is called `logits`"),
        (ManualReturns, r"With manual optimization .* Call `self\(x\)` in it, or name the submodule"),
    ],
)
def test_logits_out_of_reach_are_noticed_on_the_first_batch(module, message):
    module = module()
    with pytest.raises(RuntimeError, match=message):
        fit(FairBatch(groups="group"), loader(), module)
    assert len(module.batches) == 1


class Named(Toy):
    """Its labels have names; a sample holds the number of its class."""

    def __init__(self, names):
        super().__init__()
        self.numbers, self.targets = self.targets, [names[y] for y in self.targets]

    def __getitem__(self, index):
        return self.x[index], self.numbers[index], index


class HandMade(ToyModule):
    """Looks up the class of a name, and computes its loss by hand: nobody else can know which class is which."""

    def training_step(self, batch, batch_idx):
        x, y, _ = batch
        target = torch.eye(self.net.out_features)[[2 if name == "cat" else 0 for name in y]]
        return (self(x) * target).sum(1).exp().mean()


def test_names_of_which_nothing_says_what_classes_they_are_are_refused():
    """Which of four outputs is "dog" cannot be known: the losses would be those of a class that nobody chose."""
    dataset = Named(["cat", "dog"])
    dataset.numbers = dataset.targets
    with pytest.raises(
        ValueError, match=r"tells 4 classes apart, .*'cat', 'dog'\].* as numbers of classes, from 0 to 3"
    ):
        fit(FairBatch(groups="group", logits="net"), loader(dataset), HandMade(num_labels=4))


@pytest.mark.parametrize(
    ("labels", "num_classes", "classes"),
    [
        (["cat", "dog"], 2, [0, 1]),
        (["unhired", "hired"], 2, [0, 1]),  # not by the alphabet
        (["cat", "horse"], 3, [0, 2]),
        ([0, 2], 3, [0, 2]),
        ([1, 2], 3, [0, 1]),  # counted from 1 where the model counts from 0
    ],
)
@pytest.mark.parametrize("criterion", ["equal_opportunity", "equalized_odds", "demographic_parity"])
def test_labels_whose_classes_are_known_are_taken(labels, num_classes, classes, criterion):
    """Names of classes, or numbers of some, as the batches tell; the losses are those of the right classes."""
    dataset, module = Named(labels), ToyModule(num_classes, lr=0.0)
    dataset.numbers = torch.tensor(classes)[dataset.numbers]
    chosen = {"equalized_odds": EqualizedOdds(), "equal_opportunity": EqualOpportunity(labels[1])}
    callback = FairBatch(chosen.get(criterion, DemographicParity(labels[1])), groups="group", rule="paper")
    fit(callback, loader(dataset), module, max_epochs=1)
    against = dataset.numbers if criterion != "demographic_parity" else torch.full((240,), classes[1])
    losses = functional.cross_entropy(module(dataset.x), against, reduction="none").detach().double()
    index = callback.index
    means = np.bincount(index.cells, losses.numpy(), 6) / np.bincount(index.cells, minlength=6)
    torch.testing.assert_close(callback.history[0].losses.flatten(), torch.tensor(means), atol=1e-6, rtol=1e-6)


# ---- refused beside others ------------------------------------------------------------------------------------------


def test_a_subclass_beside_it_is_refused():
    class Mine(FairBatch):
        pass

    with pytest.raises(ValueError, match="one callback that decides about the batches but got FairBatch and Mine"):
        trainer(FairBatch(groups="group"), Mine(groups="group")).fit(ToyModule(), loader())


def test_two_callbacks_are_refused():
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `FairBatch`"):
        trainer(FairBatch(groups="group"), FairBatch(groups="group"))
