"""Images and recordings of trials, small enough for the page."""

from __future__ import annotations

import base64
import io
import warnings
import wave
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qmargin.errors import ConfigError

IMAGE_SIDE = 160  # pixels of the longer side
LONGEST_AUDIO = 5.0  # seconds of a WAV file that are kept
MOST_FILE_BYTES = 2_000_000  # of a recording that cannot be cut
MOST_BYTES = 32_000_000  # of all media in a page
MOST_PIXELS = 50_000_000  # of the largest image that is opened
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm")
AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3")
_IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM")
_AUDIO_TYPES = {b"RIFF": "wav", b"fLaC": "flac", b"OggS": "ogg", b"ID3": "mpeg", b"\xff": "mpeg"}


@dataclass(frozen=True)
class Medium:
    """A file for the page; if empty, ``problem`` is the reason."""

    kind: str = "none"  # or image, audio
    uri: str = ""
    problem: str = ""

    def image(self) -> Any:
        """The picture, for a figure."""
        from PIL import Image

        return Image.open(io.BytesIO(base64.b64decode(self.uri.partition(",")[2])))


def _medium(kind: str, subtype: str, content: bytes) -> Medium:
    return Medium(kind, f"data:{kind}/{subtype};base64,{base64.b64encode(content).decode()}")


@dataclass
class MediaFolder:
    """Media in one folder, named by the keys of trials; nothing outside is read."""

    root: Path
    _spent: int = 0
    _known: dict[str, Medium] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root = Path(self.root).resolve()
        if not self.root.is_dir():
            raise ConfigError(f"media: {self.root} is not a folder: give the root of the keys")

    def embedded(self, key: str) -> Medium:
        """The medium of a key for the page, as long as the page is not too large."""
        found = self.medium(key)
        if self._spent + len(found.uri) > MOST_BYTES:
            return Medium(problem="left out, the page has reached its limit")
        self._spent += len(found.uri)
        return found

    def medium(self, key: str) -> Medium:
        """The medium of a key; read once."""
        if key not in self._known:
            path = self.find(key)
            suffix = None if path is None else path.suffix.lower()
            if path is None:
                found = Medium(problem="no such file")
            elif suffix in IMAGE_SUFFIXES:
                found = _image(path)
            elif suffix in AUDIO_SUFFIXES:
                found = _audio(path)
            else:
                found = Medium(problem="neither image nor audio")
            self._known[key] = found
        return self._known[key]

    def find(self, key: str) -> Path | None:
        """The file of a key, with its suffix or without, if it lies inside the folder."""
        for suffix in ("", *IMAGE_SUFFIXES, *AUDIO_SUFFIXES):
            try:
                path = (self.root / f"{key}{suffix}").resolve()
                if path.is_relative_to(self.root) and path.is_file():
                    return path
            except (OSError, ValueError, RuntimeError):  # too long, a null, a loop of links
                return None
        return None


def _image(path: Path) -> Medium:
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with Image.open(path, formats=_IMAGE_FORMATS) as image:
                if image.width * image.height > MOST_PIXELS:
                    return Medium(problem="image too large")
                image.draft("RGB", (2 * IMAGE_SIDE, 2 * IMAGE_SIDE))
                small = ImageOps.exif_transpose(image).convert("RGB")
                small.thumbnail((IMAGE_SIDE, IMAGE_SIDE))
    except Exception:  # decoders raise many kinds of errors on a broken file
        return Medium(problem="unreadable image")
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=82, optimize=True)
    return _medium("image", "jpeg", buffer.getvalue())


def _audio(path: Path) -> Medium:
    """A recording; the first seconds of a WAV file, unless its encoding cannot be cut."""
    with path.open("rb") as file:
        start = file.read(4)
    kind = next((kind for magic, kind in _AUDIO_TYPES.items() if start.startswith(magic)), None)
    if kind is None:
        return Medium(problem="unreadable audio")
    buffer = io.BytesIO()
    if kind == "wav":
        try:
            with wave.open(str(path), "rb") as source, wave.open(buffer, "wb") as target:
                target.setparams(source.getparams())
                target.writeframes(source.readframes(int(LONGEST_AUDIO * source.getframerate())))
        except (wave.Error, EOFError, ValueError):
            buffer = io.BytesIO()
    content = buffer.getvalue()
    if not content or len(content) > MOST_FILE_BYTES:
        if path.stat().st_size > MOST_FILE_BYTES:
            return Medium(problem="recording too large")
        content = path.read_bytes()
    return _medium("audio", kind, content)
