"""Which of the model's classes a label is: one answer for losses, counts and everybody else."""

import pytest
import torch

from fairbatch_lightning.cells.classes import ClassNumbers, classes_of_numbers, is_binary, num_classes, predicted


@pytest.mark.parametrize(
    ("labels", "number", "classes"),
    [
        ([0, 1], 2, [0, 1]),
        ([0, 2], 3, [0, 2]),  # class 1 does not occur in the training set
        ([1], 2, [1]),
        ([1, 2], 2, [0, 1]),
        ([-1, 1], 2, [0, 1]),
        (["no", "yes"], 2, None),  # whoever numbered them, the alphabet did not
        ([False, True], 2, [0, 1]),
        ([10, 20, 30], 3, [0, 1, 2]),
    ],
)
def test_a_label_is_its_own_number_or_its_rank(labels, number, classes):
    assert classes_of_numbers(labels, number) == classes


@pytest.mark.parametrize(
    ("labels", "number"), [(["cat", "dog"], 2), (["cat", "dog"], 3), ([-1, 1], 3), ([1, 5], 4), ([10], 2)]
)
def test_what_classes_labels_are_is_not_guessed(labels, number):
    """Which of the outputs is "dog" cannot be known; a guess would train against another class."""
    with pytest.raises(ValueError, match=f"tells {number} classes apart, but the data has the labels") as error:
        ClassNumbers().find(labels, number)
    assert str(labels) in str(error.value)
    assert f"Give the labels as numbers of classes, from 0 to {number - 1}: labels=..." in str(error.value)


def test_more_labels_than_outputs_are_refused():
    with pytest.raises(ValueError, match=r"each of the 3 labels \[0, 1, 2\] but its logits have 2. Give"):
        ClassNumbers().find([0, 1, 2], 2)


@pytest.mark.parametrize(
    ("shape", "binary", "number"), [((5,), True, 2), ((5, 1), True, 2), ((5, 2), False, 2), ((5, 7), False, 7)]
)
def test_classes_of_logits(shape, binary, number):
    assert is_binary(torch.zeros(shape)) == binary
    assert num_classes(torch.zeros(shape)) == number


@pytest.mark.parametrize("shape", [(), (2, 2, 4, 4), (2, 3, 4)])
def test_more_than_one_prediction_per_sample_is_refused(shape):
    with pytest.raises(ValueError, match=r"one prediction per sample, .* but got \(.*logits=\.\.\., or return"):
        num_classes(torch.zeros(shape))


def test_predictions():
    assert predicted(torch.tensor([-1.0, 0.0, 2.0])).tolist() == [0, 0, 1]
    assert predicted(torch.tensor([[0.3], [0.7]]), threshold=0.5).tolist() == [0, 1]
    assert predicted(torch.tensor([[0.1, 0.2, 0.0], [3.0, 1.0, 2.0]]), threshold=0.5).tolist() == [1, 0]


class TestClassNumbers:
    def test_a_part_of_the_labels_means_what_it_meant_before(self):
        """Without the first, [20] alone could be any class."""
        classes = ClassNumbers()
        assert classes.find([10, 20], 2) == {10: 0, 20: 1}
        assert classes.find([20], 2)[20] == 1

    def test_what_is_learnt_comes_before_what_numbers_say(self):
        classes = ClassNumbers()
        classes.learn({"unhired": 0, "hired": 1})
        assert classes.find(["hired", "unhired"], 2) == {"hired": 1, "unhired": 0}
        classes = ClassNumbers()
        classes.learn({1: 0, 2: 1})
        assert classes.find([1, 2], 3) == {1: 0, 2: 1}

    def test_what_is_learnt_must_not_change(self):
        classes = ClassNumbers()
        classes.learn({"hired": 1})
        with pytest.raises(ValueError, match="'hired' of the data is class 1 in some batches and class 0 in others"):
            classes.learn({"hired": 0})

    def test_labels_that_no_batch_held_so_far_are_counted_like_the_others(self):
        classes = ClassNumbers()
        classes.learn({1: 0, 2: 1})
        assert classes.find([1, 2, 3], 4) == {1: 0, 2: 1, 3: 2}
        classes = ClassNumbers()
        classes.learn({2: 0, 3: 1})  # then 1 would be class -1
        with pytest.raises(ValueError, match="not known which class each is"):
            classes.find([1, 2, 3], 4)

    def test_models_of_other_sizes_have_their_own(self):
        classes = ClassNumbers()
        assert classes.find([1, 2], 2) == {1: 0, 2: 1}
        assert classes.find([1, 2], 3) == {1: 1, 2: 2}

    def test_a_label_that_would_mean_two_classes_is_refused(self):
        """1 and 2 may be numbers of classes, but beside 3 they can only be ranks."""
        classes = ClassNumbers()
        assert classes.find([1, 2], 3) == {1: 1, 2: 2}
        with pytest.raises(ValueError, match=r"not known which class each is \(elsewhere it has \{1: 1, 2: 2\}\)"):
            classes.find([1, 2, 3], 3)
