"""Damage small files of every format and read them: ``python tests/fuzz_readers.py --minutes 10``.

Each case runs in a child process that may take 1 GiB more than it has at the start. Anything but
one of our errors is reported, and so are cases of over 5 seconds and over 1 GiB. A case follows
from its reader, the seed and its number; ``--only READER --first NUMBER --cases 1`` repeats it.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

SECONDS = 5.0
MORE_BYTES = 1 << 30
TOKENS = (
    *(b"nan", b"inf", b"-1", b"1e999", b"0", b"9" * 25, b"9" * 5000, b"-9223372036854775809"),
    *("²".encode(), b"\xff\xfe", b"\0", b"\n", b"\r", b'"', b"'", b",", b";", b"\t", b" ", b"|"),
    *(b"../", b"/dev/zero", b"{", b"[" * 3000, b"}", b":", b"&a", b"*a", b"\\ud800", b"true"),
)


@dataclass(frozen=True)
class Reader:
    """What is read, and how.

    Args:
        write: Puts valid files into a folder.
        read: Reads the folder; every error but ours is a finding.
        targets: Patterns of the files to damage.
        repair: Makes checksums right again, so that damage reaches what is behind them.
    """

    write: Callable[[Path], Any]
    read: Callable[[Path], Any]
    targets: tuple[str, ...]
    repair: Callable[[bytes], bytes] | None = None


# Reading everything that a dataset gives.


def read_images(place: str, folder: Path, **options: Any) -> None:
    from qmargin.data.open import open_images

    dataset = open_images(folder / place, **options)
    for row in range(min(len(dataset), 50)):
        dataset.sample_id(row)
        dataset.source(row)
        dataset.class_name(int(dataset.labels[row]))
        caught(dataset.__getitem__, row)


def read_recordings(place: str, folder: Path, **options: Any) -> None:
    from qmargin.data.open import open_dataset

    collection = open_dataset(folder / place, **options)
    for row in range(min(len(collection), 50)):
        collection.sample_id(row)
        collection.source(row)
        caught(collection.__getitem__, row)


def caught(function: Callable[..., Any], *arguments: Any) -> None:
    from qmargin.errors import CorruptSample

    try:
        function(*arguments)
    except CorruptSample:
        return


def each(function: Callable[[Path], Any], pattern: str, folder: Path) -> None:
    """Read every file of a pattern."""
    from qmargin.errors import QMarginError

    errors = []
    for path in sorted(folder.glob(pattern)):
        try:
            function(path)
        except QMarginError as error:
            errors.append(error)
    if errors:
        raise errors[0]


# Checksums that would hide what is behind them.


def repaired_tar(content: bytes) -> bytes:
    result = bytearray(content)
    for at in range(0, len(result) - 511, 512):
        if result[at + 257 : at + 262] == b"ustar":
            total = sum(result[at : at + 148]) + 8 * 32 + sum(result[at + 156 : at + 512])
            result[at + 148 : at + 156] = b"%06o\0 " % total
    return bytes(result)


def repaired_zip(content: bytes) -> bytes:
    """The members of the original cannot be read any more; damage them and pack them again."""
    generator = np.random.default_rng(zlib.crc32(content))
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(ORIGINALS["zip"])) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            new.writestr(name, damaged(old.read(name), generator))
    return buffer.getvalue()


def repaired_index(content: bytes) -> bytes:
    from qmargin.data.index import header_checksum

    length = int.from_bytes(content[:8], "little")
    try:
        header = json.loads(content[8 : 8 + length])
        about = header["__metadata__"]
        details = json.loads(about["details"])
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                part = content[8 + length + begin : 8 + length + end]
                details["crc32"][name] = zlib.crc32(part)
        about["details"] = json.dumps(details)
        about["crc32"] = header_checksum(about)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


ORIGINALS: dict[str, bytes] = {}


# Files.


def images(count: int = 6) -> tuple[list[bytes], list[int]]:
    from helpers.pictures import jpeg

    return [jpeg(seed) for seed in range(count)], [number // 2 for number in range(count)]


def write_recordio(folder: Path) -> None:
    from helpers.pictures import write_records

    write_records(folder / "a.rec", *images())
    (folder / "property").write_text("3,112,112")


def write_split_recordio(folder: Path) -> None:
    from qmargin.data.readers.recordio import MAGIC_BYTES, RecordWriter, pack_payload

    with RecordWriter(folder / "a.rec") as writer:
        for key in range(4):
            writer.write(key, pack_payload([float(key), 1.0], b"abcd" + MAGIC_BYTES + b"efgh"))


def write_image_tars(folder: Path) -> None:
    from helpers.pictures import write_tar

    pictures, labels = images()
    kinds = {"cls": "{}", "id": "name {}", "json": '{{"label": {}}}'}
    for kind, text in kinds.items():
        members = []
        for number, (image, label) in enumerate(zip(pictures, labels, strict=True)):
            name = f"{'deep/' * 25 if kind == 'json' else ''}{number:03d}"
            members += [(f"{name}.jpg", image), (f"{name}.{kind}", text.format(label).encode())]
        write_tar(folder / f"{kind}.tar", members)


def write_image_folder(folder: Path) -> None:
    from helpers.pictures import write_folder

    write_folder(folder / "faces", *images())


def write_image_manifest(folder: Path) -> None:
    from helpers.pictures import write_manifest

    write_manifest(folder, *images())
    text = (folder / "list.csv").read_text()
    rows = text.replace(",", "\t").replace("label", "identity")
    (folder / "list.tsv").write_text(rows)


def write_index(folder: Path) -> None:
    from helpers.pictures import write_records
    from qmargin.data.open import open_index

    write_records(folder / "a.rec", *images())
    open_index(folder / "a.rec")


def read_index_alone(folder: Path) -> None:
    from qmargin.data.open import open_index
    from qmargin.data.stored import ImageDataset

    dataset = ImageDataset(open_index(folder / "a.rec.qmindex", keep_changed=True))
    for row in range(min(len(dataset), 50)):
        caught(dataset.__getitem__, row)


def write_pictures(folder: Path) -> None:
    from PIL import Image

    from helpers.pictures import picture

    image = Image.fromarray(picture(1, 32))
    for kind in ("jpg", "png", "webp", "bmp", "ppm"):
        image.save(folder / f"a.{kind}")
    image.convert("P").save(folder / "b.png")
    image.convert("CMYK").save(folder / "b.jpg", progressive=True)


def write_bins(folder: Path) -> None:
    pictures, _ = images()
    same = [True, False, True]
    arrays = [np.frombuffer(image, np.uint8) for image in pictures]
    for protocol in (0, 2, 4, 5):
        content = pickle.dumps((arrays if protocol > 2 else pictures, same), protocol=protocol)
        (folder / f"{protocol}.bin").write_bytes(content)
    (folder / "a.bin").write_bytes(pickle.dumps((arrays, np.array(same)), protocol=2))


def write_converted(folder: Path) -> None:
    from qmargin.data.readers.verification_bin import convert_bin

    write_bins(folder)
    convert_bin(folder / "2.bin", folder / "a.npz")
    keep_zip(folder / "a.npz")


def keep_zip(path: Path) -> None:
    ORIGINALS["zip"] = path.read_bytes()


def write_audio(folder: Path) -> None:
    import soundfile

    from helpers.recordings import encoded, tone

    for suffix in ("wav", "flac", "ogg", "opus", "mp3"):
        (folder / f"a.{suffix}").write_bytes(encoded(tone(0.3), suffix))
    stereo = np.stack([tone(0.2, rate=44100)] * 2, axis=1)
    soundfile.write(folder / "b.aiff", stereo, 44100)
    soundfile.write(folder / "b.wav", stereo, 44100, subtype="FLOAT")
    soundfile.write(folder / "c.wav", tone(0.2, rate=8000), 8000, subtype="ULAW")


def recordings(folder: Path) -> list[str]:
    from helpers.recordings import encoded, tone

    for number in range(4):
        (folder / f"{number}.wav").write_bytes(encoded(tone(0.1, hertz=200.0 + number)))
    return [f"{number}.wav" for number in range(4)]


def write_kaldi(folder: Path) -> None:
    names = recordings(folder)
    (folder / "wav.scp").write_text("".join(f"u{i} {name}\n" for i, name in enumerate(names)))
    (folder / "utt2spk").write_text("".join(f"u{i} s{i // 2}\n" for i in range(4)))


def write_json_lines(folder: Path) -> None:
    rows = [
        json.dumps({"key": name, "wav": name, "spk": f"s{number // 2}"})
        for number, name in enumerate(recordings(folder))
    ]
    (folder / "list.json").write_text("\n".join(rows) + "\n")


def write_audio_csv(folder: Path) -> None:
    rows = [f'{name},"s{number // 2}",train' for number, name in enumerate(recordings(folder))]
    (folder / "list.csv").write_text("\n".join(["path,speaker,split", *rows]) + "\n")


def write_audio_tars(folder: Path) -> None:
    from helpers.pictures import write_tar

    members = []
    for number, name in enumerate(recordings(folder)):
        members += [(name, (folder / name).read_bytes()), (f"{number}.spk", b"s%d" % (number // 2))]
    write_tar(folder / "a.tar", members)
    (folder / "tars.txt").write_text("a.tar\n")


def write_audio_index(folder: Path) -> None:
    from qmargin.data.open import open_dataset

    write_kaldi(folder)
    open_dataset(folder, index=folder / "a.qmindex", verify=True)


def write_unfinished_index(folder: Path) -> None:
    from unittest import mock

    from qmargin.data.open import open_dataset

    write_kaldi(folder)
    with mock.patch("qmargin.data.build.Path.unlink"):
        open_dataset(folder, verify=True)
    (folder / "wav.scp.qmindex").unlink()


def write_scores(folder: Path) -> None:
    names = [f"id{i}/ü{i}.wav" for i in range(8)]
    rows = [(name, f"{name}x", i / 8, i % 2) for i, name in enumerate(names)]
    plain = "".join(" ".join(map(str, row)) + "\n" for row in rows)
    (folder / "a.txt").write_text(plain)
    (folder / "b.txt").write_text("".join(f"{a} {b} {label} {s}\n" for a, b, s, label in rows))
    for suffix, sign in (("csv", ","), ("tsv", "\t")):
        text = sign.join(("enrol", "test", "score", "label", "enrol_subject", "test_subject"))
        for a, b, score, label in rows:
            text += "\n" + sign.join((f'"{a}"', b, str(score), str(label), a[:3], "x"))
        (folder / f"a.{suffix}").write_text(text)


def write_npz_scores(folder: Path) -> None:
    names = np.array([f"id{i}" for i in range(8)])
    np.savez_compressed(
        folder / "a.npz",
        scores=np.arange(8) / 8,
        labels=np.arange(8) % 2,
        enrol=names,
        test=np.char.add("other-", names),
    )
    keep_zip(folder / "a.npz")


def write_trials(folder: Path) -> None:
    rows = [(f"id{i}/a.wav", f"id{i % 3}/b.wav", i % 2) for i in range(8)]
    (folder / "kaldi.txt").write_text(
        "".join(f"{a} {b} {'target' if label else 'nontarget'}\n" for a, b, label in rows)
    )
    (folder / "vox.txt").write_text("".join(f"{label} {a} {b}\n" for a, b, label in rows))
    text = "enrol,test,label\n" + "".join(f"{a},{b},{label}\n" for a, b, label in rows)
    (folder / "a.csv").write_text(text)


def write_embeddings(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    names = [f"id{i}/ü.wav" for i in range(8)]
    matrix = np.arange(1.0, 17.0, dtype=np.float32).reshape(8, 2)
    ark = b"".join(
        name.encode() + b" \0BFV \x04\x02\0\0\0" + row.tobytes()
        for name, row in zip(names, matrix, strict=True)
    )
    (folder / "a.ark").write_bytes(ark)
    (folder / "text.ark").write_bytes(b"a  [ 1 2 ]\nb  [\n 3 4 ]\n")
    (folder / "a.scp").write_bytes(b"a a.ark:11\nb a.ark:11\n")
    save_file(
        {"embeddings": torch.ones(8, 2)}, folder / "a.safetensors", {"keys": json.dumps(names)}
    )
    save_file({name: torch.ones(4) for name in names}, folder / "b.safetensors")


def write_npz_embeddings(folder: Path) -> None:
    names = np.array([f"id{i}/ü.wav" for i in range(8)])
    np.savez(folder / "a.npz", keys=names, embeddings=np.ones((8, 3), np.float32))
    keep_zip(folder / "a.npz")


def write_mapping(folder: Path) -> None:
    (folder / "groups.csv").write_text('subject,group\nida,"x"\nbob,y\n')
    (folder / "utt2spk").write_text("u1 s1\nu2 s1\nu3 s2\n")


def write_pairs(folder: Path) -> None:
    (folder / "pairs.txt").write_text(
        "2\t1\nAda\t1\t2\nAda\t1\tBob\t2\nBob\t1\t2\nBob\t1\tAda\t3\n"
    )
    (folder / "pairs.csv").write_text("a,b,label,fold\nx.jpg,y.jpg,1,0\nx.jpg,z.jpg,0,1\n")


def write_ijb(folder: Path) -> None:
    from helpers.faces import write_release

    write_release(folder / "IJBC")


def read_ijb_release(folder: Path) -> None:
    from qmargin.evaluation.protocols.ijb import read_ijb

    release = read_ijb(folder / "IJBC")
    release.pairs()
    release.galleries()
    release.probes()
    found = release.images()
    for row in range(4):
        caught(found.__getitem__, row)


def write_durations(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    (folder / "a.txt").write_text("u1 1.5\nu2 0.25\n")
    save_file({"seconds": torch.ones(2)}, folder / "a.safetensors", {"keys": '["u1", "u2"]'})


def write_thresholds(folder: Path) -> None:
    from qmargin.evaluation.export import thresholds_of
    from qmargin.evaluation.export import write_thresholds as write

    hashes = {"weights_sha256": "0" * 64, "result_sha256": "1" * 64}
    found = thresholds_of(small_result(), **hashes, is_trusted=True)
    write(folder / "thresholds.json", found)


def small_result() -> Any:
    from helpers.results import synthetic_result

    return synthetic_result(num_genuine=50, num_impostors=200, num_replicates=3, groups=("a", "b"))


def write_result(folder: Path) -> None:
    from qmargin.evaluation.result import write_result as write

    write(folder / "result.json", small_result())


def write_recipe(folder: Path) -> None:
    from qmargin.recipes import get_recipe
    from qmargin.training.recipe_files import to_yaml

    (folder / "a.yaml").write_text(to_yaml(get_recipe("debug")))
    (folder / "b.yaml").write_text(to_yaml(get_recipe("faces_r18_q_margin")))


def write_checkpoint(folder: Path) -> None:
    from helpers.saving import random_state
    from qmargin.training.checkpoint import save_checkpoint

    save_checkpoint(folder, random_state(3))


def read_checkpoint(folder: Path) -> None:
    from qmargin.training.checkpoint import load_checkpoint, newest, open_checkpoint

    newest(folder)
    load_checkpoint(open_checkpoint(folder / "step-000003", check=False))


def write_model(folder: Path) -> None:
    from helpers.model_directories import make_model

    make_model(folder / "model")


def read_model(folder: Path) -> None:
    from qmargin.evaluation.model import load_model

    load_model(folder / "model")


def write_weights(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    weights = {"module.a.weight": torch.ones(3, 4), "module.a.bias": torch.ones(3)}
    torch.save({"state_dict": weights, "epoch": 3}, folder / "a.pt")
    torch.save(weights, folder / "old.pth", _use_new_zipfile_serialization=False)
    save_file(weights, folder / "a.safetensors")


def write_pictures_npz(folder: Path) -> None:
    labels = np.repeat(np.arange(4), 3)
    pixels = np.random.default_rng(0).integers(0, 256, (12, 32, 32), dtype=np.uint8)
    np.savez(folder / "a.npz", label=labels, images=pixels)
    keep_zip(folder / "a.npz")


def read_pictures_npz(folder: Path) -> None:
    from qmargin.experiments.pictures import read_pictures

    read_pictures(folder / "a.npz")


def read_picture(path: Path) -> None:
    from qmargin.data.images import decode_image

    content = path.read_bytes()
    caught(partial(decode_image, content, upright=True))
    caught(partial(decode_image, content, mirror=True))


def read_recording(path: Path) -> None:
    from qmargin.data.audio import decode_audio

    caught(decode_audio, path)
    caught(decode_audio, path.read_bytes())


def lazily(module: str, name: str, **options: Any) -> Callable[[Path], Any]:
    """A function that is imported when it is called."""

    def call(path: Path) -> Any:
        from importlib import import_module

        return getattr(import_module(module), name)(path, **options)

    return call


EVALUATION = "qmargin.evaluation"
READERS = {
    "recordio": Reader(
        write_recordio, partial(read_images, "a.rec"), ("a.rec", "a.idx", "property")
    ),
    "split recordio": Reader(
        write_split_recordio, partial(read_images, "a.rec", verify=True), ("a.*",)
    ),
    "image tar": Reader(
        write_image_tars,
        lambda folder: each(
            lambda path: read_images(path.name, folder, verify=True), "*.tar", folder
        ),
        ("*.tar",),
        repaired_tar,
    ),
    "image folder": Reader(write_image_folder, partial(read_images, "faces"), ("faces/*/*",)),
    "manifest": Reader(write_image_manifest, partial(read_images, "list.csv"), ("list.csv",)),
    "tsv manifest": Reader(write_image_manifest, partial(read_images, "list.tsv"), ("list.tsv",)),
    "index": Reader(write_index, read_index_alone, ("*.qmindex",), repaired_index),
    "pictures": Reader(write_pictures, partial(each, read_picture, "*.*"), ("*.*",)),
    "verification set": Reader(
        write_bins, partial(each, lazily("qmargin.data", "read_bin"), "*.bin"), ("*.bin",)
    ),
    "converted set": Reader(
        write_converted,
        partial(each, lazily("qmargin.data", "read_bin"), "*.npz"),
        ("a.npz",),
        repaired_zip,
    ),
    "audio": Reader(write_audio, partial(each, read_recording, "*.*"), ("*.*",)),
    "kaldi": Reader(write_kaldi, partial(read_recordings, "."), ("wav.scp", "utt2spk", "0.wav")),
    "json lines": Reader(write_json_lines, partial(read_recordings, "list.json"), ("list.json",)),
    "audio csv": Reader(write_audio_csv, partial(read_recordings, "list.csv"), ("list.csv",)),
    "audio tar": Reader(
        write_audio_tars, partial(read_recordings, "a.tar"), ("a.tar",), repaired_tar
    ),
    "list of tars": Reader(write_audio_tars, partial(read_recordings, "tars.txt"), ("tars.txt",)),
    "audio index": Reader(
        write_audio_index,
        lambda folder: (
            lazily("qmargin.data.index", "indexed_seconds")(folder / "a.qmindex"),
            read_recordings(".", folder, index=folder / "a.qmindex", verify=True),
        ),
        ("a.qmindex",),
        repaired_index,
    ),
    "audio index, unfinished": Reader(
        write_unfinished_index,
        partial(read_recordings, ".", verify=True),
        ("wav.scp.qmindex.part",),
    ),
    "scores": Reader(
        write_scores, partial(each, lazily(f"{EVALUATION}.scores", "read_scores"), "*"), ("*",)
    ),
    "npz scores": Reader(
        write_npz_scores,
        partial(each, lazily(f"{EVALUATION}.scores", "read_scores"), "*.npz"),
        ("*.npz",),
        repaired_zip,
    ),
    "trials": Reader(
        write_trials, partial(each, lazily(f"{EVALUATION}.trials", "read_trials"), "*"), ("*",)
    ),
    "embeddings": Reader(
        write_embeddings,
        partial(each, lazily(f"{EVALUATION}.embeddings", "read_embeddings"), "*"),
        ("*",),
    ),
    "mapped embeddings": Reader(
        write_embeddings,
        partial(each, lazily(f"{EVALUATION}.embeddings", "map_embeddings"), "*.safetensors"),
        ("*.safetensors",),
    ),
    "npz embeddings": Reader(
        write_npz_embeddings,
        partial(each, lazily(f"{EVALUATION}.embeddings", "read_embeddings"), "*.npz"),
        ("*.npz",),
        repaired_zip,
    ),
    "groups": Reader(
        write_mapping,
        partial(each, lazily(f"{EVALUATION}.columns", "read_mapping", role="groups"), "*"),
        ("*",),
    ),
    "pairs": Reader(
        write_pairs,
        partial(each, lazily(f"{EVALUATION}.protocols.face_sets", "read_pair_trials"), "*"),
        ("*",),
    ),
    "ijb": Reader(write_ijb, read_ijb_release, ("IJBC/meta/*", "IJBC/loose_crop/0.png")),
    "durations": Reader(
        write_durations,
        partial(each, lazily(f"{EVALUATION}.embeddings", "read_seconds"), "*"),
        ("*",),
    ),
    "thresholds": Reader(
        write_thresholds,
        partial(each, lazily(f"{EVALUATION}.export", "read_thresholds"), "*"),
        ("*",),
    ),
    "result": Reader(
        write_result, partial(each, lazily(f"{EVALUATION}.result", "read_result"), "*"), ("*",)
    ),
    "recipe": Reader(
        write_recipe,
        partial(each, lazily("qmargin.training.recipe_files", "read_recipe"), "*"),
        ("*",),
    ),
    "checkpoint": Reader(write_checkpoint, read_checkpoint, ("step-000003/*",)),
    "model": Reader(write_model, read_model, ("model/*",)),
    "weights": Reader(
        write_weights, partial(each, lazily("qmargin.models.weights", "read_weights"), "*"), ("*",)
    ),
    "pictures npz": Reader(write_pictures_npz, read_pictures_npz, ("a.npz",), repaired_zip),
}


# Damage.


def damaged(content: bytes, generator: np.random.Generator) -> bytes:
    """The bytes with one to four changes of different kinds."""
    result = bytearray(content)
    for _ in range(int(generator.integers(1, 5))):
        place = int(generator.integers(len(result) + 1))
        length = int(generator.integers(1, 40))
        match int(generator.integers(10)):
            case 0 if place < len(result):
                result[place] ^= 1 << int(generator.integers(8))
            case 1:
                result[place : place + length] = generator.bytes(length)
            case 2:
                del result[place : place + length]
            case 3:
                result[place:place] = result[max(0, place - length) : place] * 3
            case 4 if generator.random() < 0.3:
                del result[place:]
            case 5 | 6:
                width = int(generator.choice([1, 2, 4, 8]))
                values = [0, 1, (1 << 8 * width) - 1, (1 << (8 * width - 1)) - 1]
                value = values[int(generator.integers(len(values)))]
                order = ("little", "big")[int(generator.integers(2))]
                result[place : place + width] = value.to_bytes(width, order)
            case 7 | 8:
                token = TOKENS[int(generator.integers(len(TOKENS)))]
                end = place + (len(token) if generator.random() < 0.5 else 0)
                result[place:end] = token
            case _:
                lines = bytes(result).split(b"\n")
                first, second = (int(generator.integers(len(lines))) for _ in range(2))
                lines[first] = lines[second]
                result = bytearray(b"\n".join(lines))
    return bytes(result)


def damage_(folder: Path, reader: Reader, generator: np.random.Generator) -> Path:
    """Change one of the files in a folder."""
    paths = sorted(path for pattern in reader.targets for path in folder.glob(pattern))
    path = paths[int(generator.integers(len(paths)))]
    content = damaged(path.read_bytes(), generator)
    if reader.repair is not None and generator.random() < 0.5:
        content = reader.repair(content)
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))  # an index need not wait for the clock
    return path


# Cases, in a child process.


class Slow(BaseException):
    """A case took too long."""


def _stop(signal_number: int, frame: Any) -> None:
    raise Slow


def run_case(name: str, seed: int, number: int, original: Path, place: Path) -> str | None:
    """What is wrong with one case; None where nothing is."""
    from qmargin.errors import QMarginError

    reader = READERS[name]
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(original, place)
    generator = np.random.default_rng([seed, zlib.crc32(name.encode()), number])
    file = damage_(place, reader, generator)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        reader.read(place)
        return None
    except Slow:
        return f"{file.name}: over {SECONDS:g} s\n{traceback.format_exc()}"
    except QMarginError as error:
        is_memory = isinstance(error.__context__, MemoryError)
        return f"{file.name}: out of memory\n{traceback.format_exc()}" if is_memory else None
    except BaseException:  # that is what is looked for
        return f"{file.name}: {traceback.format_exc()}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def work(name: str, options: argparse.Namespace, seconds: float, results: Any) -> None:
    """Run cases of one reader for some seconds, and send what is wrong."""
    from helpers.limits import limit_memory

    signal.signal(signal.SIGALRM, _stop)
    warnings.simplefilter("ignore")
    logging.disable()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # decoders complain there
    with tempfile.TemporaryDirectory() as folder:
        original, place = Path(folder, "original"), Path(folder, "case")
        original.mkdir()
        READERS[name].write(original)
        shutil.copytree(original, place)
        READERS[name].read(place)  # imports and buffers before memory is limited
        limit_memory(MORE_BYTES)
        before, number, until = peak_bytes(), options.first, time.monotonic() + seconds
        last = sys.maxsize if options.cases is None else options.first + options.cases
        while time.monotonic() < until and number < last:
            results.send(("case", number, None))
            problem = run_case(name, options.seed, number, original, place)
            if problem is None and peak_bytes() - before > MORE_BYTES:
                problem, before = f"over {MORE_BYTES:,} bytes of memory", peak_bytes()
            if problem is not None:
                results.send(("problem", number, problem))
            number += 1
    results.send(("done", number, None))


def fuzz(name: str, options: argparse.Namespace, seconds: float) -> tuple[int, list[str]]:
    """Cases of one reader, and what was wrong; a child that hangs or dies is a finding."""
    context = multiprocessing.get_context("fork")
    results, sent = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(name, options, seconds, sent))
    process.start()
    sent.close()
    count, number, problems, is_done = 0, options.first, [], False
    try:
        while results.poll(60.0 if count == 0 else 2 * SECONDS):
            kind, number, text = results.recv()
            count += kind == "case"
            is_done |= kind == "done"
            if kind == "problem":
                problems.append(f"{name}, case {number}: {text}")
    except EOFError:
        pass
    process.kill()
    process.join()
    if not is_done:
        problems.append(f"{name}, case {number}: the process hung or died")
    return count, problems


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of all readers together (10)")
    parser.add_argument("--seed", type=int, default=0, help="of the damage (0)")
    parser.add_argument("--only", choices=READERS, action="append", help="readers (all of them)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case (0)")
    parser.add_argument("--cases", type=int, help="most cases of each reader (no limit)")
    return parser.parse_args(arguments)


def prepare() -> None:
    """Import what takes long, once, before processes are forked."""
    import torch

    import qmargin.data.open
    import qmargin.evaluation.model
    import qmargin.experiments.pictures
    import qmargin.training.checkpoint  # noqa: F401

    torch.set_num_threads(1)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Fuzz for some minutes; the exit status is 1 when something was found."""
    options = parsed(arguments)
    prepare()
    names = options.only or list(READERS)
    share = 60.0 * options.minutes / len(names)
    total, kinds, problems = 0, Counter[str](), []
    for name in names:
        count, found = fuzz(name, options, share)
        total += count
        say(f"{name}: {count:,} cases, {len(found)} findings")
        for problem in found:
            kinds[problem.strip().splitlines()[-1]] += 1
            if kinds[problem.strip().splitlines()[-1]] == 1:
                problems.append(problem)
                say(problem[:3000])
    say(f"{total:,} cases of {len(names)} readers, {len(problems)} kinds of findings")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
