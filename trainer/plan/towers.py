"""What a vision tower adds to a run's memory and arithmetic: its activations by the method of memory.py, of patches in place of tokens.

Pure functions; no torch. A tower looks at each picture of a micro-batch once; that two answers to one prompt share a micro-batch is not
counted on, so this is the most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PIXELS = 1024 * 1024  # of a picture, where neither settings nor the family say it


@dataclass(frozen=True)
class Tower:
    """With what joins it to the text model."""

    parameters: int
    trained: bool
    layers: int
    hidden: int
    intermediate: int
    patches: float  # that become one token
    pixels: float  # of one token, or 0 where a picture has `tokens` whatever its size
    tokens: int = 0  # of a picture, or of one of its tiles; 0 where they follow from its size
    shown: int = 0  # tokens of pictures in a prompt

    @classmethod
    def of(cls, lm: Any) -> Tower | None:
        """`lm` may be without weights; None of a text model's. Raises AttributeError for a tower of another kind."""
        own, settings = getattr(lm.config, "vision_config", None), lm.config
        if own is None:
            return None
        core = lm.base_model if lm.base_model is not lm else lm.model
        text = {id(p) for p in (getattr(core, "language_model", None) or core.text_model).parameters()}
        text |= {id(p) for p in lm.get_output_embeddings().parameters()}
        parts = [p for p in lm.parameters() if id(p) not in text]
        hidden = _first(own, "embed_dim", "hidden_size")
        inner = _first(own, "intermediate_size") or round(hidden * own.mlp_ratio)
        side = _one(own.patch_size)
        whole = _one(getattr(own, "image_size", 0) or 0)
        seen = (whole // side) ** 2
        if tokens := getattr(settings, "mm_tokens_per_image", None):
            patches = seen / tokens
        elif ratio := getattr(settings, "downsample_ratio", None):
            patches = 1 / ratio**2
        else:
            merged = (
                _first(own, "spatial_merge_size", "pooling_kernel_size")
                or _first(settings, "spatial_merge_size", "scale_factor", "downsample_factor")
                or 1
            )
            patches = merged**2
        any_size = bool(_first(own, "spatial_merge_size", "pooling_kernel_size") or _first(settings, "spatial_merge_size")) or not whole
        return cls(
            sum(p.numel() for p in parts),
            any(p.requires_grad for p in parts),
            _first(own, "depth", "num_hidden_layers"),
            hidden,
            inner,
            patches,
            patches * side**2 if any_size else 0,
            0 if any_size else round(seen / patches),
        )

    def picture(self, most: int | None) -> int:
        """Tokens of a picture of so many pixels; of one tile where a family cuts pictures into tiles."""
        return self.tokens or max(1, round((most or PIXELS) / self.pixels))


def activations(tower: Tower, tokens: float, size: int, *, learning: bool, checkpointing: bool) -> float:
    """Bytes, for so many tokens of pictures, with numbers of `size` bytes; see `memory.activations`."""
    patches = tokens * tower.patches
    layer = patches * (2 * (4 + 2 * size) * tower.hidden + 4 * size * tower.intermediate + size * 4 * tower.hidden)
    if not (learning and tower.trained):
        return layer
    return (tower.layers + 1) * patches * tower.hidden * size + layer if checkpointing else tower.layers * layer


def flops(tower: Tower, picture: float) -> float:
    """Forward, of a token in a picture of so many tokens, all of whose patches see each other."""
    return tower.patches * (2 * tower.parameters + 4 * tower.layers * tower.hidden * picture * tower.patches)


def _first(settings: Any, *names: str) -> Any:
    return next((found for name in names if (found := getattr(settings, name, None))), None)


def _one(size: Any) -> int:
    return size if isinstance(size, int) else size[0]
