"""Pictures of rows: where they may come from, what is refused, and what is written down of them."""

from __future__ import annotations

import base64
import io
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from trainer.chat.messages import Unreadable
from trainer.chat.pictures import Limits, Opened, Picture, picture
from trainer.configs.data import DataConfig
from trainer.data.pictures import require_column, taken
from trainer.data.shapes import shape_pairs, shapes
from trainer.errors import ConfigError


def png(width: int = 8, height: int = 8, shade: int = 200, kind: str = "PNG") -> bytes:
    written = io.BytesIO()
    Image.new("RGB", (width, height), (shade, 10, 20)).save(written, kind)
    return written.getvalue()


URL = "data:image/png;base64," + base64.b64encode(png()).decode()
PART = {"type": "text", "text": "what?"}


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "b.png").write_bytes(png(shade=1))
    return DataConfig(path=str(tmp_path / "rows.jsonl"))


def seen(config: DataConfig, prompt: Any, **columns: Any) -> tuple[Any, tuple[Picture, ...], dict[str, Any]]:
    return taken({"prompt": prompt, **columns}, prompt, config, "rows.jsonl:1")


@pytest.mark.parametrize(
    "given",
    [
        "a.png",
        png(),
        bytearray(png()),
        {"bytes": png(), "path": None},
        {"bytes": None, "path": "a.png"},
        URL,
        Image.new("RGB", (8, 8), (200, 10, 20)),
        np.array(Image.new("RGB", (8, 8), (200, 10, 20))),
    ],
    ids=lambda given: type(given).__name__,
)
def test_a_picture_is_the_same_however_it_comes(config, given):
    prompt, [found], row = seen(config, "what?", images=[given])
    assert prompt == [{"type": "image"}, PART]
    assert found.image().getpixel((3, 3)) == (200, 10, 20) and found.size == (8, 8)
    assert row == {"prompt": "what?", "images": [found.described()]}, "no pixels are left in the row"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "a.png"},
        {"type": "image", "path": "a.png"},
        {"type": "image", "url": URL},
        {"type": "image", "base64": URL.partition(",")[2]},
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "input_image", "image_url": URL},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}},
    ],
    ids="+".join,
)
def test_parts_of_messages_hold_pictures_as_hugging_face_openai_and_anthropic_write_them(config, part):
    prompt, [found], row = seen(config, [{"role": "user", "content": [part, PART]}])
    assert prompt == [{"role": "user", "content": [{"type": "image"}, PART]}]
    assert found.image().getpixel((0, 0)) == (200, 10, 20)
    assert row["prompt"] == [{"role": "user", "content": [found.described(), PART]}]


def test_pictures_of_the_column_stand_at_their_marks_in_order(config):
    prompt, found, _ = seen(config, "one <image> two <image>!", images=["a.png", "b.png"])
    assert [each.get("text", "-") for each in prompt] == ["one ", "-", " two ", "-", "!"]
    assert [each.where for each in found] == ["a.png", "b.png"]
    talk = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "see <image>"},
        {"role": "user", "content": [{"type": "image"}]},
    ]
    prompt, found, _ = seen(config, talk, images=["b.png", "a.png"])
    assert prompt[1]["content"] == [{"type": "text", "text": "see "}, {"type": "image"}] and prompt[0]["content"] == "s"
    assert [each.where for each in found] == ["b.png", "a.png"]
    prompt, _, _ = seen(config, [{"role": "user", "content": "what?"}], images="a.png")
    assert prompt == [{"role": "user", "content": [{"type": "image"}, PART]}], "before the first question, where nothing is marked"


def test_rows_without_pictures_stay_as_they_are(config):
    for row in ({"prompt": "a <image> b"}, {"prompt": "a", "images": []}, {"prompt": "a", "images": None}):
        assert taken(row, row["prompt"], config, "") == (row["prompt"], (), row)
    row = {"prompt": "a", "images": ["a.png"]}
    assert taken(row, "a", config.model_copy(update={"images": None}), "") == ("a", (), row)


def noise() -> bytes:
    written = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(written, "PNG")
    return written.getvalue()


def bomb() -> bytes:
    """A PNG whose header says 20000x20000."""
    content = bytearray(png())
    content[16:24] = (20_000).to_bytes(4, "big") * 2
    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    return bytes(content)


