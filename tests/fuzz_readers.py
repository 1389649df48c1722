"""Damage small files of every format and read them: ``python tests/fuzz_readers.py --minutes 10``.

Each case runs in a child process that may take 1 GiB more than it has at the start. Anything but
one of our errors is reported, and so are cases of over 5 seconds and over 1 GiB. A case follows
from its reader, the seed and its number; ``--only READER --first NUMBER --cases 1`` repeats it.
"""

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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import soundfile
import torch
from PIL import Image
from safetensors.torch import save_file

from helpers.faces import write_release
from helpers.limits import limit_memory
from helpers.model_directories import make_model
from helpers.pictures import jpeg, picture, write_folder, write_manifest, write_records, write_tar
from helpers.recordings import encoded, tone
from helpers.results import synthetic_result
from helpers.saving import random_state
from qmargin.data.audio import decode_audio
from qmargin.data.images import decode_image
from qmargin.data.index import header_checksum, indexed_seconds
from qmargin.data.open import open_dataset, open_index
from qmargin.data.readers.recordio import MAGIC_BYTES, RecordWriter, pack_payload
from qmargin.data.readers.verification_bin import convert_bin, read_bin
from qmargin.data.stored import ImageDataset
from qmargin.errors import CorruptSample, QMarginError
from qmargin.evaluation.columns import read_mapping
from qmargin.evaluation.embeddings import map_embeddings, read_embeddings, read_seconds
from qmargin.evaluation.export import read_thresholds, thresholds_of, write_thresholds
from qmargin.evaluation.model import load_model
from qmargin.evaluation.protocols.face_sets import read_pair_trials
from qmargin.evaluation.protocols.ijb import read_ijb
from qmargin.evaluation.result import read_result, write_result
from qmargin.evaluation.scores import read_scores
from qmargin.evaluation.trials import read_trials
from qmargin.experiments.pictures import read_pictures
from qmargin.models.weights import read_weights
from qmargin.recipes import get_recipe
from qmargin.training.checkpoint import load_checkpoint, newest, open_checkpoint, save_checkpoint
from qmargin.training.recipe_files import read_recipe, to_yaml

SECONDS = 5.0
MORE_BYTES = 1 << 30
TOKENS = (
    *(b"nan", b"inf", b"-1", b"1e999", b"0", b"9" * 25, b"9" * 5000, b"-9223372036854775809"),
    *("²".encode(), b"\xff\xfe", b"\0", b"\n", b"\r", b'"', b"'", b",", b";", b"\t", b" ", b"|"),
    *(b"../", b"/dev/zero", b"{", b"[" * 3000, b"}", b":", b"&a", b"*a", b"\\ud800", b"true"),
)
Read = Callable[[Path], Any]


class Reader(NamedTuple):
    """What is read, and how; every error but ours is a finding."""

    write: Callable[[Path], Any]  # puts valid files into a folder
    read: Read  # reads the folder
    targets: tuple[str, ...]  # patterns of the files to damage
    repair: Callable[[bytes], bytes] | None = None  # makes checksums right, to reach behind them


# Reading everything that a dataset gives.


def read_all(place: str, folder: Path, **options: Any) -> None:
    dataset = open_dataset(folder / place, **options)
    for row in range(min(len(dataset), 50)):
        dataset.sample_id(row)
        dataset.source(row)
        dataset.class_name(int(dataset.labels[row]))
        caught(dataset.__getitem__, row)


def caught(function: Callable[..., Any], *arguments: Any) -> None:
    try:
        function(*arguments)
    except CorruptSample:
        return


def each(function: Read, pattern: str = "*") -> Read:
    """Read every file of a pattern."""

    def read(folder: Path) -> None:
        errors = []
        for path in sorted(folder.glob(pattern)):
            try:
                function(path)
            except QMarginError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    return read


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


def save_npz(path: Path, **arrays: Any) -> None:
    np.savez_compressed(path, **arrays)
    ORIGINALS["zip"] = path.read_bytes()


# Files.

