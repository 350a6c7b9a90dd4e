"""Pictures of prompts: found in what rows, clients and environments give, looked at once, opened where a model sees them. No torch.

A picture stays as it came, a file or the bytes of one, and travels to other processes as bytes; its hash and place alone are written down.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import stat
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from trainer.chat.messages import Unreadable

MOST_PIXELS = 89_478_485  # Pillow's own limit against decompression bombs, which is a warning there
MOST_PATH = 1024  # characters
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # others run programs, or are read by nobody else


@dataclass(frozen=True, slots=True)
class Picture:
    hash: str  # of its bytes and the limit
    where: str  # its path, or the place that it stood in
    source: bytes | Path  # encoded, or the file
    size: tuple[int, int]  # width and height as a model sees it
    most: int | None = None  # pixels: it is made smaller where it has more

    def __reduce__(self) -> Any:
        return Picture, (self.hash, self.where, self.encoded(), self.size, self.most)

    def encoded(self) -> bytes:
        """Raises Unreadable where the file is another one than at the start."""
        if isinstance(self.source, bytes):
            return self.source
        content = _read(self.source, self.where)
        if _hash(content, self.most) != self.hash:
            raise Unreadable(f"{self.where}: the picture was changed since the run has looked at it")
        return content

    def image(self) -> Image.Image:
        """RGB, at most as large as it may be. Raises Unreadable."""
        found = _decoded(self.encoded(), self.where)
        return found if found.size == self.size else found.resize(self.size, Image.Resampling.BICUBIC)

    def described(self) -> dict[str, str]:
        """What is written down of it."""
        return {"type": "image", "hash": self.hash, "path": self.where}


class Opened:
    """Pictures that a process decodes again and again, as an engine those of earlier turns: the last ones, up to so many bytes."""

    def __init__(self, most: int = 256 << 20):
        self.most, self.bytes, self.images = most, 0, OrderedDict[str, Image.Image]()

    def image(self, picture: Picture) -> Image.Image:
        """Not to be changed: it is shared. Raises Unreadable."""
        if picture.hash not in self.images:
            self.images[picture.hash] = image = picture.image()
            self.bytes += _pixels(image)
            while self.bytes > self.most and len(self.images) > 1:
                self.bytes -= _pixels(self.images.popitem(last=False)[1])
        self.images.move_to_end(picture.hash)
        return self.images[picture.hash]


def _pixels(image: Image.Image) -> int:
    return 3 * image.width * image.height


@dataclass(frozen=True)
class Limits:
    """Which pictures are taken."""

    folder: Path | None = None  # that files must be in; None: no file is read
    most: int | None = None  # pixels of one
    resize: bool = True  # whether larger ones are made smaller, or refused


def picture(given: Any, where: str, limits: Limits) -> Picture:
    """Of a path, `data:` URL, bytes, PIL image, array, or datasets' {bytes, path}. Decoded once, to know that it can be.

    Raises Unreadable.
    """
    if isinstance(given, Mapping) and (given.get("bytes") is not None or given.get("path")):  # as datasets.Image has it
        given = given["bytes"] if given.get("bytes") is not None else given["path"]
    source: bytes | Path
    if isinstance(given, bytes | bytearray):
        source = bytes(given)
    elif isinstance(given, str) and given[:5].lower() == "data:":
        source = _of_url(given, where)
    elif isinstance(given, str | Path):
        source = _file(str(given), where, limits)
        where = str(given)
    elif isinstance(given, Image.Image) or hasattr(given, "__array_interface__"):
        source = png(given, where)
    else:
        raise Unreadable(f"{where}: {type(given).__name__} is no picture; give a path, bytes, a data: URL or a PIL image")
    content = source if isinstance(source, bytes) else _read(source, where)
    width, height = _decoded(content, where).size
    size, most = (width, height), limits.most
    if most and width * height > most:
        if not limits.resize:
            raise Unreadable(
                f"{where}: the picture has {width}x{height} pixels, data.max_pixels is {most}; raise it, or set data.oversized=resize"
            )
        share = (most / (width * height)) ** 0.5
        size = (max(1, int(width * share)), max(1, int(height * share)))
    return Picture(_hash(content, most), where, source, size, most)


def _hash(content: bytes, most: int | None) -> str:
    return hashlib.sha256(content + (f" {most}".encode() if most else b"")).hexdigest()[:32]


def _file(path: str, where: str, limits: Limits) -> Path:
    if not 0 < len(path) <= MOST_PATH:
        raise Unreadable(f"{where}: {path[:80]!r}, a text of {len(path)} characters, is no path; base64 follows data:image/png;base64,")
    if "://" in path:
        raise Unreadable(f"{where}: {path[:80]!r} is a URL, and nothing is fetched; give a file, bytes or a data: URL")
    if limits.folder is None:
        raise Unreadable(f"{where}: {path[:80]!r} is a path, and no file is read here; give bytes or a data: URL")
    folder = limits.folder.resolve()
    try:
        found = (folder / Path(path).expanduser()).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, a home that is not there, a character that no path has
        raise Unreadable(f"{where}: {path!r}: {error}") from None
    if not found.is_relative_to(folder):
        raise Unreadable(f"{where}: {path} is outside {folder}; put it there, or set data.images_folder")
    return found


def _read(file: Path, where: str) -> bytes:
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # a pipe would be waited for without end
            raise Unreadable(f"{where}: {file} is not a file; give one, or leave the row out")
        return file.read_bytes()
    except OSError as error:
        raise Unreadable(f"{where}: {file}: {error.strerror}; put the picture there, or leave the row out") from None


def _of_url(url: str, where: str) -> bytes:
    head, comma, content = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise Unreadable(f"{where}: {url[:40]!r}: a data: URL needs ;base64, and what follows")
    return of_base64(content, where)


def of_base64(content: Any, where: str) -> bytes:
    if not isinstance(content, str):
        raise Unreadable(f"{where}: the picture's data are {type(content).__name__}; base64 is needed")
    try:
        return base64.b64decode("".join(content.split()), validate=True)  # in lines, as e-mail has it
    except (binascii.Error, ValueError) as error:
        raise Unreadable(f"{where}: the picture's data are not base64: {error}") from None


def png(given: Any, where: str) -> bytes:
    """Of an image of PIL, or an array. Raises Unreadable."""
    try:
        image = given if isinstance(given, Image.Image) else Image.fromarray(given)
        written = io.BytesIO()
        image.save(written, "PNG")
    except (OSError, TypeError, ValueError, KeyError) as error:
        raise Unreadable(f"{where}: not a picture that can be written: {error}") from None
    return written.getvalue()


def _decoded(content: bytes, where: str) -> Image.Image:
    """RGB, the way up that its EXIF says. Raises Unreadable."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(content), formats=FORMATS)
        if image.width * image.height > MOST_PIXELS:
            raise Unreadable(f"{where}: the picture has {image.width}x{image.height} pixels; at most {MOST_PIXELS} are decoded")
        image.load()
        return _rgb(ImageOps.exif_transpose(image), where)
    except Unreadable:
        raise
    except UnidentifiedImageError:
        raise Unreadable(f"{where}: not a picture of {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError as error:
        raise Unreadable(f"{where}: {error}") from None
    except Exception as error:  # damaged files make Pillow's readers fail in many ways, struct.error among them
        raise Unreadable(f"{where}: the picture is damaged: {error}") from None


def _rgb(image: Image.Image, where: str) -> Image.Image:
    """Of 8 bits, on white where it is transparent, as browsers show it. Raises Unreadable."""
    if image.mode.startswith("I;16"):  # which Pillow would cut off at 255: nearly all white
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise Unreadable(f"{where}: pixels of 32 bits, whose black and white nothing says; give 8 or 16 bits a channel")
    if image.has_transparency_data:
        shown = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", shown.size, "white"), shown)
    return image.convert("RGB")
