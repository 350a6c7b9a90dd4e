"""What settings of small models that see share, by family (`support.sighted_rows`)."""

from __future__ import annotations

from typing import Any

Row = tuple[dict[str, Any], dict[str, Any], dict[str, Any], list[str], dict[str, str]]  # as `support.sighted_rows.SIGHTED` says
LETTERS = "0123456789rgbcountlme= \n"
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.2}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}}
# As transformers always has it of Qwen3-VL, and vLLM where the model's configuration says so, as the published ones do.
MIXED = {"rope_parameters": {**MROPE["rope_parameters"], "mrope_interleaved": True}}
PATCHES = {"patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 1, "num_heads": 2}
QWEN = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
QWEN_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
IDEFICS = ["<image>", "<fake_token_around_image>", "<global-img>", *(f"<row_{i}_col_{j}>" for i in range(1, 4) for j in range(1, 4))]
SQUARE = {"height": 32, "width": 32}
NORMAL = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}

CLIP = {**TOWER, "model_type": "clip_vision_model", "patch_size": 8, "image_size": 32, "projection_dim": 32}
PINPOINTS = [[32, 64], [64, 32], [64, 64]]
DEEP = {**PATCHES, "depth": 2, "hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 64}
GLM = ["<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>", "<|begin_of_video|>", "<|end_of_video|>"]
GLM_IDS = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}
GEMMA = {
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "image_token": "<|image|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
    "audio_token": "<|audio|>",
    "video_token": "<|video|>",
}
LFM = {
    "image_token": "<image>",
    "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>",
    "image_thumbnail": "<|img_thumbnail|>",
}
SIGLIP = {**TOWER, "model_type": "siglip_vision_model", "patch_size": 8, "image_size": 32}
JANUS = {"image_token": "<image_placeholder>", "boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"}
JANUS_ID = {"image_token_id": "<image_placeholder>"}
LIGHTON = {"image_token": "<|image_pad|>", "image_break_token": "<|vision_pad|>", "image_end_token": "<|vision_end|>"}
PADDLE_IDS = {
    "image_token_id": "<|IMAGE_PLACEHOLDER|>",
    "video_token_id": "<|VIDEO|>",
    "vision_start_token_id": "<|IMAGE_START|>",
    "vision_end_token_id": "<|IMAGE_END|>",
}
