"""What a module and its parts give in a step."""

import copy
import pickle
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fairbatch_lightning.measure.outputs import AllOutputs, find_logits, returned_logits, watch_forward

GoogLeNetOutputs = namedtuple("GoogLeNetOutputs", ["logits", "aux_logits2", "aux_logits1"])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda t: t,
        lambda t: {"logits": t, "loss": torch.zeros(())},
        lambda t: GoogLeNetOutputs(t, None, None),
        lambda t: SimpleNamespace(logits=t, hidden_states=None),
    ],
    ids=["tensor", "dict", "GoogLeNet", "Hugging Face"],
)
def test_logits_are_found(wrap):
    tensor = torch.randn(4, 2)
    assert find_logits(wrap(tensor)) is tensor


@pytest.mark.parametrize("output", [None, 3, {"loss": torch.zeros(())}, "logits", (torch.zeros(2),)])
def test_no_logits_are_none(output):
    assert find_logits(output) is None


@pytest.mark.parametrize(
    "output",
    [torch.zeros(4, 2), None, {"loss": torch.zeros(())}, {"logits": torch.zeros(())}, {"logits": torch.ones(3)}],
)
def test_a_step_that_returns_a_loss_or_other_rows_returns_no_logits(output):
    assert returned_logits(output, batch_size=4) is None


def test_a_step_that_returns_logits():
    tensor = torch.zeros(4, 2)
    assert returned_logits({"loss": torch.zeros(()), "logits": tensor}, batch_size=4) is tensor


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.features(x))


def test_outputs_are_noted_in_order_and_numbered():
    net, x = Net(), torch.randn(5, 4)
    noted = AllOutputs()
    with noted.of(net):
        first, direct = net(x), net.forward(x)
        net(torch.randn(3, 4))
    found = noted.of_size(5)
    assert [(one.name, one.direct, one.number) for one in found] == [
        ("features", False, 0),
        ("head", False, 0),
        ("", False, 0),
        ("features", False, 1),
        ("head", False, 1),
        ("", True, 0),
    ]
    assert found[2].logits is first
    assert found[-1].logits is direct
    assert noted.described(2) == "a tensor (5, 2) of `self(x)`; a tensor (5, 2) of `self.forward(x)`"
    net(x)
    assert len(noted.of_size(5)) == 6
    assert vars(net).keys() == vars(Net()).keys()
    assert not any(part._forward_hooks for part in net.modules())


def test_large_activations_of_parts_are_not_kept():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 8, 3)

        def forward(self, x):
            return self.conv(x).mean((2, 3))

    net = Deep()
    noted = AllOutputs()
    with noted.of(net):
        net(torch.randn(5, 1, 9, 9))
    assert [one.name for one in noted.of_size(5)] == [""]
    assert "a tensor (5, 8, 7, 7) of `conv`" in noted.described()


def test_a_watched_forward_can_be_copied_and_undone():
    net, seen = Net(), []
    undo = watch_forward(net, seen.append)
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.head.bias.add_(1)
    x = torch.randn(5, 4)
    assert not torch.equal(net(x), other(x))  # each computes with its own weights
    assert torch.equal(pickle.loads(pickle.dumps(net))(x), net(x))
    assert len(seen) == 2  # copies are not watched
    undo()
    net(x)
    assert len(seen) == 2
    assert "forward" not in vars(net)


def test_a_forward_that_was_replaced_before_is_kept():
    net = Net()
    net.forward = own = lambda x: x * 2
    seen = []
    undo = watch_forward(net, seen.append)
    assert torch.equal(net(torch.ones(2)), torch.full((2,), 2.0))
    assert len(seen) == 1
    undo()
    assert net.forward is own
