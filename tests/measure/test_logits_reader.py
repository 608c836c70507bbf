"""Which of several outputs a LogitsReader takes for the logits, and what it says where it takes none."""

from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fairbatch_lightning.measure.logits import ForwardDone, LogitsReader

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A model with a head that can be used by itself; `wrap` is what it makes of its output."""

    def __init__(self, wrap=lambda logits: logits):
        super().__init__()
        self.features, self.head, self.wrap = nn.Linear(4, 3), nn.Linear(3, 2), wrap

    def forward(self, x):
        return self.wrap(self.head(self.features(x)))


def attached(name=None, who="FairBatch", module=None, **settings):
    module, reader = Net() if module is None else module, LogitsReader(who, name, **settings)
    reader.attach(module)
    return module, reader


class TestPrecedence:
    """A named submodule comes first, then what a step returns (if that is wanted), then what the hook has seen."""

    @pytest.mark.parametrize("step", ["training_step", "validation_step", "test_step"])
    @pytest.mark.parametrize("returned_first", [True, False])
    @pytest.mark.parametrize("named", [True, False])
    @pytest.mark.parametrize("called", [True, False])
    @pytest.mark.parametrize("returned", [True, False])
    def test_table(self, step, returned_first, named, called, returned):
        module, reader = attached("head" if named else None)
        own = torch.zeros(5, 2)
        reader.expect(5)
        computed = module(X) if called else None
        output = {"loss": torch.zeros(()), "logits": own} if returned else torch.zeros(())
        found = reader.read(output, 5, step, returned_first=returned_first)
        if returned and (not called or (returned_first and not named)):
            assert found is own
        elif called:
            assert torch.equal(found, computed)
        else:
            assert found is None
        assert not reader.training_step_returns  # whoever reads decides what follows from it

    @pytest.mark.parametrize("output", [None, torch.zeros(5, 2), {"loss": torch.zeros(())}, {"logits": torch.ones(4)}])
    def test_a_step_that_returns_something_else(self, output):
        """A loss alone, even one of the right shape, nothing, or logits of another number of samples."""
        module, reader = attached()
        reader.expect(5)
        computed = module(X)
        assert torch.equal(reader.read(output, 5), computed)
        assert not reader.training_step_returns

    def test_what_was_dropped_is_gone(self):
        module, reader = attached()
        reader.expect(5, stop=True)
        reader.drop()
        module(X)  # the hook does nothing any more
        assert reader.read(None, 5) is None

    @pytest.mark.parametrize("wrap", [lambda out: {"logits": out}, lambda out: SimpleNamespace(logits=out)])
    def test_the_hook_looks_into_what_the_module_gives(self, wrap):
        module, reader = attached(module=Net(wrap))
        reader.expect(5)
        module(X)
        assert torch.equal(reader.read(None, 5), module.head(module.features(X)))

    @pytest.mark.parametrize("wrap", [torch.Tensor.sum, lambda logits: [logits], lambda logits: {"scores": logits}])
    def test_outputs_without_logits_are_passed_over(self, wrap):
        module, reader = attached(module=Net(wrap))
        reader.expect(5)
        module(X)
        assert reader.read(None, 5) is None


class TestOnlyOne:
    def test_refuses_several_and_names_the_step(self):
        module, reader = attached(who="FairnessMonitor", only_one=True)
        reader.expect(5)
        module(X)
        module(X.flip(1))
        expected = r"FairnessMonitor cannot tell which output .* `test_step` .* Return \{\"logits\": logits\} from"
        with pytest.raises(RuntimeError, match=expected):
            reader.read(None, 5, "test_step")

    def test_takes_what_the_step_returns_of_several(self):
        module, reader = attached(only_one=True)
        own = torch.zeros(5, 2)
        reader.expect(5)
        module(X)
        module(X)
        assert reader.read({"logits": own}, 5, "test_step") is own

    def test_several_batches_of_one_each(self):
        module, reader = attached(only_one=True)
        for _ in range(2):
            reader.expect(5)
            assert torch.equal(module(X), reader.read(None, 5))

    def test_outputs_of_other_shapes_and_the_same_one_again_are_no_others(self):
        """A wrapper for several processes hands on, as its own output, what the step inside of it has computed."""
        outputs = iter([logits := torch.zeros(5, 2), torch.zeros(5, 7), torch.zeros(3, 2), logits])
        module, reader = attached(module=Net(lambda _: next(outputs)), only_one=True)
        reader.expect(5)
        for _ in range(4):
            module(X)
        assert torch.equal(reader.read(None, 5), logits)

    def test_otherwise_the_first_is_taken(self):
        module, reader = attached()
        reader.expect(5)
        first = module(X)
        module(X.flip(1))
        assert torch.equal(reader.read(None, 5), first)


class TestMessages:
    @pytest.mark.parametrize("who", ["FairBatch", "GroupDRO"])
    @pytest.mark.parametrize("step", ["training_step", "validation_step"])
    def test_missing_logits_name_the_step_and_the_callback(self, who, step):
        _, reader = attached(who=who)
        for message in (str(reader.missing(5, step)), self.required(reader, step)):
            assert message.startswith(f"{who} found no logits for a batch of 5 samples: `{step}` did not call")
            assert f'{who}(logits="net")' in message
            assert message.endswith(f"from `{step}`.")

    @staticmethod
    def required(reader, step):
        reader.expect(5)
        with pytest.raises(RuntimeError) as caught:
            reader.require(None, 5, step)
        return str(caught.value)

    def test_what_is_there_is_not_missing(self):
        module, reader = attached()
        reader.expect(5)
        assert torch.equal(module(X), reader.require(None, 5))

    def test_submodules_that_there_are_instead(self):
        with pytest.raises(ValueError, match=r"a submodule of Net but got 'body'. It has \['features', 'head'\]"):
            attached("body")


class TestHook:
    def test_is_attached_once_and_can_be_moved(self):
        module, reader = attached()
        reader.attach(module)
        assert len(module._forward_hooks) == 1
        reader.detach()
        reader.detach()
        other = Net()
        reader.attach(other)
        assert (len(module._forward_hooks), len(other._forward_hooks)) == (0, 1)

    def test_nothing_is_watched_before_it_is_attached(self):
        reader = LogitsReader("FairBatch", "later")
        reader.attach(Net(), required=False)
        reader.expect(5)
        assert reader.read(None, 5) is None
        assert not reader.is_compiled

    def test_an_expectation_replaces_an_earlier_one(self):
        module, reader = attached()
        reader.expect(5)
        module(X)
        reader.expect(5)
        again = module(X.flip(1))
        assert torch.equal(reader.read(None, 5), again)

    def test_leaving_the_forward_pass_is_no_error(self):
        """Steps that catch every error must not catch this."""
        module, reader = attached()
        reader.expect(5, stop=True)
        with pytest.raises(ForwardDone), suppress(Exception):
            module(X)
        assert reader.read(None, 5).shape == (5, 2)
        module(X)  # only the step that was expected is left

    @pytest.mark.parametrize("part", ["", "head"])
    def test_knows_whether_it_is_inside_of_what_is_compiled(self, part):
        module, reader = attached(part or None)
        assert not reader.is_compiled
        module.features.compile(backend="eager")
        assert not reader.is_compiled
        module.get_submodule(part).compile(backend="eager")
        assert reader.is_compiled
