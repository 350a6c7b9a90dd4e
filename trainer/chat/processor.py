"""What a model that sees is fed: the tokens that stand for a picture, and its pixels, by transformers' processor for its family."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from PIL import Image
from transformers import PreTrainedTokenizerBase

from trainer.chat.messages import Unreadable
from trainer.chat.pictures import Limits, Picture
from trainer.chat.pictures import picture as look_at
from trainer.chat.tokens import within

KEPT_BYTES = 1 << 30  # of pixels that a process keeps for the next time
TEXTS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "text_replacement_offsets", "labels")
TYPES = ("mm_token_type_ids", "token_type_ids")  # by which a family is told which tokens are of pictures
SPECIALS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")  # of Qwen's
BORDERS = (SPECIALS[:2], ("<|begin_of_image|>", "<|end_of_image|>"), ("<|IMAGE_START|>", "<|IMAGE_END|>"))  # Qwen's, GLM's, PaddleOCR's
MADE = {"qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}  # for random weights


class Processor:
    """Of transformers, with what it has looked at."""

    def __init__(self, own: Any):
        self.own = own
        # What a template writes in the place of a picture; Qianfan-OCR has a mark of its own for that.
        self.place: str = getattr(own, "image_placeholder_token", own.image_token)
        known = own.tokenizer.get_vocab()
        start, end = next((pair for pair in BORDERS if pair[0] in known), ("", ""))
        self.bordered = bool(start)  # such families know by that where one picture ends and the next begins
        self.mark = f"{start}{self.place}{end}"  # what a text without a template has there
        self.kept: OrderedDict[str, dict[str, Any]] = OrderedDict()  # pixels by hash, the last used last
        self.bytes = 0
        self.looked = 0  # pictures made to pixels since the process began
        self._blank: dict[str, Any] = {}
        self._tokens: dict[tuple[int, int], str] = {}

    def expanded(self, text: str, pictures: Sequence[Picture]) -> str:
        """A prompt's text with all tokens of its pictures, each in its place. Raises Unreadable where there are other numbers of them."""
        parts = text.split(self.place)
        if self.bordered and "" in parts[1:-1]:
            raise Unreadable(f"two pictures side by side ({self.place}); a template for this model writes {self.mark}")
        if len(parts) - 1 != len(pictures):
            raise Unreadable(f"{len(pictures)} pictures, and {len(parts) - 1} places for them ({self.place}) in the prompt")
        return parts[0] + "".join(self.tokens(picture) + part for picture, part in zip(pictures, parts[1:], strict=True))

    def expanded_spans(self, text: str, spans: list[tuple[int, int]], pictures: Sequence[Picture]) -> tuple[str, list[tuple[int, int]]]:
        """`expanded`, and where the same parts of the text are in it. Raises Unreadable."""
        found, at, moved, grown = self.expanded(text, pictures), 0, [0] * (len(text) + 1), 0
        for picture in pictures:
            begin = text.index(self.place, at)
            moved[at : begin + 1] = [grown] * (begin + 1 - at)
            grown += len(self.tokens(picture)) - len(self.place)
            at = begin + 1
        moved[at:] = [grown] * (len(moved) - at)
        return found, [(begin + moved[begin], end + moved[end]) for begin, end in spans]

    def collapsed(self, ids: list[int], pictures: Sequence[Picture]) -> list[int]:
        """Of a prompt, with one token in the place of each picture, as engines take it that expand them. Raises Unreadable."""
        found, at, place = list[int](), 0, self.own.tokenizer.convert_tokens_to_ids(self.place)
        for picture in pictures:
            whole = within(self.tokens(picture), self.own.tokenizer)
            starts = (i for i in range(at, len(ids) - len(whole) + 1) if ids[i] == whole[0] and ids[i : i + len(whole)] == whole)
            if (start := next(starts, None)) is None:
                raise Unreadable(f"{picture.where}: its tokens are not in the prompt as they are alone")
            found += [*ids[at:start], place]
            at = start + len(whole)
        return found + ids[at:]

    def tokens(self, picture: Picture) -> str:
        """What stands for it; it follows from its size."""
        if picture.size not in self._tokens:
            self._look(picture)
        return self._tokens[picture.size]

    def pixels(self, picture: Picture) -> dict[str, Any]:
        """Tensors that the model takes, by name."""
        if picture.hash not in self.kept:
            return self._look(picture)
        self.kept.move_to_end(picture.hash)
        return self.kept[picture.hash]

    def blank(self) -> dict[str, Any]:
        """The pixels of a picture that shows nothing."""
        if not self._blank:
            self._blank = self._look(look_at(Image.new("RGB", (64, 64), (128, 128, 128)), "blank", Limits()))
        return self._blank

    def fed(self, ids: Any, pictures: Sequence[Picture], config: Any) -> dict[str, Any]:
        """What transformers' own model of this configuration takes beside the ids (1, L) of a sequence with these pictures."""
        found = self.own(text=[self.place * len(pictures)], images=[[picture.image() for picture in pictures]], return_tensors="pt")
        types = {name: (ids == image_id(config)).long() for name in TYPES if name in found}
        return {name: value for name, value in found.items() if name not in TEXTS} | types

    def examples(self, *, several: bool) -> list[tuple[tuple[Picture, ...], dict[str, Any]]]:
        """Pictures, and all tensors that transformers' processor makes of a prompt with them; but the mask, which hides nothing.

        Of two prompts. The second one has two pictures if prompts may have `several`: some families encode those otherwise than one.
        Raises Unreadable for such a family.
        """
        images, found = [], []
        for size in ((96, 64), (64, 96)):
            first, second = Image.radial_gradient("L").resize(size), Image.linear_gradient("L").resize(size)
            images.append(Image.merge("RGB", (first, second, second.transpose(Image.Transpose.ROTATE_180))))
        for shown in ([images[0]], images[::-1] if several else [images[1]]):
            text, pictures = self.mark * len(shown), tuple(look_at(image, "an example", Limits()) for image in shown)
            fed = self.own(text=[text], images=[shown], return_tensors="pt")
            if fed["input_ids"][0].tolist() != self.own.tokenizer(self.expanded(text, pictures))["input_ids"]:
                fix = "; set data.max_images=1" if len(shown) > 1 else ""
                raise Unreadable(f"its processor makes other tokens of a prompt with {len(shown)} pictures than of each by itself{fix}")
            found.append((pictures, {name: value for name, value in fed.items() if name not in ("attention_mask", "labels")}))
        return found

    def _look(self, picture: Picture) -> dict[str, Any]:
        said: dict[str, Any] = {"text_kwargs": {"return_text_replacement_offsets": True}, "return_tensors": "pt"}
        try:
            found = self.own(text=[self.place], images=[[picture.image()]], **said)
        except Unreadable:
            raise
        except Exception as error:  # of transformers' own code, such as pictures too narrow for a patch
            raise Unreadable(f"{picture.where}: the model's processor cannot take it: {error}") from error
        if "text_replacement_offsets" not in found:
            raise Unreadable(f"{picture.where}: the model's processor, {type(self.own).__name__}, does not say which tokens stand for it")
        [places] = found["text_replacement_offsets"]
        if len(places) != 1:
            known = f"the model's processor, {type(self.own).__name__}"
            raise Unreadable(f"{picture.where}: {known}, puts {len(places)} pictures in the place of {self.place}, not one")
        [place] = places
        self._tokens[picture.size] = place["replacement"]
        self.looked += 1
        kept = {name: value for name, value in found.items() if name not in TEXTS}
        self.kept[picture.hash] = kept
        self.bytes += _bytes(kept)
        while self.bytes > KEPT_BYTES and len(self.kept) > 1:
            self.bytes -= _bytes(self.kept.popitem(last=False)[1])
        return kept