PICTURES, LABELS = [jpeg(seed) for seed in range(6)], [number // 2 for number in range(6)]
NAMES = np.array([f"id{number}/ü.wav" for number in range(8)])


def make_recordio(folder: Path) -> None:
    write_records(folder / "a.rec", PICTURES, LABELS)
    (folder / "property").write_text("3,112,112")


def make_split_recordio(folder: Path) -> None:
    with RecordWriter(folder / "a.rec") as writer:
        for key in range(4):
            writer.write(key, pack_payload([float(key), 1.0], b"abcd" + MAGIC_BYTES + b"efgh"))


def make_image_tars(folder: Path) -> None:
    for kind, text in {"cls": "{}", "id": "name {}", "json": '{{"label": {}}}'}.items():
        members = []
        for number, (image, label) in enumerate(zip(PICTURES, LABELS, strict=True)):
            name = f"{'deep/' * 25 if kind == 'json' else ''}{number:03d}"
            members += [(f"{name}.jpg", image), (f"{name}.{kind}", text.format(label).encode())]
        write_tar(folder / f"{kind}.tar", members)


def make_manifests(folder: Path) -> None:
    text = write_manifest(folder, PICTURES, LABELS).read_text()
    (folder / "list.tsv").write_text(text.replace(",", "\t").replace("label", "identity"))


def make_index(folder: Path) -> None:
    open_index(write_records(folder / "a.rec", PICTURES, LABELS))


def read_index_alone(folder: Path) -> None:
    dataset = ImageDataset(open_index(folder / "a.rec.qmindex", keep_changed=True))
    for row in range(min(len(dataset), 50)):
        caught(dataset.__getitem__, row)


def make_pictures(folder: Path) -> None:
    image = Image.fromarray(picture(1, 32))
    for kind in ("jpg", "png", "webp", "bmp", "ppm"):
        image.save(folder / f"a.{kind}")
    image.convert("P").save(folder / "b.png")
    image.convert("CMYK").save(folder / "b.jpg", progressive=True)


def read_picture(path: Path) -> None:
    caught(partial(decode_image, path.read_bytes(), upright=True))
    caught(partial(decode_image, path.read_bytes(), mirror=True))


def make_bins(folder: Path) -> None:
    same, arrays = [True, False, True], [np.frombuffer(image, np.uint8) for image in PICTURES]
    for protocol in (0, 2, 4, 5):
        content = pickle.dumps((arrays if protocol > 2 else PICTURES, same), protocol=protocol)
        (folder / f"{protocol}.bin").write_bytes(content)
    (folder / "a.bin").write_bytes(pickle.dumps((arrays, np.array(same)), protocol=2))


def make_converted(folder: Path) -> None:
    make_bins(folder)
    convert_bin(folder / "2.bin", folder / "a.npz")
    ORIGINALS["zip"] = (folder / "a.npz").read_bytes()


def make_audio(folder: Path) -> None:
    for suffix in ("wav", "flac", "ogg", "opus", "mp3"):
        (folder / f"a.{suffix}").write_bytes(encoded(tone(0.3), suffix))
    stereo = np.stack([tone(0.2, rate=44100)] * 2, axis=1)
    soundfile.write(folder / "b.aiff", stereo, 44100)
    soundfile.write(folder / "b.wav", stereo, 44100, subtype="FLOAT")
    soundfile.write(folder / "c.wav", tone(0.2, rate=8000), 8000, subtype="ULAW")


def read_recording(path: Path) -> None:
    caught(decode_audio, path)
    caught(decode_audio, path.read_bytes())


def make_lists(folder: Path) -> None:
    """The same recordings for Kaldi, as JSON lines, as CSV and in a list of tars."""
    members, lists = [], dict.fromkeys(("wav.scp", "utt2spk", "list.json"), "")
    lists["list.csv"] = "path,speaker,split\n"
    for number in range(4):
        name, speaker = f"{number}.wav", f"s{number // 2}"
        (folder / name).write_bytes(encoded(tone(0.1, hertz=200.0 + number)))
        members += [(name, (folder / name).read_bytes()), (f"{number}.spk", speaker.encode())]
        lists["wav.scp"] += f"u{number} {name}\n"
        lists["utt2spk"] += f"u{number} {speaker}\n"
        lists["list.json"] += json.dumps({"key": name, "wav": name, "spk": speaker}) + "\n"
        lists["list.csv"] += f'{name},"{speaker}",train\n'
    write_tar(folder / "a.tar", members)
    for name, text in {**lists, "tars.txt": "a.tar\n"}.items():
        (folder / name).write_text(text)


def make_audio_index(folder: Path) -> None:
    make_lists(folder)
    open_dataset(folder / "wav.scp", index=folder / "a.qmindex", verify=True)


def read_audio_index(folder: Path) -> None:
    indexed_seconds(folder / "a.qmindex")
    read_all("wav.scp", folder, index=folder / "a.qmindex", verify=True)


def make_unfinished_index(folder: Path) -> None:
    make_lists(folder)
    with mock.patch("qmargin.data.build.Path.unlink"):
        open_dataset(folder / "wav.scp", verify=True)
    (folder / "wav.scp.qmindex").unlink()


def make_scores(folder: Path) -> None:
    rows = [(name, f"{name}x", i / 8, i % 2) for i, name in enumerate(NAMES)]
    (folder / "a.txt").write_text("".join(f"{a} {b} {s} {label}\n" for a, b, s, label in rows))
    (folder / "b.txt").write_text("".join(f"{a} {b} {label} {s}\n" for a, b, s, label in rows))
    for suffix, sign in (("csv", ","), ("tsv", "\t")):
        text = sign.join(("enrol", "test", "score", "label", "enrol_subject", "test_subject"))
        for a, b, score, label in rows:
            text += "\n" + sign.join((f'"{a}"', b, str(score), str(label), a[:3], "x"))
        (folder / f"a.{suffix}").write_text(text)


def make_npz_scores(folder: Path) -> None:
    scores = {"scores": np.arange(8) / 8, "labels": np.arange(8) % 2}
    save_npz(folder / "a.npz", **scores, enrol=NAMES, test=np.char.add("other-", NAMES))


def make_trials(folder: Path) -> None:
    rows = [(f"id{i}/a.wav", f"id{i % 3}/b.wav", i % 2) for i in range(8)]
    words = ("nontarget", "target")
    (folder / "kaldi.txt").write_text("".join(f"{a} {b} {words[label]}\n" for a, b, label in rows))
    (folder / "vox.txt").write_text("".join(f"{label} {a} {b}\n" for a, b, label in rows))
    text = "enrol,test,label\n" + "".join(f"{a},{b},{label}\n" for a, b, label in rows)
    (folder / "a.csv").write_text(text)


def make_embeddings(folder: Path) -> None:
    matrix = np.arange(1.0, 17.0, dtype=np.float32).reshape(8, 2)
    ark = b"".join(
        name.encode() + b" \0BFV \x04\x02\0\0\0" + row.tobytes()
        for name, row in zip(NAMES.tolist(), matrix, strict=True)
    )
    (folder / "a.ark").write_bytes(ark)
    (folder / "text.ark").write_bytes(b"a  [ 1 2 ]\nb  [\n 3 4 ]\n")
    (folder / "a.scp").write_bytes(b"a a.ark:11\nb a.ark:11\n")
    keys = {"keys": json.dumps(NAMES.tolist())}
    save_file({"embeddings": torch.ones(8, 2)}, folder / "a.safetensors", keys)
    save_file({name: torch.ones(4) for name in NAMES.tolist()}, folder / "b.safetensors")


def make_npz_embeddings(folder: Path) -> None:
    save_npz(folder / "a.npz", keys=NAMES, embeddings=np.ones((8, 3), np.float32))


def make_mapping(folder: Path) -> None:
    (folder / "groups.csv").write_text('subject,group\nida,"x"\nbob,y\n')
    (folder / "utt2spk").write_text("u1 s1\nu2 s1\nu3 s2\n")


def make_pairs(folder: Path) -> None:
    lines = ("2\t1", "Ada\t1\t2", "Ada\t1\tBob\t2", "Bob\t1\t2", "Bob\t1\tAda\t3")
    (folder / "pairs.txt").write_text("\n".join(lines) + "\n")
    (folder / "pairs.csv").write_text("a,b,label,fold\nx.jpg,y.jpg,1,0\nx.jpg,z.jpg,0,1\n")


def read_release(folder: Path) -> None:
    release = read_ijb(folder / "IJBC")
    release.pairs()
    release.galleries()
    release.probes()
    found = release.images()
    for row in range(4):
        caught(found.__getitem__, row)


def make_durations(folder: Path) -> None:
    (folder / "a.txt").write_text("u1 1.5\nu2 0.25\n")
    save_file({"seconds": torch.ones(2)}, folder / "a.safetensors", {"keys": '["u1", "u2"]'})


def small_result() -> Any:
    return synthetic_result(num_genuine=50, num_impostors=200, num_replicates=3, groups=("a", "b"))


def make_thresholds(folder: Path) -> None:
    hashes = {"weights_sha256": "0" * 64, "result_sha256": "1" * 64}
    found = thresholds_of(small_result(), **hashes, is_trusted=True)
    write_thresholds(folder / "thresholds.json", found)


def make_recipe(folder: Path) -> None:
    (folder / "a.yaml").write_text(to_yaml(get_recipe("debug")))
    (folder / "b.yaml").write_text(to_yaml(get_recipe("faces_r18_q_margin")))


def read_checkpoint(folder: Path) -> None:
    newest(folder)
    load_checkpoint(open_checkpoint(folder / "step-000003", check=False))


def make_weights(folder: Path) -> None:
    weights = {"module.a.weight": torch.ones(3, 4), "module.a.bias": torch.ones(3)}
    torch.save({"state_dict": weights, "epoch": 3}, folder / "a.pt")
    torch.save(weights, folder / "old.pth", _use_new_zipfile_serialization=False)
    save_file(weights, folder / "a.safetensors")


def make_pictures_npz(folder: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 32, 32), dtype=np.uint8)
    save_npz(folder / "a.npz", label=np.repeat(np.arange(4), 3), images=pixels)


