"""Modules and data as people write them: every way to come by logits, optimizers, batches and loaders."""

from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from helpers import Toy, ToyModule, loader
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, default_collate


class Base(ToyModule):
    """Splits what a step does into parts that the scenarios replace."""

    def unpack(self, batch):
        return batch[:3]

    def predict(self, x):
        return self(x)

    def training_step(self, batch, batch_idx):
        x, y, index = self.unpack(batch)
        if self.training:
            self.batches.append(index.tolist())
        return self.loss(self.predict(x), y)

    def loss(self, output, y):
        return functional.cross_entropy(output, y)


class Inner(Base):
    def predict(self, x):
        return self.net(x)


class DirectForward(Base):
    """`self.forward(x)` fires no hook of the module, but one of the submodule."""

    def predict(self, x):
        return self.forward(x)


class Returns(Inner):
    def training_step(self, batch, batch_idx):
        x, y, index = self.unpack(batch)
        if self.training:
            self.batches.append(index.tolist())
        logits = self.net(x)
        return {"loss": self.loss(logits, y), "logits": logits}


class Binary(Base):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def loss(self, output, y):
        return functional.binary_cross_entropy_with_logits(output.flatten(), y.to(output.dtype))


class FlatBinary(Binary):
    def forward(self, x):
        return self.net(x).flatten()


class DictOutput(Base):
    def forward(self, x):
        return {"logits": self.net(x), "features": x}

    def loss(self, output, y):
        return super().loss(output["logits"], y)


class ObjectOutput(Base):
    """As Hugging Face models return it."""

    def forward(self, x):
        return SimpleNamespace(logits=self.net(x), hidden_states=None)

    def loss(self, output, y):
        return super().loss(output.logits, y)


WithAux = namedtuple("WithAux", ["logits", "aux_logits2", "aux_logits1"])


class AuxOutput(Base):
    """As torchvision's GoogLeNet does: other heads while training, a plain tensor in evaluation."""

    def __init__(self):
        super().__init__()
        self.aux = nn.Linear(4, 2)

    def forward(self, x):
        return WithAux(self.net(x), None, self.aux(x)) if self.training else self.net(x)

    def loss(self, output, y):
        return super().loss(output.logits, y) + 0.3 * super().loss(output.aux_logits1, y)


class ForDicts(Base):
    def unpack(self, batch):
        return batch["x"], batch["y"], batch["index"]


@dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor
    index: torch.Tensor


class ForDataclasses(Base):
    def unpack(self, batch):
        return batch.x, batch.y, batch.index


class WithoutBatchIndex(Base):
    def training_step(self, batch):
        return super().training_step(batch, 0)


class Manual(Base):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class TwoOptimizers(Manual):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return self.net(x) + self.bias

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        loss = Base.training_step(self, batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), 0.1), torch.optim.SGD([self.bias], 0.1)


class WithLBFGS(Base):
    def training_step(self, batch, batch_idx):
        if self.training and len(self.batches) and self.batches[-1] == batch[2].tolist():
            self.batches.pop()  # LBFGS runs a step several times
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class DataLoaderIter(Base):
    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class CompiledInside(Base):
    def __init__(self):
        super().__init__()
        self.net = torch.compile(self.net, backend="eager")


class CompiledInPlace(Base):
    def __init__(self):
        super().__init__()
        self.net.compile(backend="eager")


class Validated(Base):
    def validation_step(self, batch, batch_idx):
        x, y, _ = self.unpack(batch)
        self.log("val_loss", functional.cross_entropy(self(x), y))


class Finetuned(Base):
    def __init__(self):
        super().__init__()
        self.backbone, self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 2)

    def forward(self, x):
        return self.net(self.backbone(x))

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1)


class Two(Base):
    """Trains on two loaders at once; the first is the fair one."""

    def unpack(self, batch):
        fair = batch["fair"] if isinstance(batch, dict) else batch[0]
        return fair[:3]

    def training_step(self, batch, batch_idx):
        other = batch["other"] if isinstance(batch, dict) else batch[1]
        return super().training_step(batch, batch_idx) + 0 * self.net(other[0]).sum()


def as_dict(samples):
    x, y, index = default_collate(samples)
    return {"x": x, "y": y, "index": index}


def as_dataclass(samples):
    return Sample(*default_collate(samples))


class MyLoader(DataLoader):
    """A subclass with an argument that Lightning's re-instantiation does not know."""

    def __init__(self, secret, dataset):
        super().__init__(dataset, batch_size=20, shuffle=True)
        self.secret = secret

    def __iter__(self):
        assert self.secret == 42
        return super().__iter__()


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return loader()

    def val_dataloader(self):
        return DataLoader(Toy(), batch_size=40)


class OwnLoader(Base):
    def train_dataloader(self):
        return loader()


def stateful():
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(Toy(), batch_size=20, shuffle=True)


def other_loader():
    return DataLoader(Toy(seed=1), batch_size=30)
