"""What a model that sees is fed beside token ids: pixels, positions in three dimensions. Runs in ranks and engines.

transformers' models put features of pictures at their tokens in the order of a micro-batch's rows, so pixels are laid in that order.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from trainer.chat.processor import TYPES, Processor, image_id
from trainer.episodes import Batch
from trainer.errors import ConfigError

NEVER = -1e9  # a logit of tokens that stand for pictures: no probability, and no infinity to multiply with 0

PIXELS, SHOWN = "pixels/", "shown_U"  # names of inputs: what the tower reads, and which of its outputs stand at each place
BLANK = "blank/"  # what the tower reads where there is nothing to see
TOGETHER = {"pixel_values", "pixel_attention_mask", "image_grid_thw"}  # tensors of pictures that a tower takes end to end
GRIDS = "image_grid_thw"  # a picture's size in patches, of families whose pictures have any size

Seen = Sequence[tuple[int, int, tuple[Any, ...]]]  # as Batch.seen_S


def counted(batches: Sequence[Batch]) -> dict[str, int]:
    """How many pictures these micro-batches have, and how often the tower reads one for them, as each does once; nothing of texts."""
    each = [{picture.hash for _, _, pictures in batch.seen_S for picture in pictures} for batch in batches]
    distinct = set[str]().union(*each)
    return {"pictures": len(distinct), "pictures/encoded": sum(map(len, each))} if distinct else {}


def reads_pictures(lm: Any) -> bool:
    return getattr(lm.config, "vision_config", None) is not None


def unsampled(lm: Any) -> list[int]:
    """Ids of tokens that stand for pictures and the like: no answer has them, and their probability is 0. None of a text model."""
    if not reads_pictures(lm):
        return []
    names = [f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index")]
    found = {getattr(lm.config, name, None) for name in names}
    return sorted(i for i in found if isinstance(i, int) and 0 <= i < lm.config.get_text_config().vocab_size)


def barred(logits: torch.Tensor, never: list[int]) -> torch.Tensor:
    """With no probability for these."""
    return logits.index_fill(-1, torch.tensor(never, device=logits.device), NEVER) if never else logits


class Sight:
    """Of one model, as it is in this process."""

    def __init__(self, lm: Any, processor: Processor):
        self.processor, self.image = processor, image_id(lm.config)
        self.core = lm.base_model if lm.base_model is not lm else lm.model
        known = inspect.signature(self.core.forward).parameters
        self.types = next((name for name in TYPES if name in known), None)
        self.apart = not TOGETHER.issuperset(processor.blank())  # pictures differ in shape, so the tower is called for each

    def look(self, batch: Batch) -> None:
        """Give a micro-batch what its pictures are.

        One without any gets a blank one, which changes nothing: ranks that reduce gradients, or gather weights, do so together, for the
        tower too. Raises ValueError for tokens of pictures that are not there.
        """
        if any(pictures for _, _, pictures in batch.seen_S):
            batch.inputs = self.inputs(batch.input_ids_RL, batch.seen_S, batch.position_ids_RL)
        elif bool((batch.input_ids_RL == self.image).any()):
            raise ValueError("sequences have tokens that stand for pictures, and no pictures")
        else:
            batch.inputs = {f"{BLANK}{name}": tensor for name, tensor in self.processor.blank().items()}

    def inputs(self, ids_RL: torch.Tensor, seen_S: Seen, positions_RL: torch.Tensor) -> dict[str, torch.Tensor]:
        """Arguments of the model beside `ids_RL`, of which `seen_S` are the sequences, row by row; on the CPU.

        Raises ValueError where pictures and their tokens are not as many: what the model would see then is something else.
        """
        shown = [picture for _, _, pictures in seen_S for picture in pictures]
        once = {picture.hash: self.processor.pixels(picture) for picture in shown}
        grids, numbers = None, {one: i for i, one in enumerate(once)}
        if self.apart:
            found = {f"{PIXELS}{i}/{name}": tensor for i, pixels in enumerate(once.values()) for name, tensor in pixels.items()}
            found[SHOWN] = torch.tensor([numbers[picture.hash] for picture in shown])
        else:
            found = self._pixels(list(once.values()))
            units = torch.tensor([_units(pixels) for pixels in once.values()])
            first, order = units.cumsum(0) - units, [numbers[picture.hash] for picture in shown]
            found[SHOWN] = torch.cat([torch.arange(int(first[i]), int(first[i] + units[i])) for i in order])
        if GRIDS in once[shown[0].hash]:
            grids = torch.cat([once[picture.hash][GRIDS] for picture in shown])
        of_picture_RL = (ids_RL == self.image).long()
        if self.types:
            found[self.types] = of_picture_RL
        if hasattr(self.core, "get_rope_index"):
            found["position_ids"] = self._positions(ids_RL, of_picture_RL, seen_S, positions_RL, grids)
        return found

    @staticmethod
    def _pixels(each: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Of several pictures, end to end. Idefics' have the axis of a batch before that."""
        axis = int(_nested(each[0]))
        return {f"{PIXELS}{name}": torch.cat([pixels[name] for pixels in each], axis) for name in each[0]}

    def _positions(
        self, ids_RL: torch.Tensor, of_picture_RL: torch.Tensor, seen_S: Seen, positions_RL: torch.Tensor, grids: torch.Tensor | None
    ) -> torch.Tensor:
        """(4, R, L): where a token stands in its sequence, which shows borders, and its time, height and width (Qwen2-VL, section 2.1)."""
        longest = max(length for _, length, _ in seen_S)
        where_SL = torch.tensor([[begin] for begin, _, _ in seen_S]) + torch.arange(longest)
        real_SL = torch.arange(longest) < torch.tensor([[length] for _, length, _ in seen_S])
        where_SL = where_SL.clamp(max=ids_RL.numel() - 1)
        ids, kinds = ids_RL.reshape(-1)[where_SL], of_picture_RL.reshape(-1)[where_SL]
        found, _ = self.core.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grids, attention_mask=real_SL.long())
        flat_4N = positions_RL.expand(ids_RL.shape).reshape(1, -1).repeat(4, 1)
        flat_4N[1:, where_SL[real_SL]] = found[:, real_SL]
        return flat_4N.unflatten(1, ids_RL.shape)