def in_lists(name: str, *targets: str, **options: Any) -> Reader:
    return Reader(make_lists, partial(read_all, name), targets or (name,), **options)


READERS = {
    "recordio": Reader(make_recordio, partial(read_all, "a.rec"), ("a.rec", "a.idx", "property")),
    "split recordio": Reader(
        make_split_recordio, partial(read_all, "a.rec", verify=True), ("a.*",)
    ),
    "image tar": Reader(
        make_image_tars,
        each(lambda path: read_all(path.name, path.parent, verify=True), "*.tar"),
        ("*.tar",),
        repaired_tar,
    ),
    "image folder": Reader(
        lambda folder: write_folder(folder / "faces", PICTURES, LABELS),
        partial(read_all, "faces"),
        ("faces/*/*",),
    ),
    "manifest": Reader(make_manifests, partial(read_all, "list.csv"), ("list.csv",)),
    "tsv manifest": Reader(make_manifests, partial(read_all, "list.tsv"), ("list.tsv",)),
    "index": Reader(make_index, read_index_alone, ("*.qmindex",), repaired_index),
    "pictures": Reader(make_pictures, each(read_picture), ("*",)),
    "verification set": Reader(make_bins, each(read_bin), ("*",)),
    "converted set": Reader(make_converted, each(read_bin, "*.npz"), ("a.npz",), repaired_zip),
    "audio": Reader(make_audio, each(read_recording), ("*",)),
    "kaldi": in_lists("wav.scp", "wav.scp", "utt2spk", "0.wav"),
    "json lines": in_lists("list.json"),
    "audio csv": in_lists("list.csv"),
    "audio tar": in_lists("a.tar", repair=repaired_tar),
    "list of tars": in_lists("tars.txt"),
    "audio index": Reader(make_audio_index, read_audio_index, ("a.qmindex",), repaired_index),
    "audio index, unfinished": Reader(
        make_unfinished_index, partial(read_all, "wav.scp", verify=True), ("wav.scp.qmindex.part",)
    ),
    "scores": Reader(make_scores, each(read_scores), ("*",)),
    "npz scores": Reader(make_npz_scores, each(read_scores), ("*",), repaired_zip),
    "trials": Reader(make_trials, each(read_trials), ("*",)),
    "embeddings": Reader(make_embeddings, each(read_embeddings), ("*",)),
    "mapped embeddings": Reader(
        make_embeddings, each(map_embeddings, "*.safetensors"), ("*.safetensors",)
    ),
    "npz embeddings": Reader(make_npz_embeddings, each(read_embeddings), ("*",), repaired_zip),
    "groups": Reader(make_mapping, each(partial(read_mapping, role="groups")), ("*",)),
    "pairs": Reader(make_pairs, each(read_pair_trials), ("*",)),
    "ijb": Reader(
        lambda folder: write_release(folder / "IJBC"),
        read_release,
        ("IJBC/meta/*", "IJBC/loose_crop/0.png"),
    ),
    "durations": Reader(make_durations, each(read_seconds), ("*",)),
    "thresholds": Reader(make_thresholds, each(read_thresholds), ("*",)),
    "result": Reader(
        lambda folder: write_result(folder / "result.json", small_result()),
        each(read_result),
        ("*",),
    ),
    "recipe": Reader(make_recipe, each(read_recipe), ("*",)),
    "checkpoint": Reader(
        lambda folder: save_checkpoint(folder, random_state(3)), read_checkpoint, ("step-000003/*",)
    ),
    "model": Reader(
        lambda folder: make_model(folder / "model"),
        lambda folder: load_model(folder / "model"),
        ("model/*",),
    ),
    "weights": Reader(make_weights, each(read_weights), ("*",)),
    "pictures npz": Reader(make_pictures_npz, each(read_pictures), ("*",), repaired_zip),
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


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Fuzz for some minutes; the exit status is 1 when something was found."""
    options = parsed(arguments)
    torch.set_num_threads(1)
    names = options.only or list(READERS)
    share = 60.0 * options.minutes / len(names)
    total, kinds = 0, Counter[str]()
    for name in names:
        count, found = fuzz(name, options, share)
        total += count
        say(f"{name}: {count:,} cases, {len(found)} findings")
        for problem in found:
            kinds[problem.strip().splitlines()[-1]] += 1
            if kinds[problem.strip().splitlines()[-1]] == 1:
                say(problem[:3000])
    say(f"{total:,} cases of {len(names)} readers, {len(kinds)} kinds of findings")
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())