def in_32_bits() -> bytes:
    written = io.BytesIO()
    Image.fromarray(np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)).save(written, "TIFF")
    return written.getvalue()


def broken_exif() -> bytes:
    """Whose orientation is right, and another entry no number of its type: struct.error in Pillow."""
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "abc"
    written = io.BytesIO()
    Image.new("RGB", (8, 8)).save(written, "JPEG", exif=exif)
    return written.getvalue().replace(b"\x01\x0e\x00\x02", b"\x01\x00\x00\x02")  # ImageWidth, as text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("no.png", "No such file"),
        ("../a.png", "is outside"),
        ("/etc/passwd", "is outside"),
        ("link.png", "is outside"),
        ("folder", "is not a file"),
        ("pipe", "is not a file"),
        ("circle", "ymlink loop|ymbolic links"),
        ("", "a text of 0 characters, is no path"),
        ("a\0b.png", "null byte|null character"),
        ("iVBORw0KGgo" * 1000, r"'iVBOR.{75,90}', a text of 11000 characters, is no path; base64 follows data:image/png;base64,$"),
        ("https://example.com/a.png", "nothing is fetched"),
        ("file:///a.png", "nothing is fetched"),
        ("data:image/png,abc", "needs ;base64"),
        ("data:image/png;base64,%%%", "not base64"),
        (b"no picture", "not a picture of PNG"),
        (b"", "not a picture of PNG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a picture of PNG"),
        (noise()[:500], "damaged"),
        (png(8, 8, kind="TIFF")[:90], "damaged|not a picture of PNG"),
        (in_32_bits(), "pixels of 32 bits"),
        (broken_exif(), "damaged"),
        (png(64, 64, kind="JPEG")[:300], "damaged"),
        (bomb(), "decompression|bomb|pixels"),
        (3, "int is no picture"),
        (None, "NoneType is no picture"),
        ({"bytes": None, "path": None}, "dict is no picture"),
        (np.zeros(3, dtype=object), "not a picture that can be written"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_what_is_no_picture_is_refused_with_its_row(config, tmp_path, given, said):
    outside = tmp_path.parent / f"{tmp_path.name}-outside.png"
    outside.write_bytes(png())
    (tmp_path / "link.png").symlink_to(outside)
    (tmp_path / "folder").mkdir()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=rf"^data\.images: rows\.jsonl:1: .*({said})") as error:
        seen(config, "what?", images=[given])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("prompt", "columns", "said"),
    [
        ("<image> and <image>", {"images": ["a.png"]}, "more places for pictures than pictures"),
        ("<image>", {"images": ["a.png", "b.png"]}, "2 pictures, and 1 places"),
        ([{"role": "user", "content": [{"type": "image"}]}], {}, "more places for pictures"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "part of type image_url without a picture"),
        ([{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}], {}, "base64 alone is read"),
        ("x", {"images": ["a.png"] * 17}, r"17 pictures, data\.max_images is 16"),
    ],
)
def test_pictures_and_their_places_are_as_many(config, prompt, columns, said):
    with pytest.raises(ConfigError, match=rf"rows\.jsonl:1: .*{said}"):
        seen(config, prompt, **columns)


def test_sixteen_bits_keep_their_shades_and_what_is_transparent_is_white(tmp_path):
    """Pillow alone would make the one white and show what the other hides."""

    def shades(image: Image.Image, kind: str = "PNG", **how: Any) -> list[tuple[int, ...]]:
        written = io.BytesIO()
        image.save(written, kind, **how)
        seen = picture(written.getvalue(), "here", Limits()).image()
        assert seen.mode == "RGB"
        return [seen.getpixel((x, 0)) for x in range(seen.width)]  # type: ignore[misc]

    ramp = Image.fromarray(np.array([[0, 128 << 8, 255 << 8]], dtype=np.uint16))
    assert shades(ramp) == shades(ramp, "TIFF") == [(0, 0, 0), (128, 128, 128), (255, 255, 255)]
    clear = Image.fromarray(np.array([[[9, 9, 9, 0], [9, 9, 9, 255]]], dtype=np.uint8), "RGBA")
    palette = Image.new("P", (2, 1))
    palette.putpalette([9] * 6)
    palette.putpixel((1, 0), 1)
    assert shades(clear) == [(255, 255, 255), (9, 9, 9)]
    assert shades(palette, transparency=0) == [(255, 255, 255), (9, 9, 9)]
    assert shades(Image.fromarray(np.array([[[9, 0], [9, 255]]], dtype=np.uint8), "LA")) == [(255, 255, 255), (9, 9, 9)]


