"""Logits are read from a module without a trace."""

import pytest
import torch
from torch import nn

from fairbatch_lightning.measure.logits import ForwardDone, LogitsReader


class Net(nn.Module):
    """A model whose own output is not the logits."""

    def __init__(self):
        super().__init__()
        self.features, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x):
        return torch.softmax(self.head(self.features(x)), 1)


def attached(name=None, **settings):
    module, reader = Net(), LogitsReader("FairBatch", name, **settings)
    reader.attach(module)
    return module, reader


class TestReader:
    def test_takes_the_first_output_of_the_expected_rows(self):
        module, reader = attached()
        reader.expect(5)
        module(torch.randn(3, 4))
        first = module(torch.randn(5, 4))
        module(torch.randn(5, 4))
        assert torch.equal(reader.read(None, 5), first)
        assert reader.read(None, 5) is None  # taken

    def test_takes_nothing_that_was_not_expected(self):
        module, reader = attached()
        module(torch.randn(5, 4))
        assert reader.read(None, 5) is None

    def test_logits_have_a_graph_only_if_wanted(self):
        module, reader = attached()
        for wanted in (False, True):
            reader.expect(5, keep_graph=wanted)
            module(torch.randn(5, 4))
            assert reader.read(None, 5).requires_grad == wanted

    def test_what_the_step_returns_comes_first(self):
        module, reader = attached()
        own = torch.zeros(5, 2)
        reader.expect(5)
        module(torch.randn(5, 4))
        assert reader.read({"logits": own}, 5) is own

    def test_a_named_submodule_comes_before_what_the_step_returns(self):
        module, reader = attached("head")
        reader.expect(5)
        x = torch.randn(5, 4)
        module(x)
        torch.testing.assert_close(reader.read({"logits": torch.zeros(5, 2)}, 5), module.head(module.features(x)))
        assert not reader.training_step_returns

    def test_stops_the_forward_pass(self):
        module, reader = attached("features")
        reached = []
        module.head.register_forward_hook(lambda *_: reached.append(True))
        reader.expect(5, stop=True)
        with pytest.raises(ForwardDone):
            module(torch.randn(5, 4))
        assert reader.read(None, 5).shape == (5, 3)
        assert not reached

    def test_several_outputs_are_refused_if_only_one_will_do(self):
        module, reader = attached(only_one=True)
        reader.expect(5)
        module(torch.randn(5, 4))
        module(torch.randn(5, 4))
        with pytest.raises(RuntimeError, match="FairBatch cannot tell which output is the prediction: `test_step`"):
            reader.read(None, 5, "test_step")

    def test_leaves_no_trace(self):
        module, reader = attached("head")
        assert module.head._forward_hooks
        reader.detach()
        assert not module.head._forward_hooks

    def test_a_submodule_may_be_built_later(self):
        module, reader = nn.Module(), LogitsReader("FairBatch", "net")
        reader.attach(module, required=False)
        with pytest.raises(ValueError, match=r"`logits` to name a submodule of Module but got 'net'. It has \[\]"):
            reader.attach(module)
        module.net = nn.Linear(4, 2)
        reader.attach(module)
        reader.expect(5)
        module.net(torch.randn(5, 4))
        assert reader.read(None, 5).shape == (5, 2)

    def test_a_module_is_not_the_name_of_one(self):
        with pytest.raises(ValueError, match="`logits` to be the name of a submodule but got Linear"):
            LogitsReader("FairBatch", nn.Linear(2, 2))

    def test_missing_logits_say_what_to_do(self):
        _, reader = attached()
        reader.expect(5)
        with pytest.raises(RuntimeError, match=r'no logits for a batch of 5 .*FairBatch\(logits="net"\), or return'):
            reader.require(torch.zeros(()), 5)
