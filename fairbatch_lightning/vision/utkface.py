"""The UTKFace data set: faces with age, gender and race in their file names."""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
from PIL import Image
from torch import Tensor
from torchvision.datasets import VisionDataset
from torchvision.transforms import v2
from tqdm.auto import tqdm

from fairbatch_lightning._support.warn import warn
from fairbatch_lightning.vision.images import ImageFile, find_images

Attribute: TypeAlias = Literal["gender", "age", "race"]

GENDERS = ("male", "female")
RACES = ("White", "Black", "Asian", "Indian", "Others")
AGE_CUTS = (21, 41, 61)
"""The paper's classes of age: under 21, 21 to 40, 41 to 60, over 60."""
_NAME = re.compile(r"(\d{1,3})_([01])_([0-4])_")
_WHERE = (
    'UTKFace is at https://susanqq.github.io/UTKFace ("Aligned & cropped faces"), for non-commercial research only; the'
    " copyright of the images is their owners'. Download and unpack it, and give the folder."
)


class UTKFace(VisionDataset):  # type: ignore[misc]  # torchvision has no types
    """Faces from UTKFace, [Zhang, Song, Qi, CVPR 2017](https://susanqq.github.io/UTKFace), as torchvision has others.

    File names such as `26_1_2_20170116184024662.jpg.chip.jpg` hold age, gender and race, so no image is opened to learn
    them. `FairBatch(groups="race")` finds `races`, and so on.

    Attributes:
        targets: The number of each face's class, of the attribute that is to be learnt.
        classes: The names of the classes.
        races: The race of each face, by its name. `genders` and `ages` are alike; `ages` are classes.
        years: The age of each face in years.
        files: The image file of each face.

    Args:
        root: The folder with the images, in sub-folders or not, or a .tar or .zip archive of it.
        target: What is to be learnt: "gender", "age" or "race".
        transform: Called with every image: a PIL image, or with `keep` a tensor `(3, S, S)` of bytes.
        target_transform: Called with every class number.
        age_cuts: The ages at which classes of age begin, but for the first.
        keep: Decode all images at once, scale them to this size, and keep them in memory: 12 kB for each at 64 pixels.
    """

    def __init__(
        self,
        root: str | Path,
        target: Attribute = "gender",
        *,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        age_cuts: Sequence[int] = AGE_CUTS,
        keep: int | None = None,
    ) -> None:
        self.classes = classes_of(target, age_cuts)
        found = find_faces(root)
        super().__init__(str(Path(root).expanduser()), transform=transform, target_transform=target_transform)
        self.files, facts = _known(found)
        age_classes = classes_of("age", age_cuts)
        self.years = [age for age, _, _ in facts]
        self.ages = [age_classes[sum(age >= cut for cut in age_cuts)] for age in self.years]
        self.genders = [GENDERS[gender] for _, gender, _ in facts]
        self.races = [RACES[race] for _, _, race in facts]
        numbers = {name: number for number, name in enumerate(self.classes)}
        self.targets = [numbers[name] for name in self.values_of(target)]
        self._images = None if keep is None else self._decode_all(keep)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image: Any = self.image(index) if self._images is None else self._images[index]
        target: Any = self.targets[index]
        return (
            image if self.transform is None else self.transform(image),
            target if self.target_transform is None else self.target_transform(target),
        )

    def values_of(self, attribute: Attribute) -> list[str]:
        """Return the gender, class of age, or race of each face, by its name."""
        return {"gender": self.genders, "age": self.ages, "race": self.races}[attribute]

    def image(self, index: int) -> Image.Image:
        """Return a face as it is in its file."""
        file = self.files[index]
        try:
            return Image.open(io.BytesIO(file.read())).convert("RGB")
        except (OSError, SyntaxError, ValueError, zlib.error) as error:
            raise RuntimeError(
                f"{file.path} is not an image that can be read: {error}. Replace it by a fresh download, or delete it."
            ) from error

    def extra_repr(self) -> str:
        """Return what the representation has besides the number of samples and the root."""
        return f"Classes: {', '.join(self.classes)}"

    def _decode_all(self, size: int) -> Tensor:
        images, scale = torch.empty(len(self), 3, size, size, dtype=torch.uint8), square(size)

        def decode(index: int) -> None:
            images[index] = scale(self.image(index))

        with ThreadPoolExecutor() as threads:
            list(tqdm(threads.map(decode, range(len(self))), "Decoding images", len(self)))
        return images


def classes_of(attribute: Attribute, age_cuts: Sequence[int] = AGE_CUTS) -> list[str]:
    """Return the names of the classes of an attribute.

    >>> classes_of("age")
    ['<21', '21-40', '41-60', '>60']
    """
    if attribute not in get_args(Attribute):
        raise ValueError(f"Expected an attribute of UTKFace, one of {get_args(Attribute)}, but got {attribute!r}.")
    if attribute == "gender":
        return [*GENDERS]
    if attribute == "race":
        return [*RACES]
    if not age_cuts or any(low >= high for low, high in pairwise((0, *age_cuts))):
        raise ValueError(f"Expected argument `age_cuts` to be growing ages above 0 but got {age_cuts!r}.")
    between = (f"{low}-{high - 1}" for low, high in pairwise(age_cuts))
    return [f"<{age_cuts[0]}", *between, f">{age_cuts[-1] - 1}"]


def find_faces(root: str | Path) -> list[ImageFile]:
    """Return the image files in a folder or an archive, at least one of which is a face of UTKFace by its name."""
    root = Path(root).expanduser()
    if not root.exists():
        raise FileNotFoundError(f"There is no {root.absolute()}. {_WHERE}")
    files = find_images(root)
    if not any(_NAME.match(file.name) for file in files):
        found = f"{len(files)} images but none whose name begins with [age]_[gender]_[race]_" if files else "no images"
        raise FileNotFoundError(f"Found {found} in {root}. {_WHERE}")
    return files


def square(size: int) -> Callable[[Any], Tensor]:
    """Return a transform of images into tensors `(3, size, size)` of bytes; what is not square loses its borders."""
    scale: Callable[[Any], Tensor] = v2.Compose(
        [v2.Resize(size, antialias=True), v2.CenterCrop(size), v2.PILToTensor()]
    )
    return scale


def _known(files: list[ImageFile]) -> tuple[list[ImageFile], list[tuple[int, int, int]]]:
    """Return the files whose names say what is needed, and age, gender and race from them; tell of the others."""
    known: list[ImageFile] = []
    facts, unknown, again = [], [], []
    for file in files:
        if known and _without_chip(file) == _without_chip(known[-1]):  # the whole photograph, or the same in a folder
            again.append(known[-1])
            known[-1] = file
        elif (match := _NAME.match(file.name)) is None:
            unknown.append(file)
        else:
            known.append(file)
            facts.append((int(match[1]), int(match[2]), int(match[3])))
    if unknown:
        warn(
            f"Left out {len(unknown)} of {len(files)} images, whose names do not begin with [age]_[gender]_[race]_:"
            f" {_some(unknown)}."
        )
    if again:
        warn(f"Left out {len(again)} of {len(files)} images that are there twice, in several folders: {_some(again)}.")
    return known, facts


def _without_chip(file: ImageFile) -> str:
    """Return the name of the photograph that a face was cut out of."""
    return file.name.removesuffix(".chip.jpg")


def _some(files: list[ImageFile]) -> str:
    return ", ".join(file.path for file in files[:5]) + (f" and {len(files) - 5} more" if len(files) > 5 else "")
