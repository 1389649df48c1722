"""Small pictures, and datasets of them in every layout."""

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from qmargin.data.images import encode_image
from qmargin.data.readers.recordio import RecordWriter, pack_payload

ROOT = Path(__file__).parents[2]


def picture(seed: int, size: int = 16) -> NDArray[np.uint8]:
    """Smooth colours of a seed."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return np.kron(coarse, np.ones((size // 4, size // 4, 1), dtype=np.uint8))


def jpeg(seed: int, size: int = 16) -> bytes:
    return encode_image(picture(seed, size), quality=90)


def write_records(path: Path, images: list[bytes], labels: list[int]) -> Path:
    with RecordWriter(path) as writer:
        for key, (image, label) in enumerate(zip(images, labels, strict=True)):
            writer.write(key, pack_payload(label, image))
    return path


def write_folder(root: Path, images: list[bytes], labels: list[int]) -> Path:
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        path = root / f"person{label}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
    return root


def write_manifest(folder: Path, images: list[bytes], labels: list[int]) -> Path:
    folder.mkdir(exist_ok=True)
    lines = ["path,label"]
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        (folder / f"{number}.jpg").write_bytes(image)
        lines.append(f"{number}.jpg,{label}")
    (folder / "list.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "list.csv"


def write_tar(
    path: Path, members: list[tuple[str, bytes]], format: int = tarfile.GNU_FORMAT
) -> Path:
    """An archive by the standard library."""
    with tarfile.open(path, "w", format=format) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def write_shards(folder: Path, images: list[bytes], labels: list[int], per_shard: int = 3) -> Path:
    folder.mkdir(exist_ok=True)
    for start in range(0, len(images), per_shard):
        members = []
        for number in range(start, min(start + per_shard, len(images))):
            members += [(f"{number:05d}.jpg", images[number])]
            members += [(f"{number:05d}.cls", str(labels[number]).encode())]
        write_tar(folder / f"{start:05d}.tar", members)
    return folder


def shared_data(name: str) -> Path:
    """A folder of real data, or a skipped test."""
    place = Path(os.environ.get("QMARGIN_DATA", ROOT.parent / "shared" / "data")) / name
    if not place.is_dir():
        pytest.skip(f"the data {name} is absent; set QMARGIN_DATA to where it is")
    return place
