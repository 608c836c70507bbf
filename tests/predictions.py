"""Random predictions, and rates of them word by word."""

import torch


def samples(num_labels=2, num_groups=4, num=400, seed=0, missing=()):
    """Random predictions, labels and groups, without the cells (label, group) in `missing`."""
    generator = torch.Generator().manual_seed(seed)
    preds, target, groups = (
        torch.randint(k, (num,), generator=generator) for k in (num_labels, num_labels, num_groups)
    )
    keep = torch.ones(num, dtype=torch.bool)
    for label, group in missing:
        keep &= (target != label) | (groups != group)
    return preds[keep], target[keep], groups[keep]


def rate(of, among):
    """Which part of some samples is of others; masks `(B,)`."""
    return int((of & among).sum()) / int(among.sum()) if among.any() else float("nan")
