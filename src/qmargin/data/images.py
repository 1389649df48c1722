"""Pictures from bytes: always RGB, and decoded only after a check of the size in the header."""

from __future__ import annotations

import io
from importlib import import_module
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import BackendError, ConfigError, CorruptSample

Decoder = Literal["pillow", "simplejpeg"]
Channels = Literal["rgb", "bgr"]
Pixels = NDArray[np.uint8]  # [H, W, 3]

MAX_PIXELS = 50_000_000  # a large photo; 150 MB once decoded
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm")
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "PPM")  # Pillow reads many more, some by other programs
_JPEG = b"\xff\xd8\xff"


def decode_image(
    data: bytes,
    *,
    decoder: Decoder = "pillow",
    channels: Channels = "rgb",  # stored order; "bgr" is swapped back
    max_pixels: int = MAX_PIXELS,  # larger pictures are refused by their header
    upright: bool = False,  # turn the picture as its EXIF orientation says
    mirror: bool = False,  # swap left and right
    writable: bool = True,  # without it, a copy may be saved
) -> Pixels:
    """The picture in a JPEG, PNG, WebP, BMP or PPM file, ``[H, W, 3]`` RGB, or ``CorruptSample``.

    The decoder ``"simplejpeg"`` is faster and gives the same bits; Pillow decodes what it cannot
    read, so that both agree on which samples are corrupt.

    Examples:
        >>> data = encode_image(np.full((2, 3, 3), 200, dtype=np.uint8), format="PNG")
        >>> decode_image(data).shape
        (2, 3, 3)
        >>> decode_image(b"<!DOCTYPE html>")
        Traceback (most recent call last):
        qmargin.errors.CorruptSample: a web page or other markup, not an image
    """
    check_decoding(decoder, channels)
    pixels = None
    if decoder == "simplejpeg" and not upright and data.startswith(_JPEG):
        pixels = _with_simplejpeg(data, max_pixels, mirror)
    if pixels is None:
        pixels = _with_pillow(data, max_pixels, upright, mirror, writable)
    return pixels if channels == "rgb" else np.ascontiguousarray(pixels[:, :, ::-1])


def check_decoding(decoder: str, channels: str) -> None:
    """Raise unless the names are known; whether a decoder is installed shows when it is used."""
    if decoder not in ("pillow", "simplejpeg"):
        raise ConfigError(f"decoder is {decoder!r}; use 'pillow' or 'simplejpeg'")
    if channels not in ("rgb", "bgr"):
        raise ConfigError(f"channels is {channels!r}; use 'rgb' or 'bgr'")


def _with_pillow(
    data: bytes, max_pixels: int, upright: bool, mirror: bool, writable: bool
) -> Pixels:
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            _check_size(image.width, image.height, max_pixels)
            if image.mode[0] in "IF":
                raise CorruptSample(f"mode {image.mode}; convert the image to 8 bits per channel")
            if upright:
                ImageOps.exif_transpose(image, in_place=True)
            turned: Image.Image = image
            if turned.mode != "RGB":
                turned = turned.convert("RGB")
            if mirror:
                turned = turned.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            return np.array(turned) if writable else np.asarray(turned)
    except CorruptSample:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        limit = Image.MAX_IMAGE_PIXELS or 0  # Pillow checks the header first
        said = f"the header says over {limit:,} pixels"
        raise CorruptSample(f"{said}; at most {min(max_pixels, limit):,} are decoded") from error
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error and many others
        raise CorruptSample(_reason(data, error)) from error


def _with_simplejpeg(data: bytes, max_pixels: int, mirror: bool) -> Pixels | None:
    try:
        simplejpeg: Any = import_module("simplejpeg")
    except ImportError as error:
        remedy = "pip install simplejpeg, or use 'pillow'"
        raise BackendError(f"decoder is 'simplejpeg', which is not installed; {remedy}") from error
    try:
        height, width, colours = simplejpeg.decode_jpeg_header(data)[:3]
        _check_size(width, height, max_pixels)
        if colours not in ("YCbCr", "Gray"):
            return None
        pixels: Pixels = simplejpeg.decode_jpeg(
            data, colorspace="RGB", fastdct=False, fastupsample=False
        )
    except ValueError as error:
        if isinstance(error, CorruptSample):
            raise
        return None
    if not mirror:
        return pixels
    result = np.empty_like(pixels)
    for channel in range(pixels.shape[2]):  # three bytes at a time, NumPy would be slower
        result[:, :, channel] = pixels[:, ::-1, channel]
    return result


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        said = f"the header says {width} x {height} pixels"
        raise CorruptSample(f"{said}; at most {max_pixels:,} are decoded")


def _reason(data: bytes, error: Exception) -> str:
    """Reason why no decoder accepts the bytes, in words."""
    if not data:
        return "zero bytes"
    if data[:256].lstrip().startswith(b"<"):
        return "a web page or other markup, not an image"
    if type(error).__name__ == "UnidentifiedImageError":
        if data.startswith(_JPEG):
            return "a JPEG whose header is damaged or cut off"
        return f"not an image of a known format: it starts with {data[:8].hex(' ')}"
    return " ".join(str(error).split())[:200] or type(error).__name__


def encode_image(pixels: Pixels, *, format: str = "JPEG", quality: int = 95) -> bytes:
    """RGB pixels ``[H, W, 3]`` uint8 as a ``"JPEG"``, or as a ``"PNG"``, which loses nothing."""
    from PIL import Image

    buffer = io.BytesIO()
    options: dict[str, Any] = {"quality": quality} if format == "JPEG" else {}
    Image.fromarray(pixels).save(buffer, format=format, **options)
    return buffer.getvalue()


def resize_image(pixels: Pixels, size: int) -> Pixels:
    """The picture at ``size x size``: the short side scaled to it, the middle of the long one kept.

    Examples:
        >>> resize_image(np.zeros((224, 300, 3), dtype=np.uint8), 112).shape
        (112, 112, 3)
    """
    height, width = pixels.shape[:2]
    if (height, width) == (size, size):
        return pixels
    from PIL import Image

    side = min(height, width)
    left, top = (width - side) // 2, (height - side) // 2
    middle = np.ascontiguousarray(pixels[top : top + side, left : left + side])
    return np.array(Image.fromarray(middle).resize((size, size), Image.Resampling.BILINEAR))
