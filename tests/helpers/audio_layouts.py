"""Three speakers with two recordings each, in every layout that people have."""

import io
import json
import tarfile
from pathlib import Path

from helpers.recordings import encoded, speaker_folders, tone


def write_tar(path: Path, members: dict[str, bytes], *, mode: str = "w") -> Path:
    with tarfile.open(path, mode) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def shard(number: int, count: int = 3) -> dict[str, bytes]:
    members = {}
    for item in range(count):
        key = f"id{item}/v{number}/0000{item}"
        members[f"{key}.spk"] = f"id{item}".encode()
        members[f"{key}.wav"] = encoded(tone(0.2, hertz=200 + 50 * item))
    return members


def kaldi_folder(root: Path, *, scp: str | None = None, utt2spk: str | None = None) -> Path:
    speaker_folders(root / "wavs")
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.wav"))
    keys = [name.removeprefix("wavs/") for name in names]
    rows = "".join(f"{key} {name}\n" for key, name in zip(keys, names, strict=True))
    speakers = "".join(f"{key} {key.split('/')[0]}\n" for key in keys)
    (root / "wav.scp").write_text(rows if scp is None else scp)
    (root / "utt2spk").write_text(speakers if utt2spk is None else utt2spk)
    return root


def json_list(root: Path) -> Path:
    speaker_folders(root / "wavs")
    lines = [
        json.dumps(
            {"key": f"{p.parts[-3]}/{p.parts[-2]}/{p.name}", "wav": str(p), "spk": p.parts[-3]}
        )
        for p in sorted(root.rglob("*.wav"))
    ]
    (root / "raw.list").write_text("\n".join(lines) + "\n\n")
    return root / "raw.list"


def csv_list(root: Path) -> Path:
    speaker_folders(root)
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.wav"))
    rows = [
        f"{name},{name.split('/')[0]},{'train' if '00000' in name else 'test'}" for name in names
    ]
    (root / "all.csv").write_text("\n".join(["path,speaker,split", *rows]))
    return root / "all.csv"


def tar_shards(root: Path) -> Path:
    for number in range(2):
        write_tar(root / f"shard-{number}.tar", shard(number))
    return root
