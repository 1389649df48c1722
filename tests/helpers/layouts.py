"""The same six samples of three identities, images or recordings, in every format."""

import json
from collections.abc import Callable
from pathlib import Path

from helpers.pictures import jpeg, write_records, write_tar
from helpers.recordings import encoded, tone

LABELS = [0, 0, 1, 1, 2, 2]
IMAGES = [jpeg(seed) for seed in range(6)]
RECORDINGS = [encoded(tone(0.5 + 0.1 * (n % 2), hertz=200.0 + 50 * n)) for n in range(6)]
CONTENTS = {"images": IMAGES, "recordings": RECORDINGS}
SUFFIXES = {"images": "jpg", "recordings": "wav"}


def names(kind: str) -> list[str]:
    """Paths of the samples, sorted; recordings lie one folder deeper, as in VoxCeleb."""
    middle = "" if kind == "images" else "video/"
    return [f"id{n // 2}/{middle}0000{n % 2}.{SUFFIXES[kind]}" for n in range(6)]


def write_files(folder: Path, kind: str) -> Path:
    for name, content in zip(names(kind), CONTENTS[kind], strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def write_csv(folder: Path, kind: str) -> Path:
    write_files(folder / "data", kind)
    identity = "identity" if kind == "images" else "speaker"
    rows = [f"data/{name},{name},{name[:3]},{'ab'[n % 2]}" for n, name in enumerate(names(kind))]
    (folder / "list.csv").write_text("\n".join([f"path,key,{identity},split", *rows]))
    return folder / "list.csv"


def write_json(folder: Path, kind: str) -> Path:
    write_files(folder / "data", kind)
    path, identity = ("image", "identity") if kind == "images" else ("wav", "spk")
    lines = [
        json.dumps({"key": name, path: f"data/{name}", identity: name[:3]}) for name in names(kind)
    ]
    (folder / "raw.list").write_text("\n".join(lines) + "\n\n")
    return folder / "raw.list"


def write_kaldi(folder: Path, kind: str = "recordings") -> Path:
    write_files(folder / "data", kind)
    (folder / "wav.scp").write_text("".join(f"{name} data/{name}\n" for name in names(kind)))
    (folder / "utt2spk").write_text("".join(f"{name} {name[:3]}\n" for name in names(kind)))
    return folder


def write_shards(folder: Path, kind: str) -> Path:
    folder.mkdir(exist_ok=True)
    extension = "id" if kind == "images" else "spk"
    for start in (0, 3):
        members = []
        for n in range(start, start + 3):
            stem, _, suffix = names(kind)[n].rpartition(".")
            members += [(f"{stem}.{suffix}", CONTENTS[kind][n])]
            members += [(f"{stem}.{extension}", names(kind)[n][:3].encode())]
        write_tar(folder / f"{start}.tar", members)
    return folder


def write_shard_list(folder: Path, kind: str) -> Path:
    write_shards(folder / "tars", kind)
    (folder / "tars.txt").write_text("tars/0.tar\ntars/3.tar\n")
    return folder / "tars.txt"


def write_recordio(folder: Path, kind: str = "images") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return write_records(folder / "train.rec", CONTENTS[kind], LABELS)


Writer = Callable[[Path, str], Path]
WRITERS: dict[str, Writer] = {
    "folder": write_files,
    "manifest": write_csv,
    "json_lines": write_json,
    "tar": write_shards,
    "tar_list": write_shard_list,
    "kaldi": write_kaldi,
    "recordio": write_recordio,
}
LAYOUTS = [
    *(("images", name) for name in WRITERS if name != "kaldi"),
    *(("recordings", name) for name in WRITERS if name != "recordio"),
]
"""Every kind of sample in every format that can hold it."""


def write(folder: Path, kind: str, name: str) -> Path:
    (folder / "data").mkdir(parents=True)
    return WRITERS[name](folder / "data", kind)
