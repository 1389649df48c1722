"""Decoding: what is accepted, what is refused, and what two decoders agree on."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from helpers.pictures import jpeg, picture
from qmargin.data.images import decode_image, encode_image, resize_image
from qmargin.errors import ConfigError, CorruptSample


def encoded(mode: str, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture(0)).convert(mode).save(buffer, format=format, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("format", ["PNG", "BMP", "PPM"])
def test_lossless_formats_give_the_pixels_back(format: str) -> None:
    assert np.array_equal(decode_image(encoded("RGB", format)), picture(0))


@pytest.mark.parametrize(
    ("mode", "format"),
    [("L", "JPEG"), ("CMYK", "JPEG"), ("P", "PNG"), ("RGBA", "PNG"), ("1", "PNG")],
)
def test_every_mode_becomes_three_channels(mode: str, format: str) -> None:
    pixels = decode_image(encoded(mode, format))
    assert pixels.shape == (16, 16, 3)
    assert pixels.dtype == np.uint8
    if mode in ("L", "1"):
        assert np.array_equal(pixels[..., 0], pixels[..., 2])


def test_stored_bgr_comes_out_as_rgb() -> None:
    stored = encode_image(np.ascontiguousarray(picture(1)[:, :, ::-1]), format="PNG")
    assert np.array_equal(decode_image(stored, channels="bgr"), picture(1))


def bomb(side: int) -> bytes:
    """A PNG of a few bytes whose header promises a huge picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "zero bytes"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"\n  <html>", "a web page"),
        (b"RIFF1234WAVE", "not an image of a known format: it starts with 52 49 46 46"),
        (jpeg(0, 64)[:-60], "truncated"),
        (jpeg(0)[:20], "damaged or cut off"),
        (bomb(8000), "the header says 8000 x 8000 pixels"),
        (bomb(60000), "."),  # Pillow itself warns of this one
        (encoded("I;16", "PNG"), "8 bits per channel"),
        (encoded("L", "GIF"), "not an image of a known format"),
    ],
    ids=["zero", "html", "html2", "wav", "cut", "cut2", "bomb", "bomb2", "deep", "gif"],
)
def test_what_is_not_a_good_image_is_corrupt(data: bytes, message: str) -> None:
    with pytest.raises(CorruptSample, match=message):
        decode_image(data)


def test_the_limit_counts_pixels() -> None:
    assert decode_image(jpeg(0), max_pixels=256).shape == (16, 16, 3)
    with pytest.raises(CorruptSample, match="at most 255"):
        decode_image(jpeg(0), max_pixels=255)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="decoder is 'cv2'"):
        decode_image(jpeg(0), decoder="cv2")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="channels is 'hsv'"):
        decode_image(jpeg(0), channels="hsv")  # type: ignore[arg-type]


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("quality", [30, 75, 95])
def test_simplejpeg_gives_the_same_bits(subsampling: int, quality: int) -> None:
    pytest.importorskip("simplejpeg")
    random = np.random.default_rng(quality)
    for size in (112, 113, 37):
        pixels = random.integers(0, 256, (size, size, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "JPEG", quality=quality, subsampling=subsampling)
        data = buffer.getvalue()
        assert np.array_equal(decode_image(data, decoder="simplejpeg"), decode_image(data))


@pytest.mark.parametrize(
    "data", [encoded("RGB", "PNG"), encoded("L", "JPEG"), encoded("CMYK", "JPEG")]
)
def test_simplejpeg_leaves_the_rest_to_pillow(data: bytes) -> None:
    pytest.importorskip("simplejpeg")
    assert np.array_equal(decode_image(data, decoder="simplejpeg"), decode_image(data))


def test_both_decoders_agree_on_what_is_corrupt() -> None:
    pytest.importorskip("simplejpeg")
    random = np.random.default_rng(0)
    whole = jpeg(3, 64)
    for _ in range(200):
        damaged = bytearray(whole)
        for place in random.integers(2, len(whole), 3):
            damaged[place] ^= 1 << int(random.integers(8))
        outcomes = []
        for decoder in ("pillow", "simplejpeg"):
            try:
                outcomes.append(decode_image(bytes(damaged), decoder=decoder).tobytes())
            except CorruptSample:
                outcomes.append(b"corrupt")
        assert (outcomes[0] == b"corrupt") == (outcomes[1] == b"corrupt")


def test_resizing_scales_the_short_side_and_keeps_the_middle() -> None:
    wide = np.zeros((10, 30, 3), dtype=np.uint8)
    wide[:, 10:20] = 255
    assert (resize_image(wide, 5) == 255).all()
    same = picture(0)
    assert resize_image(same, 16) is same


def test_photos_are_turned_upright_on_request() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn a quarter clockwise
    buffer = io.BytesIO()
    wide = Image.new("RGB", (8, 4))
    wide.save(buffer, "JPEG", exif=exif)
    assert decode_image(buffer.getvalue()).shape == (4, 8, 3)
    assert decode_image(buffer.getvalue(), upright=True).shape == (8, 4, 3)