def image_id(config: Any) -> int:
    """Of the token that a picture's features replace."""
    found = getattr(config, "image_token_id", None)
    return found if found is not None else config.image_token_index


def _bytes(tensors: dict[str, Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def processor_of(tokenizer: PreTrainedTokenizerBase) -> Processor | None:
    """The one that the tokenizer is a part of; None of a text model's."""
    return vars(tokenizer).get("flotilla_processor")


def attach(tokenizer: PreTrainedTokenizerBase, own: Any) -> None:
    """Have `processor_of` find the processor."""
    vars(tokenizer)["flotilla_processor"] = Processor(own)
    if tokenizer.chat_template is None and getattr(own, "chat_template", None):
        tokenizer.chat_template = own.chat_template


def make(tokenizer: Any, init: dict[str, Any]) -> Any:
    """A processor for a model of Qwen's with random weights, whose patches are those of its configuration; its tokens are added."""
    import transformers

    library: Any = transformers  # whose names are found lazily
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIALS)})
    vision = library.AutoConfig.for_model(init["model_type"], vision_config=init.get("vision_config")).vision_config
    sizes = {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size, "temporal_patch_size": vision.temporal_patch_size}
    unit = (vision.patch_size * vision.spatial_merge_size) ** 2
    limits = {"shortest_edge": unit, "longest_edge": 16_384 * unit}
    images = library.Qwen2VLImageProcessor(**sizes, size=limits)
    kind = getattr(library, MADE[init["model_type"]])
    video = getattr(library, "Qwen3VLVideoProcessor" if init["model_type"] == "qwen3_vl" else "Qwen2VLVideoProcessor")
    return kind(images, tokenizer, video(**sizes))