@pytest.mark.parametrize("prompt", ["a <image> b", [{"role": "user", "content": "a <image>"}]])
@pytest.mark.parametrize("images", [None, []])
def test_places_in_a_row_whose_pictures_are_missing_are_not_text(config, prompt, images):
    with pytest.raises(
        ConfigError, match=r"^data\.images: rows\.jsonl:1: 1 places for pictures \(<image>\) in the prompt, and no pictures"
    ):
        seen(config, prompt, images=images)


def test_a_column_that_no_row_has_is_refused_where_it_is_named(config):
    rows = [{"prompt": "a", "image": "a.png"}, {"prompt": "b"}]
    require_column(config, rows)
    require_column(DataConfig(path=config.path, images="images"), rows)  # as a run's own file of settings has it
    named = DataConfig(path=config.path, images="imags")
    with pytest.raises(ConfigError, match=r"^data\.images=imags: no row of .*rows\.jsonl has this column; did you mean image\?"):
        require_column(named, rows)
    require_column(named, [*rows, {"prompt": "c", "imags": None}])


@pytest.mark.parametrize("change", [lambda url: url.replace("data:", "DATA:"), lambda url: url[:40] + "\r\n" + url[40:]])
def test_a_data_url_may_be_written_in_lines_and_in_capitals(change):
    assert picture(change(URL), "here", Limits()).size == (8, 8)


def test_a_larger_picture_is_made_smaller_or_refused(config):
    limited = config.model_copy(update={"max_pixels": 100})
    _, [found], _ = seen(limited, "x", images=[png(40, 10)])
    assert found.size == (20, 5) == found.image().size
    _, [whole], _ = seen(config, "x", images=[png(40, 10)])
    assert whole.hash != found.hash, "a cache must not take one for the other"
    with pytest.raises(ConfigError, match=r"40x10 pixels, data\.max_pixels is 100; raise it, or set data\.oversized=resize"):
        seen(limited.model_copy(update={"oversized": "error"}), "x", images=[png(40, 10)])


def test_a_file_travels_as_bytes_and_must_not_change(config, tmp_path):
    _, [found], _ = seen(config, "x", images=["a.png"])
    assert isinstance(found.source, Path)
    there = pickle.loads(pickle.dumps(found))
    (tmp_path / "a.png").write_bytes(png(shade=7))
    assert there.image().getpixel((0, 0)) == (200, 10, 20)
    with pytest.raises(Unreadable, match=r"a\.png: the picture was changed"):
        found.encoded()


def test_pictures_of_earlier_turns_are_decoded_once_while_there_is_room():
    first, second, third = (picture(png(shade=shade), str(shade), Limits()) for shade in (1, 2, 3))
    opened = Opened(most=2 * 3 * 8 * 8)
    image = opened.image(first)
    assert image.tobytes() == first.image().tobytes() and opened.image(first) is image
    opened.image(second)
    assert opened.image(first) is image, "the last used"
    opened.image(third)
    assert list(opened.images) == [first.hash, third.hash] and opened.bytes == 2 * 3 * 8 * 8
    large = picture(png(64, 64), "large", Limits())
    assert opened.image(large).size == (64, 64) and list(opened.images) == [large.hash], "one has room always"


def test_where_no_file_may_be_read_a_path_is_refused():
    with pytest.raises(Unreadable, match="no file is read here"):
        picture("a.png", "message 1", Limits())


def test_pairs_of_shapes_are_a_right_answer_and_another_of_its_kind():
    right = [row["answer"] for row in shapes(30, seed=4)]
    pairs = [*shape_pairs(30, seed=4)]
    assert [row["chosen"] for row in pairs] == right and all(row["rejected"] != row["chosen"] for row in pairs)
    kinds = {"count=": set("123456789"), "colour=": set("rgb"), "more=": set("rb")}
    assert all({row["chosen"], row["rejected"]} <= kinds[row["prompt"]] and "answer" not in row for row in pairs)
