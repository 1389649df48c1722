import base64
import io
import os
import wave
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from qmargin.errors import ConfigError
from qmargin.report import media
from qmargin.report.media import IMAGE_SIDE, LONGEST_AUDIO, MediaFolder


def write_image(path: Path, size: tuple[int, int] = (400, 300)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size[1], size[0], 3), 90, np.uint8)).save(path)
    return path


def write_wave(path: Path, seconds: float = 12.0, rate: int = 16000) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.zeros(int(seconds * rate), "<i2").tobytes())
    return path


def content_of(uri: str) -> bytes:
    return base64.b64decode(uri.partition("base64,")[2])


def test_images_are_small_jpegs(tmp_path: Path) -> None:
    write_image(tmp_path / "id1" / "a.png")
    folder = MediaFolder(tmp_path)
    for key in ("id1/a.png", "id1/a"):
        medium = folder.medium(key)
        assert (medium.kind, medium.problem) == ("image", "")
        image = Image.open(io.BytesIO(content_of(medium.uri)))
        assert image.format == "JPEG"
        assert max(image.size) == IMAGE_SIDE


def test_recordings_are_cut(tmp_path: Path) -> None:
    write_wave(tmp_path / "a.wav")
    medium = MediaFolder(tmp_path).medium("a.wav")
    assert medium.uri.startswith("data:audio/wav;base64,")
    with wave.open(io.BytesIO(content_of(medium.uri)), "rb") as file:
        assert file.getnframes() == LONGEST_AUDIO * file.getframerate()


def test_other_recordings_travel_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.flac").write_bytes(b"fLaC" + bytes(100))
    folder = MediaFolder(tmp_path)
    assert content_of(folder.medium("a.flac").uri) == b"fLaC" + bytes(100)
    monkeypatch.setattr(media, "MOST_FILE_BYTES", 50)
    assert MediaFolder(tmp_path).medium("a.flac").problem == "recording too large"


@pytest.mark.parametrize("name", ["a.png", "a.wav", "a.flac", "a.txt"])
def test_files_that_are_not_what_they_say_are_not_shown(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"<script>window.__pwned=1</script>")
    medium = MediaFolder(tmp_path).medium(name)
    assert (medium.kind, medium.uri) == ("none", "")
    assert medium.problem


def test_nothing_outside_the_folder_is_read(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    secret = write_image(tmp_path / "secret.png")
    sibling = write_image(tmp_path / "root2" / "b.png")
    (root / "link.png").symlink_to(secret)
    (root / "folder").symlink_to(sibling.parent)
    folder = MediaFolder(root)
    escapes = ["../secret.png", str(secret), "link.png", "folder/b.png", "../root2/b.png"]
    for key in [*escapes, "a\x00b", "x" * 5000, "", ".", "..", "\ud800"]:
        assert folder.find(key) is None, key
        assert folder.medium(key).uri == ""


def test_pipes_and_loops_do_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.wav")
    (tmp_path / "loop.png").symlink_to("loop.png")
    folder = MediaFolder(tmp_path)
    assert folder.medium("pipe.wav").problem == folder.medium("loop.png").problem == "no such file"


def test_huge_images_are_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_image(tmp_path / "a.png")
    monkeypatch.setattr(media, "MOST_PIXELS", 1000)
    assert MediaFolder(tmp_path).medium("a.png").problem == "image too large"


def test_a_page_does_not_grow_without_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wave(tmp_path / "a.wav", seconds=1.0)
    folder = MediaFolder(tmp_path)
    monkeypatch.setattr(media, "MOST_BYTES", len(folder.medium("a.wav").uri) + 10)
    assert folder.embedded("a.wav").kind == "audio"
    assert folder.embedded("a.wav").problem == "left out, the page is large enough"


def test_the_folder_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a folder"):
        MediaFolder(tmp_path / "nothing")
