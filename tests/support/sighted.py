"""Families of models that see, each as a tiny one with random weights and its own processor, in a folder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from support.sighted_newer import KIMI, QIANFAN
from support.sighted_parts import GEMMA, JANUS, LETTERS, LFM, LIGHTON, NORMAL, PINPOINTS, SQUARE, TEXT
from support.sighted_rows import REFUSED, SIGHTED
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

from trainer.chat.tokenizer import character_tokenizer

LIBRARY: Any = transformers  # whose names are found lazily


def _by_grid(name: str, images: str, videos: str, tokenizer: Any) -> Any:
    """Of a family whose pictures have any size."""
    sizes = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 1}
    looks = getattr(LIBRARY, images)(**sizes, size={"shortest_edge": 256, "longest_edge": 16_384})
    watches = getattr(LIBRARY, videos)(**sizes)
    return getattr(LIBRARY, name)(image_processor=looks, tokenizer=tokenizer, video_processor=watches)


def processor(kind: str, tokenizer: Any) -> Any:
    """Of the family, for pictures of some ten tokens."""
    if kind in LATER:
        return LATER[kind](tokenizer)
    if kind == "gemma3":
        return LIBRARY.Gemma3Processor(LIBRARY.Gemma3ImageProcessor(size=SQUARE, **NORMAL), tokenizer, image_seq_length=4)
    if kind == "idefics3":
        images = LIBRARY.Idefics3ImageProcessor(size={"longest_edge": 64}, max_image_size={"longest_edge": 32}, **NORMAL)
        return LIBRARY.Idefics3Processor(images, tokenizer, image_seq_len=4)
    if kind == "llava":
        images = LIBRARY.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=SQUARE)
        return LIBRARY.LlavaProcessor(
            images, tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1
        )
    images = LIBRARY.GotOcr2ImageProcessor(size=SQUARE, crop_to_patches=True, min_patches=1, max_patches=4, **NORMAL)
    return LIBRARY.InternVLProcessor(images, tokenizer, LIBRARY.InternVLVideoProcessor(size=SQUARE), image_seq_length=4)


def _glm(name: str, tokenizer: Any) -> Any:
    return _by_grid(f"{name}Processor", f"{name}ImageProcessor", f"{name}VideoProcessor", tokenizer)


def _gemma4(tokenizer: Any) -> Any:
    sizes = {"patch_size": 8, "pooling_kernel_size": 2}
    images, videos = LIBRARY.Gemma4ImageProcessor(**sizes, max_soft_tokens=70), LIBRARY.Gemma4VideoProcessor(**sizes)
    return LIBRARY.Gemma4Processor(LIBRARY.Gemma4AudioFeatureExtractor(), images, tokenizer, videos, image_seq_length=70)


def _llava(images: Any, kind: str, tokenizer: Any, **also: Any) -> Any:
    sizes = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return getattr(LIBRARY, kind)(image_processor=images, tokenizer=tokenizer, **sizes, **also)


def _video_llama_3(tokenizer: Any) -> Any:
    sizes = {"patch_size": 8, "merge_size": 2}
    images = LIBRARY.VideoLlama3ImageProcessor(**sizes, min_pixels=256, max_pixels=16_384)
    return LIBRARY.VideoLlama3Processor(images, tokenizer, LIBRARY.VideoLlama3VideoProcessor(**sizes))


def _lfm2_vl(tokenizer: Any) -> Any:
    sizes = {"encoder_patch_size": 8, "downsample_factor": 2, "min_image_tokens": 4, "max_image_tokens": 16}
    return LIBRARY.Lfm2VlProcessor(LIBRARY.Lfm2VlImageProcessor(tile_size=64, **sizes), tokenizer)


def _smolvlm(tokenizer: Any) -> Any:
    """Which writes the seconds of videos as words, by a package that is not in the lock."""
    if "num2words" not in sys.modules:
        sys.modules["num2words"] = ModuleType("num2words")
        sys.modules["num2words"].__spec__ = ModuleSpec("num2words", None)
        sys.modules["num2words"].num2words = str  # type: ignore[attr-defined]
    images = LIBRARY.SmolVLMImageProcessor(size={"longest_edge": 64}, max_image_size={"longest_edge": 32}, **NORMAL)
    return LIBRARY.SmolVLMProcessor(images, tokenizer, LIBRARY.SmolVLMVideoProcessor(), image_seq_len=4)


def _ovis2(tokenizer: Any) -> Any:
    images = LIBRARY.Ovis2ImageProcessor(size=SQUARE, crop_to_patches=True, min_patches=1, max_patches=4)
    return LIBRARY.Ovis2Processor(images, tokenizer, image_seq_length=16, image_token="<image>")


def _mistral3(tokenizer: Any) -> Any:
    return LIBRARY.PixtralProcessor(
        LIBRARY.PixtralImageProcessor(size={"longest_edge": 64}, patch_size=8), tokenizer, patch_size=8, spatial_merge_size=2
    )


def _kimi_k25(tokenizer: Any) -> Any:
    sizes = {"patch_size": 8, "merge_size": 2}
    images = LIBRARY.Kimi_K25ImageProcessor(**sizes, size={"max_height": 128, "max_width": 128})
    return LIBRARY.Kimi_K25Processor(image_processor=images, tokenizer=tokenizer, video_processor=LIBRARY.Kimi_K25VideoProcessor(**sizes))


def _llava_next_video(tokenizer: Any) -> Any:
    images = LIBRARY.LlavaNextImageProcessor(size={"shortest_edge": 32}, crop_size=SQUARE, image_grid_pinpoints=PINPOINTS)
    return _llava(images, "LlavaNextVideoProcessor", tokenizer, video_processor=LIBRARY.LlavaNextVideoVideoProcessor())


QWENS = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "exaone4_5": "Exaone4_5_Processor",
    "hyperclovax_vision_v2": "HyperCLOVAXVisionV2Processor",
}
QWEN3S = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
LATER: dict[str, Callable[[Any], Any]] = {
    **{kind: partial(_by_grid, name, "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor") for kind, name in QWENS.items()},
    **dict.fromkeys(QWEN3S, partial(_by_grid, "Qwen3VLProcessor", "Qwen2VLImageProcessor", "Qwen3VLVideoProcessor")),
    "glm4v": partial(_glm, "Glm4v"),
    "glm4v_moe": partial(_glm, "Glm4v"),
    "glm46v": partial(_glm, "Glm46V"),
    "deepseek_vl": lambda tokenizer: LIBRARY.DeepseekVLProcessor(
        LIBRARY.DeepseekVLImageProcessor(size=SQUARE, min_size=8, **NORMAL), tokenizer, num_image_tokens=16
    ),
    "janus": lambda tokenizer: LIBRARY.JanusProcessor(
        LIBRARY.JanusImageProcessor(size=SQUARE, min_size=8, **NORMAL), tokenizer, num_image_tokens=16
    ),
    "lighton_ocr": lambda tokenizer: LIBRARY.LightOnOcrProcessor(
        LIBRARY.PixtralImageProcessor(size={"longest_edge": 64}, patch_size=8), tokenizer, patch_size=8, spatial_merge_size=2
    ),
    "paddleocr_vl": lambda tokenizer: LIBRARY.PaddleOCRVLProcessor(
        LIBRARY.PaddleOCRVLImageProcessor(patch_size=8, merge_size=2, temporal_patch_size=1, min_pixels=256, max_pixels=16_384), tokenizer
    ),
    "smolvlm": _smolvlm,
    "llava_onevision": lambda tokenizer: LIBRARY.LlavaOnevisionProcessor(
        LIBRARY.LlavaOnevisionImageProcessor(size=SQUARE, image_grid_pinpoints=PINPOINTS),
        tokenizer,
        LIBRARY.LlavaOnevisionVideoProcessor(size=SQUARE),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
    ),
    "idefics2": lambda tokenizer: LIBRARY.Idefics2Processor(
        LIBRARY.Idefics2ImageProcessor(size={"shortest_edge": 32, "longest_edge": 64}, do_image_splitting=False, **NORMAL),
        tokenizer,
        image_seq_len=4,
    ),
    "gemma4": _gemma4,
    "mistral3": _mistral3,
    "llava_next": lambda tokenizer: _llava(
        LIBRARY.LlavaNextImageProcessor(size={"shortest_edge": 32}, crop_size=SQUARE, image_grid_pinpoints=PINPOINTS),
        "LlavaNextProcessor",
        tokenizer,
    ),
    "vipllava": lambda tokenizer: _llava(
        LIBRARY.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=SQUARE), "LlavaProcessor", tokenizer
    ),
    "ovis2": _ovis2,
    "video_llama_3": _video_llama_3,
    "lfm2_vl": _lfm2_vl,
    "glm_ocr": partial(_glm, "Glm46V"),
    "kimi_k25": _kimi_k25,
    "qianfan_ocr": lambda tokenizer: LIBRARY.QianfanOCRProcessor(
        LIBRARY.GotOcr2ImageProcessor(size=SQUARE, crop_to_patches=True, min_patches=1, max_patches=4, **NORMAL),
        tokenizer,
        image_seq_length=4,
    ),
    "deepseek_vl_hybrid": lambda tokenizer: LIBRARY.DeepseekVLHybridProcessor(
        LIBRARY.DeepseekVLHybridImageProcessor(size=SQUARE, min_size=8, high_res_size={"height": 64, "width": 64}, **NORMAL),
        tokenizer,
        num_image_tokens=16,
    ),
    "llava_next_video": _llava_next_video,
}


def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    tokenizer = character_tokenizer(LETTERS)
    tokens = (SIGHTED | REFUSED)[kind][3]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    named = {}
    if kind == "gemma3":
        named = {"boi_token": tokens[0], "eoi_token": tokens[1], "image_token": tokens[2]}
    if kind == "internvl":
        named = {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        }
    of_kind = {"gemma4": GEMMA, "lfm2_vl": LFM, "janus": JANUS, "lighton_ocr": LIGHTON}
    of_kind |= {"kimi_k25": KIMI, "qianfan_ocr": QIANFAN}
    of_kind |= {name: {"image_token": tokens[0]} for name in ("deepseek_vl", "deepseek_vl_hybrid", "paddleocr_vl")}
    named = of_kind.get(kind, named)
    if not named:
        return tokenizer
    again = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        extra_special_tokens=named,
    )
    return again


def sighted(kind: str, folder: Path) -> Path:
    """A folder with a model of the family, whose weights are drawn at random."""
    text, tower, whole, _, named = (SIGHTED | REFUSED)[kind]
    tokenizer = tokenizer_of(kind)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "eos", "bos")}
    named_ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in named.items()}
    torch.manual_seed(0)
    texts = {"vocab_size": len(tokenizer), **TEXT, **ids, **text}
    config = AutoConfig.for_model(kind, text_config=texts, vision_config=tower, **whole, **named_ids, **ids)
    lm = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if "bias" in name or "position" in name or "class_emb" in name or "projection" in name:
                parameter.normal_(0, 0.1)
    lm.save_pretrained(folder)
    processor(kind, tokenizer).save_pretrained(folder)
    return folder