def _nested(pixels: dict[str, torch.Tensor]) -> bool:
    return pixels["pixel_values"].dim() == 5


def _units(pixels: dict[str, torch.Tensor]) -> int:
    """How many of the tower's outputs a picture has: one, or one for each of its tiles."""
    return 1 if GRIDS in pixels else pixels["pixel_values"].size(int(_nested(pixels)))


def arguments(core: Any, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Of the model, from what `Sight.inputs` gives: its tower reads each picture once, wherever it is shown."""
    if SHOWN not in inputs:
        return {}
    shown_U, groups = inputs[SHOWN], _groups(inputs)
    each = [core.get_image_features(**pixels, return_dict=True) for pixels in groups.values()]
    found = each[0]
    layers = getattr(found, "deepstack_features", None)  # Qwen3-VL's
    if "" in groups:
        found.pooler_output = _taken(found.pooler_output, shown_U)
        if layers is not None:
            found.deepstack_features = [_taken(layer, shown_U) for layer in layers]
    else:
        one_by_one = [each[i] for i in shown_U.tolist()]
        found.pooler_output = _joined([one.pooler_output for one in one_by_one])
        if layers is not None:
            found.deepstack_features = [_joined([one.deepstack_features[i] for one in one_by_one]) for i in range(len(layers))]
    others = {name: tensor for name, tensor in inputs.items() if name != SHOWN and not name.startswith(PIXELS)}
    return {**others, "mm_encoder_outputs": {"image": found}}


def _groups(inputs: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Arguments of each call of the tower: "" for one of all pictures, else by a picture's number."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in inputs.items():
        if name.startswith(PIXELS):
            group, _, argument = name.removeprefix(PIXELS).rpartition("/")
            found.setdefault(group, {})[argument] = tensor
    return found


def _joined(features: list[Any]) -> Any:
    """Of several pictures; lists have a tensor for each picture or tile."""
    return torch.cat(features) if isinstance(features[0], torch.Tensor) else [one for each in features for one in each]


def unseen(core: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor | float:
    """0, for which the tower has read a blank picture where there is one."""
    pixels = {name.removeprefix(BLANK): tensor for name, tensor in inputs.items() if name.startswith(BLANK)}
    if not pixels:
        return 0.0
    found = core.get_image_features(**pixels, return_dict=True)
    parts = [*found.pooler_output, *(part for layer in getattr(found, "deepstack_features", None) or () for part in layer)]
    return 0.0 * torch.stack([part.sum() for part in parts]).sum()


def _taken(features: Any, shown_U: torch.Tensor) -> Any:
    return features[shown_U] if isinstance(features, torch.Tensor) else [features[i] for i in shown_U.tolist()]


def init(given: dict[str, Any], known: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Settings of a model with random weights: its own, and the ids of the tokenizer that was made for it. Raises ConfigError."""
    text, tower = (dict(given.get(part) or {}) for part in ("text_config", "vision_config"))
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "eos", "bos")}
    for part, inner in (("", given), ("text_config", text), ("vision_config", tower)):
        at = known[part] if part else known
        for key in inner:
            if key not in at and key != "head_dim":
                near = difflib.get_close_matches(key, at, n=1)
                name = f"model.init.{part}{'.' if part else ''}{key}"
                raise ConfigError(f"{name}: there is no such setting" + (f"; did you mean {near[0]}?" if near else ""))
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    names |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    own = {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    return {**own, **ids, **given, "text_config": {"vocab_size": len(tokenizer), **ids, **text}, "vision_config": tower}
