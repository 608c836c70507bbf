"""Training code as others write it: its errors are measured exactly, or it is refused; never silently wrong.

Every sample carries its number in x, so that what the model was really given can be compared with what FairBatch says.
The learning rate is 0: losses are those of the same weights throughout, and are computed again without our code.
"""

import copy
import pickle
import re
from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import pytest
import torch
from helpers import GROUPS, trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.nn import functional
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, default_collate, random_split

from fairbatch_lightning import FairBatch, OnlineEstimate, SignedSteps
from fairbatch_lightning.callbacks.baselines import GroupDRO

FEATURES, SIZE, BATCH = 6, 240, 20


class Traced(Dataset):
    """Samples (x, y); the last feature is the sample's number."""

    def __init__(self, num_labels=2, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(SIZE, FEATURES, generator=generator)
        self.targets = torch.randint(num_labels, (SIZE,), generator=generator)
        self.group = [GROUPS[i] for i in torch.randint(3, (SIZE,), generator=generator)]
        self.x[:, -1] = torch.arange(SIZE)

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return self.x[index], self.targets[index]


class Module(L.LightningModule):
    """Keeps the numbers of the samples that it computes a loss of."""

    outputs = 2

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(FEATURES - 1, self.outputs)
        self.seen = []

    def forward(self, x):
        return self.net(x[:, :-1])

    def unpack(self, batch):
        return batch[0], batch[1]

    def training_step(self, batch, batch_idx):
        x, y = self.unpack(batch)
        if self.training:
            self.seen.append(x[:, -1].long().tolist())
        return self.step(x, y)

    def step(self, x, y):
        return self.loss(self(x), y)

    def loss(self, logits, y):
        return functional.cross_entropy(logits, y)

    def reference(self, x):
        """The logits of samples, for the test."""
        return self.net(x[:, :-1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


# ---- how modules come by their logits --------------------------------------------------------------------------------


class CallsForward(Module):
    def step(self, x, y):
        return self.loss(self.forward(x), y)


class CallsPart(Module):
    def step(self, x, y):
        return self.loss(self.net(x[:, :-1]), y)


class HeadInStep(Module):
    """Its forward gives an embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES - 1, 16)
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        return self.embed(x[:, :-1]).relu()

    def step(self, x, y):
        return self.loss(self.head(self(x)), y)

    def reference(self, x):
        return self.head(self(x))


class Returns(Module):
    def step(self, x, y):
        logits = functional.linear(x[:, :-1], self.net.weight, self.net.bias)
        return {"loss": self.loss(logits, y), "logits": logits}


class Binary(Module):
    outputs = 1

    def loss(self, logits, y):
        return functional.binary_cross_entropy_with_logits(logits, y.float().unsqueeze(1))


class FlatBinary(Binary):
    def forward(self, x):
        return self.net(x[:, :-1]).squeeze(1)

    def loss(self, logits, y):
        return functional.binary_cross_entropy_with_logits(logits, y.float())


class SmoothedBinary(FlatBinary):
    def loss(self, logits, y):
        return functional.binary_cross_entropy(logits.sigmoid(), y * 0.9 + 0.05)


class SignedBinary(FlatBinary):
    """Labels -1 and 1; the loss wants 0 and 1."""

    def loss(self, logits, y):
        return functional.binary_cross_entropy_with_logits(logits, (y + 1).float() / 2)


class Hinge(FlatBinary):
    def loss(self, logits, y):
        return (1 - (2 * y - 1) * logits).clamp(min=0).mean()


class DictOutput(Module):
    def forward(self, x):
        return {"features": x, "logits": self.net(x[:, :-1])}

    def loss(self, output, y):
        return super().loss(output["logits"], y)


class ObjectOutput(Module):
    def forward(self, x):
        return SimpleNamespace(logits=self.net(x[:, :-1]), hidden_states=None)

    def loss(self, output, y):
        return super().loss(output.logits, y)


class TupleOutput(Module):
    def forward(self, x):
        return self.net(x[:, :-1]), x

    def loss(self, output, y):
        return super().loss(output[0], y)


class PredsOutput(Module):
    def forward(self, x):
        return {"preds": self.net(x[:, :-1])}

    def loss(self, output, y):
        return super().loss(output["preds"], y)


# ---- losses ----------------------------------------------------------------------------------------------------------


class OneHot(Module):
    def loss(self, logits, y):
        return functional.cross_entropy(logits, functional.one_hot(y, 2).float())


class SmoothedTargets(Module):
    def loss(self, logits, y):
        return functional.cross_entropy(logits, functional.one_hot(y, 2) * 0.8 + 0.1)


class LabelSmoothing(Module):
    def __init__(self):
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.tensor([1.0, 3.0]))

    def loss(self, logits, y):
        return self.criterion(logits, y)


class NegativeLogLikelihood(Module):
    def loss(self, logits, y):
        return functional.nll_loss(functional.log_softmax(logits / 2, 1), y)


class Focal(Module):
    """Written by hand."""

    def loss(self, logits, y):
        log_p = logits.log_softmax(1).gather(1, y.unsqueeze(1))
        return (-((1 - log_p.exp()) ** 2) * log_p).mean()


class Indexed(Module):
    def loss(self, logits, y):
        return -logits.log_softmax(1)[torch.arange(len(y)), y].mean()


class LogsConfidence(Module):
    """Looks up something else as well."""

    def loss(self, logits, y):
        p = logits.softmax(1)
        self.log("confidence", p.gather(1, p.argmax(1, keepdim=True)).mean())
        return super().loss(logits, y)


# ---- several forward passes ------------------------------------------------------------------------------------------


class TeacherFirst(Module):
    """Its own earlier self, through the same module."""

    def step(self, x, y):
        with torch.no_grad():
            teacher = self(x + torch.randn_like(x))
        student = self(x)
        return self.loss(student, y) + functional.kl_div(
            student.log_softmax(1), teacher.softmax(1), reduction="batchmean"
        )


class UnlabelledFirst(Module):
    """Semi-supervised: as many samples without a label pass first."""

    def step(self, x, y):
        unlabelled = self(torch.randn_like(x))
        pseudo = unlabelled.detach().argmax(1)
        return functional.cross_entropy(unlabelled, pseudo) + self.loss(self(x), y)


class TeacherApart(Module):
    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(FEATURES - 1, 2)

    def step(self, x, y):
        teacher, student = self.teacher(x[:, :-1]), self(x)
        return self.loss(student, y) + functional.mse_loss(student, teacher)


class SecondView(Module):
    def step(self, x, y):
        first, second = self(x), self(x + 1)
        return self.loss(first, y) + functional.mse_loss(second, first.detach())


class NowAndThenTwice(Module):
    """Calls itself another number of times with every other batch."""

    def step(self, x, y):
        if len(self.seen) % 2:
            self(torch.randn_like(x))
        return self.loss(self(x), y)


class TwiceWithoutALoss(Module):
    def step(self, x, y):
        mean = (self(x) + self(x + 1)) / 2
        return ((mean.softmax(1) - torch.eye(2)[y]) ** 2).mean()


class Manual(Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class ManualTwice(Manual):
    """As adversarial training does it: two losses, two backward passes."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(functional.mse_loss(self(torch.randn_like(batch[0])), torch.zeros(BATCH, 2)))
        self.manual_backward(Module.training_step(self, batch, batch_idx))
        optimizer.step()
        optimizer.zero_grad()


class TwoTasks(Module):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(FEATURES - 1, 3)

    def step(self, x, y):
        other = self.other(x[:, :-1])
        return self.loss(self.net(x[:, :-1]), y) + functional.cross_entropy(other, x[:, -1].long() % 3)


# ---- outputs that are no logits --------------------------------------------------------------------------------------


class ManyLabels(Module):
    outputs = 5

    def loss(self, logits, y):
        return functional.binary_cross_entropy_with_logits(logits, torch.ones_like(logits) * y.unsqueeze(1))


class AutoEncoder(Module):
    outputs = FEATURES

    def step(self, x, y):
        return functional.mse_loss(self(x), x)


class AutoEncoderWithHead(AutoEncoder):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(FEATURES, 2)

    def step(self, x, y):
        code = self(x)
        return functional.mse_loss(code, x) + self.loss(self.head(code), y)

    def reference(self, x):
        return self.head(self(x))


class Embedding(Module):
    outputs = 16

    def step(self, x, y):
        code = self(x)
        return ((code[y == 0] ** 2).sum() - (code[y == 1] ** 2).sum()) / len(y)


class Regression(Module):
    outputs = 1

    def step(self, x, y):
        return functional.mse_loss(self(x), x[:, :1])


class TwoRowsEach(Module):
    def step(self, x, y):
        return self.loss(self(torch.cat([x, x + 1])), torch.cat([y, y]))


class DropsSamples(Module):
    def step(self, x, y):
        return self.loss(self(x[:-3]), y[:-3])


# ---- what is done to batches and labels ------------------------------------------------------------------------------


class SortsInStep(Module):
    def step(self, x, y):
        order = x[:, 0].argsort()
        return self.loss(self(x[order]), y[order])


class SortsAndReturnsInOrder(Module):
    def step(self, x, y):
        order = x[:, 0].argsort()
        logits = self(x[order])
        return {"loss": self.loss(logits, y[order]), "logits": logits[order.argsort()]}


class SortsBack(Module):
    """As packed sequences are: sorted for the model, and back for the loss."""

    def step(self, x, y):
        order = x[:, 0].argsort()
        return self.loss(self(x[order])[order.argsort()], y)


class ReturnsASortedCopy(Module):
    def step(self, x, y):
        order = x[:, 0].argsort()
        logits = self(x[order])
        return {"loss": self.loss(logits, y[order]), "logits": logits.clone()}


class SortsTheLoss(Module):
    """Its outputs are in order; only the loss takes them in another one."""

    def step(self, x, y):
        order, logits = x[:, 0].argsort(), self(x)
        return {"loss": self.loss(logits[order], y[order]), "logits": logits}


class BinarySorted(FlatBinary):
    def step(self, x, y):
        order = x[:, 0].argsort()
        return self.loss(self(x[order]), y[order])


class SharedHead(Module):
    """One layer for the classes and for something else."""

    outputs = 5

    def step(self, x, y):
        output = self(x)
        return self.loss(output[:, :2], y) + functional.mse_loss(output[:, 2:], x[:, :3])


class TwoParts(Module):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(FEATURES - 1, 2)

    def step(self, x, y):
        return self.loss(self.net(x[:, :-1]) + self.other(x[:, :-1]), y)


class TwoViews(Module):
    def step(self, x, y):
        return self.loss((self(x) + self(x + 1)) / 2, y)


class Adjusted(Module):
    """Logit adjustment by the labels' frequencies."""

    def step(self, x, y):
        return self.loss(self(x) + torch.tensor([0.7, 0.3]).log(), y)


class SignedMargin(FlatBinary):
    def loss(self, logits, y):
        return functional.soft_margin_loss(logits, 2 * y.float() - 1)


class Ignores(Module):
    def loss(self, logits, y):
        y = y.clone()
        y[::3] = -100
        return functional.cross_entropy(logits, y)


class Bootstraps(Module):
    def loss(self, logits, y):
        return 0.8 * functional.cross_entropy(logits, y) + 0.2 * functional.cross_entropy(logits, logits.argmax(1))


class PenaltyByHand(Module):
    def loss(self, logits, y):
        by_hand = -(functional.one_hot(y, 2) * logits.log_softmax(1)).sum(1).mean()
        return by_hand + 0.01 * functional.mse_loss(logits, torch.zeros_like(logits))


class OneAgainstAll(Module):
    outputs = 3

    def loss(self, logits, y):
        return functional.binary_cross_entropy_with_logits(logits, functional.one_hot(y, 3) * 0.9 + 0.05)


class Scripted(Module):
    def __init__(self):
        super().__init__()
        self.net = torch.jit.script(self.net)


class Influence(Module):
    """Differentiates a loss of its own by torch.func."""

    def step(self, x, y):
        def other(weight):
            return functional.cross_entropy(functional.linear(x[:, :-1], weight), y)

        torch.func.grad(other)(self.net.weight.detach())
        return self.loss(self(x), y)


class CopiesItself(Module):
    """Keeps an average of itself, which is made in the first step."""

    def step(self, x, y):
        logits = self(x)
        if self.training:
            vars(self)["average"] = copy.deepcopy(self.net)
            pickle.dumps(self.net)
        return self.loss(logits, y)


class Mixup(Module):
    def step(self, x, y):
        other = torch.randperm(len(y))
        logits = self(0.7 * x + 0.3 * x[other])
        return 0.7 * self.loss(logits, y) + 0.3 * self.loss(logits, y[other])


class SoftMixup(Module):
    def step(self, x, y):
        other, hot = torch.randperm(len(y)), functional.one_hot(y, 2).float()
        return functional.cross_entropy(self(0.7 * x + 0.3 * x[other]), 0.7 * hot + 0.3 * hot[other])


class MixupInTraining(SoftMixup):
    def step(self, x, y):
        return super().step(x, y) if self.training else self.loss(self(x), y)


class ForDicts(Module):
    def unpack(self, batch):
        return batch["image"], batch["label"]


class ForObjects(Module):
    def unpack(self, batch):
        return batch.image, batch.label


class ForNesting(Module):
    def unpack(self, batch):
        return batch["inputs"][0], batch["inputs"][1]["label"]


class ForWords(Module):
    def unpack(self, batch):
        return batch[0], torch.tensor([["cat", "dog"].index(word) for word in batch[1]])


class ForTwoLoaders(Module):
    def unpack(self, batch):
        return batch["fair"]


class ThreeOutputs(Module):
    outputs = 3


class CountsFromZero(ThreeOutputs):
    def loss(self, logits, y):
        return functional.cross_entropy(logits, y - 1)


class Wrapper(Dataset):
    """Does something to the samples of another dataset, which it keeps as so many wrappers do."""

    def __init__(self, dataset, order=None, change=lambda y: y):
        self.dataset, self.order, self.change = dataset, order or (lambda i: i), change

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        x, y = self.dataset[self.order(index)]
        return x, self.change(y)


class Changed(Traced):
    """Has a `target_transform`, as torchvision's datasets."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x, 1 - y


class WithGroup(Traced):
    """Holds the group in its samples."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return {"image": x, "label": y, "group": GROUPS.index(self.group[index])}


class Words(Traced):
    """Labels are words; samples have the numbers of their classes."""

    def __init__(self, words, numbers, num_labels=2):
        super().__init__(num_labels)
        self.label = [words[y] for y in self.targets]
        self.numbers = torch.tensor(numbers)[self.targets]
        del self.targets

    def __getitem__(self, index):
        return self.x[index], self.numbers[index]

    @property
    def true(self):
        return self.numbers


class SaysWords(Words):
    def __getitem__(self, index):
        return self.x[index], self.label[index]


class Numbered(Words):
    """Labels are other numbers than those of the classes."""

    def __getitem__(self, index):
        return self.x[index], self.label[index]


@dataclass
class Sample:
    image: torch.Tensor
    label: torch.Tensor


Pair = namedtuple("Pair", ["image", "label"])


def as_dict(samples):
    x, y = default_collate(samples)
    return {"image": x, "label": y, "path": [f"{int(one)}.jpg" for one in x[:, -1]]}


def nested(samples):
    x, y = default_collate(samples)
    return {"inputs": [x, {"label": y, "weight": torch.ones(len(y))}]}


def sorted_by_length(samples):
    return default_collate(sorted(samples, key=lambda sample: -sample[0][0]))


def loading(dataset=None, **arguments):
    return DataLoader(Traced() if dataset is None else dataset, BATCH, shuffle=True, **arguments)


# ---- the table -------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A training: what it is made of, and the beginning of what it is refused with; None if it must be exact."""

    module: type
    data: Any = loading
    refused: str | None = None
    settings: Mapping[str, Any] = MappingProxyType({})


ARRAY = {"groups": Traced().group}
WRONG = "FairBatch has paired a batch with the wrong labels: "
MIXED = "FairBatch cannot tell the errors of single samples from batches whose samples are mixed, as by mixup"
FOREIGN = {
    "self(x)": Case(Module),
    "self.forward(x)": Case(CallsForward),
    "a part of the module": Case(CallsPart),
    "a head in the step": Case(HeadInStep),
    "a part that is named": Case(HeadInStep, settings={"logits": "head"}),
    "returned": Case(Returns),
    "one output": Case(Binary),
    "one output, flat": Case(FlatBinary),
    "one output, smoothed": Case(SmoothedBinary),
    "one output, labels -1 and 1": Case(SignedBinary, lambda: loading(Numbered([-1, 1], [0, 1]))),
    "hinge": Case(Hinge),
    "a dict": Case(DictOutput),
    "an object": Case(ObjectOutput),
    "a tuple": Case(TupleOutput),
    "a dict without logits": Case(PredsOutput),
    "one-hot": Case(OneHot),
    "smoothed targets": Case(SmoothedTargets),
    "label smoothing and weights": Case(LabelSmoothing),
    "nll of a temperature": Case(NegativeLogLikelihood),
    "focal": Case(Focal),
    "indexed": Case(Indexed),
    "logs a confidence": Case(LogsConfidence),
    "teacher first": Case(TeacherFirst),
    "unlabelled first": Case(UnlabelledFirst),
    "teacher apart": Case(TeacherApart),
    "second view": Case(SecondView),
    "twice without a loss": Case(TwiceWithoutALoss, refused="FairBatch cannot tell which of 2 outputs"),
    "manual": Case(Manual),
    "manual, twice": Case(ManualTwice),
    "two tasks": Case(TwoTasks),
    "many labels": Case(ManyLabels, refused="FairBatch needs logits of one label per sample.*several yes/no answers"),
    "autoencoder": Case(AutoEncoder, refused="FairBatch needs logits of one label per sample.*to reconstruct"),
    "autoencoder with a head": Case(AutoEncoderWithHead),
    "embedding": Case(Embedding, refused=r"FairBatch cannot tell whether outputs of shape \(20, 16\) are logits"),
    "regression": Case(Regression, refused="FairBatch needs logits of one label per sample"),
    "two rows each": Case(TwoRowsEach, refused="FairBatch found no logits.* 2 rows for every sample"),
    "drops samples": Case(DropsSamples, refused="FairBatch found no logits.*Samples seem to be dropped"),
    "sorted by collate_fn": Case(Module, lambda: loading(collate_fn=sorted_by_length), WRONG),
    "sorted in the step": Case(SortsInStep, refused=WRONG),
    "sorted, returned in order": Case(SortsAndReturnsInOrder),
    "sorted and sorted back": Case(SortsBack, refused="the loss is computed with the labels, but of something"),
    "a sorted copy, returned": Case(ReturnsASortedCopy, refused=WRONG),
    "a sorted loss": Case(SortsTheLoss),
    "one output, sorted": Case(BinarySorted, refused=WRONG),
    "a head that is shared": Case(SharedHead, refused="the loss is computed with the labels, but of something"),
    "two parts, added": Case(TwoParts, refused="found no logits"),
    "two views, averaged": Case(TwoViews, refused="cannot tell which of 2 outputs"),
    "logit adjustment": Case(Adjusted),
    "answers -1 and 1": Case(SignedMargin),
    "ignored labels": Case(Ignores),
    "own predictions as well": Case(Bootstraps),
    "by hand, with a penalty": Case(PenaltyByHand),
    "one against all": Case(OneAgainstAll, lambda: loading(Words([0, 1, 2], [0, 1, 2], 3))),
    "a scripted part": Case(Scripted),
    "torch.func": Case(Influence),
    "copies": Case(CopiesItself),
    "mixup": Case(Mixup, refused=MIXED),
    "soft mixup": Case(SoftMixup, refused=MIXED),
    "mixup in training, exact": Case(MixupInTraining, settings={"estimate": "exact"}),
    "mixup in training, sampled": Case(MixupInTraining, settings={"estimate": "sampled"}),
    "dict batches": Case(ForDicts, lambda: loading(collate_fn=as_dict)),
    "dataclass batches": Case(ForObjects, lambda: loading(collate_fn=lambda s: Sample(*default_collate(s)))),
    "namedtuple batches": Case(ForObjects, lambda: loading(collate_fn=lambda s: Pair(*default_collate(s)))),
    "nested batches": Case(ForNesting, lambda: loading(collate_fn=nested)),
    "words in batches": Case(ForWords, lambda: loading(SaysWords(["cat", "dog"], [0, 1]))),
    "two loaders": Case(ForTwoLoaders, lambda: {"fair": loading(), "other": loading()}, settings={"loader": "fair"}),
    "combined loader": Case(
        ForTwoLoaders,
        lambda: CombinedLoader({"other": loading(), "fair": loading()}, "min_size"),
        settings={"loader": "fair"},
    ),
    "names against the alphabet": Case(Module, lambda: loading(Words(["unhired", "hired"], [0, 1]))),
    "names of two of three classes": Case(ThreeOutputs, lambda: loading(Words(["cat", "horse"], [0, 2]))),
    "labels from 1": Case(CountsFromZero, lambda: loading(Numbered([1, 2], [0, 1]))),
    "a class that does not occur": Case(ThreeOutputs, lambda: loading(Words([0, 2], [0, 2]))),
    "target_transform": Case(Module, lambda: loading(Changed()), WRONG),
    "a wrapper": Case(Module, lambda: loading(Wrapper(Traced()))),
    "a wrapper that relabels": Case(Module, lambda: loading(Wrapper(Traced(), change=lambda y: 1 - y)), WRONG),
    "a wrapper that permutes": Case(Module, lambda: loading(Wrapper(Traced(), order=lambda i: SIZE - 1 - i)), WRONG),
    "labels of another table": Case(Module, refused=WRONG, settings={"labels": Traced(seed=1).targets}),
    "groups of another table": Case(
        ForDicts,
        lambda: loading(Subset(WithGroup(), range(SIZE - 1, -1, -1))),
        "FairBatch has paired a batch with the wrong groups",
        {"groups": lambda data: WithGroup().group},
    ),
    "random_split of all": Case(
        Module, lambda: loading(random_split(Traced(), [1.0])[0]), "fits the part .* as well as", ARRAY
    ),
    "parts, joined": Case(
        Module,
        lambda: loading(ConcatDataset([Subset(Traced(), range(0, SIZE, 2)), Subset(Traced(), range(1, SIZE, 2))])),
    ),
    "tensors and an array": Case(Module, lambda: loading(TensorDataset(Traced().x, Traced().targets)), settings=ARRAY),
    "worker processes": Case(Module, lambda: loading(num_workers=1)),
}


def true_cells(found):
    """Return the label and the group of every sample, by its number."""
    labels = getattr(found, "true", None)
    return (found.targets if labels is None else labels).numpy(), np.array([GROUPS.index(one) for one in found.group])


def innermost(data):
    if isinstance(data, dict | CombinedLoader):
        data = (data if isinstance(data, dict) else data.iterables)["fair"]
    found = data.dataset
    while not isinstance(found, Traced):
        if isinstance(found, TensorDataset):
            return Traced()
        found = found.datasets[0] if isinstance(found, ConcatDataset) else found.dataset
    return found


def mean_losses(module, dataset, samples):
    """Return the mean loss of every cell over these samples, without our code."""
    labels, groups = true_cells(dataset)
    with torch.no_grad():
        logits = module.reference(dataset.x[samples])
    y = torch.from_numpy(labels[samples])
    losses = (
        functional.binary_cross_entropy_with_logits(logits.flatten(), y.float(), reduction="none")
        if logits.ndim == 1 or logits.shape[1] == 1
        else functional.cross_entropy(logits, y, reduction="none")
    )
    return {
        (label, group): float(losses[(labels[samples] == label) & (groups[samples] == group)].mean())
        for label in sorted(set(labels.tolist()))
        for group in range(3)
    }


def check_exact(callback, module, data):
    dataset = innermost(data)
    per_epoch = SIZE // BATCH
    labels, groups = true_cells(dataset)
    classes = sorted(set(labels.tolist()))
    rows = {label: row for row, label in enumerate(callback.index.label_values)}
    by_class = callback._classes.find(callback.index.label_values, max(2, module.outputs))
    for epoch, record in enumerate(callback.history):
        samples = np.concatenate(module.seen[epoch * per_epoch : (epoch + 1) * per_epoch])
        if type(callback._estimate).__name__ != "OnlineEstimate":
            samples = np.arange(SIZE)
        expected = mean_losses(module, dataset, samples)
        for label, value in by_class.items():
            for group, name in enumerate(callback.index.group_names):
                found = float(record.losses[rows[label], group])
                assert name == GROUPS[group]
                assert found == pytest.approx(expected[value, group], abs=1e-5), (epoch, label, name)
        drawn = np.concatenate(module.seen[epoch * per_epoch : (epoch + 1) * per_epoch])
        for label, value in by_class.items():
            in_row = (labels == value).sum()
            for group in range(3):
                count = ((labels[drawn] == value) & (groups[drawn] == group)).sum()
                wanted = float(record.shares_before[rows[label], group]) * in_row
                assert abs(count - wanted) <= 1.5, (epoch, label, group)
    assert len(classes) == len(by_class)
    assert len(callback.history) == 3


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_code_is_exact_or_refused(name):
    case = FOREIGN[name]
    torch.manual_seed(0)
    settings = {"groups": "group", "rule": SignedSteps(alpha=0.02), "estimate": "online", **case.settings}
    callback, module, data = FairBatch(**settings), case.module(), case.data()
    run = trainer(callback, max_epochs=3)
    if case.refused is None:
        run.fit(module, data)
        check_exact(callback, module, data)
    else:
        with pytest.raises((ValueError, RuntimeError)) as error:
            run.fit(module, data)
        assert re.match(f"(?s).*(?:{case.refused})", str(error.value)), str(error.value)
        assert len(module.seen) <= 3
    assert "forward" not in vars(module)  # no trace is left
    assert not any(part._forward_hooks for part in module.modules())


def test_a_model_that_is_called_another_number_of_times_now_and_then():
    """Batches of which it is not sure which output is which are left out until it is; none is taken for another."""
    estimate = OnlineEstimate(samples_per_cell=16)  # some batches less do not starve a cell
    callback = FairBatch(groups="group", rule=SignedSteps(alpha=0.02), estimate=estimate)
    module, data = NowAndThenTwice(), loading()
    trainer(callback, max_epochs=3).fit(module, data)
    last = np.concatenate(module.seen[-SIZE // BATCH :])
    expected = mean_losses(module, data.dataset, last)
    for (label, group), loss in expected.items():
        assert float(callback.history[-1].losses[label, group]) == pytest.approx(loss, abs=1e-5)


class ShufflesLater:
    """A collate_fn that begins to put samples in another order when the first batches are past."""

    def __init__(self):
        self.calls = 0

    def __call__(self, samples):
        self.calls += 1
        return default_collate(samples[::-1] if self.calls > 2 * SIZE // BATCH else samples)


def test_what_goes_wrong_later_is_found_at_an_update():
    callback, module = FairBatch(groups="group"), Module()
    with pytest.raises(ValueError, match=WRONG):
        trainer(callback, max_epochs=20).fit(module, loading(collate_fn=ShufflesLater()))
    assert 2 * SIZE // BATCH < len(module.seen) <= 2 * SIZE // BATCH + 8


class Chance(Module):
    """Another task's labels are often the same in a small batch."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(FEATURES - 1, 2)

    def step(self, x, y):
        features, alike = x[:, :-1], torch.where(x[:, -1].long() % 7 == 0, 1 - y, y)
        return functional.cross_entropy(self.other(features), alike) + self.loss(self.net(features), y)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_part_whose_labels_are_alike_by_chance_is_not_taken(size):
    """Nothing is measured until it is sure which part it is."""
    estimate = OnlineEstimate(samples_per_cell=1)
    callback = FairBatch(groups="group", rule=SignedSteps(alpha=0.02), estimate=estimate, update_every="epoch")
    module, data = Chance(), DataLoader(Traced(), size, shuffle=True)
    trainer(callback, max_epochs=2).fit(module, data)
    expected = mean_losses(module, data.dataset, np.concatenate(module.seen[SIZE // size :]))
    for (label, group), loss in expected.items():
        assert float(callback.history[-1].losses[label, group]) == pytest.approx(loss, abs=1e-5)


def test_two_parts_that_are_both_trained_with_the_labels_need_a_name():
    class DeeplySupervised(Chance):
        def step(self, x, y):
            return self.loss(self.other(x[:, :-1]), y) + self.loss(self.net(x[:, :-1]), y)

    with pytest.raises(ValueError, match=r"`net` and `other` are all trained with the labels. .*\(logits='net'\)"):
        trainer(FairBatch(groups="group")).fit(DeeplySupervised(), loading())
    trainer(FairBatch(groups="group", logits="other"), max_epochs=1).fit(DeeplySupervised(), loading())


def test_a_step_that_begins_to_mix_is_noticed():
    class LaterMixup(Module):
        def step(self, x, y):
            return Mixup.step(self, x, y) if self.current_epoch else super().step(x, y)

    with pytest.raises(ValueError, match=MIXED):
        trainer(FairBatch(groups="group"), max_epochs=3).fit(LaterMixup(), loading())


@pytest.mark.parametrize("name", ["unlabelled first", "mixup", "soft mixup", "autoencoder", "sorted in the step"])
def test_baselines_refuse_what_they_would_take_for_something_else(name):
    with pytest.raises((ValueError, RuntimeError)):
        trainer(GroupDRO(groups="group"), max_epochs=1).fit(FOREIGN[name].module(), FOREIGN[name].data())


def test_modules_are_copied_and_pickled_while_they_are_watched(tmp_path):
    """Copies are as if nobody had watched, and train on by themselves."""

    class Copies(L.Callback):
        def on_before_zero_grad(self, trainer, module, optimizer):
            copied = copy.deepcopy(module)
            pickle.dumps(trainer.callbacks[0])
            torch.save(copied, tmp_path / "copy.pt")
            assert "forward" not in vars(copied) or isinstance(copied.forward, MethodType)
            assert copied.reference(torch.ones(2, FEATURES)).shape == (2, 2)

    for module in (Module(), CallsForward()):
        callback = FairBatch(groups="group", rule=SignedSteps(alpha=0.02), estimate="online")
        trainer(callback, Copies(), max_epochs=3).fit(module, data := loading())
        check_exact(callback, module, data)
