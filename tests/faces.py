"""Small generated images with UTKFace's file names: gender shows in their colour, age in their brightness."""

import numpy as np
from PIL import Image


def write_faces(folder, number=60, size=16, seed=0):
    """Write images into a folder; return their names."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for i in range(number):
        age, gender, race = int(random.integers(1, 90)), int(random.integers(2)), int(random.integers(5))
        pixels = random.integers(0, 60, (size, size, 3)) + age
        pixels[:, :, 0] += 100 * gender
        names.append(f"{age}_{gender}_{race}_{20170116000000000 + i}.jpg.chip.jpg")
        Image.fromarray(pixels.astype(np.uint8)).save(folder / names[-1], quality=95)
    return names
