"""Families of models that see: settings that make each small. `support.sighted` makes them."""

from __future__ import annotations

from typing import Any

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
RECURRENT = ("lfm2_vl",)  # sequences get rows of their own, and the hf engine does not sample from it
ONE_BY_ONE = ("gemma4", "llava_next", "mistral3", "video_llama_3", "lighton_ocr")  # whose pictures differ in shape
QUICK = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "idefics3", "llava", "internvl")  # that `make test` looks at; others are slow
# Settings of the text model, of the tower and of the whole; tokens that are added, and those that settings name.
SIGHTED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], list[str], dict[str, str]]] = {
    "qwen2_vl": (MROPE, {**PATCHES, "depth": 2, "embed_dim": 32, "hidden_size": 64}, {}, QWEN, QWEN_IDS),
    "qwen2_5_vl": (
        MROPE,
        {
            **PATCHES,
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 32,
            "out_hidden_size": 64,
            "window_size": 32,
            "fullatt_block_indexes": [1],
        },
        {},
        QWEN,
        QWEN_IDS,
    ),
    "qwen3_vl": (
        MIXED,
        {**PATCHES, "depth": 2, "hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
        {},
        QWEN,
        QWEN_IDS,
    ),
    "gemma3": (
        {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 32},
        {**TOWER, "patch_size": 8, "image_size": 32},
        {"mm_tokens_per_image": 4},
        ["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
        {"boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>", "image_token_index": "<image_soft_token>"},
    ),
    "idefics3": (
        {"model_type": "llama"},
        {**TOWER, "patch_size": 8, "image_size": 32},
        {"scale_factor": 2},
        IDEFICS,
        {"image_token_id": "<image>"},
    ),
    "llava": (
        {"model_type": "llama"},
        {**TOWER, "model_type": "clip_vision_model", "patch_size": 8, "image_size": 32, "projection_dim": 32},
        {},
        ["<image>"],
        {"image_token_id": "<image>", "image_token_index": "<image>"},
    ),
    "internvl": (
        {"model_type": "qwen2"},
        {**TOWER, "patch_size": [8, 8], "image_size": [32, 32]},
        {"downsample_ratio": 0.5},
        ["<IMG_CONTEXT>", "<img>", "</img>", "<video>"],
        {"image_token_id": "<IMG_CONTEXT>"},
    ),
    "qwen3_vl_moe": (
        {**MIXED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        {**DEEP, "deepstack_visual_indexes": [0]},
        {},
        QWEN,
        QWEN_IDS,
    ),
    "glm4v": (MROPE, {**DEEP, "image_size": 64}, {}, GLM, GLM_IDS),
    "gemma4": (
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 16,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "global_head_dim": 32,
            "num_kv_shared_layers": 0,
        },
        {
            **TOWER,
            "patch_size": 8,
            "pooling_kernel_size": 2,
            "head_dim": 16,
            "num_key_value_heads": 2,
            "global_head_dim": 16,
            "position_embedding_size": 128,
        },
        {"audio_config": None},
        [*GEMMA.values()],
        {f"{name}_id": token for name, token in GEMMA.items()},
    ),
    "mistral3": (
        {"model_type": "mistral"},
        {**TOWER, "model_type": "pixtral", "patch_size": 8, "image_size": 64, "head_dim": 16},
        {"spatial_merge_size": 2},
        ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        {"image_token_id": "[IMG]", "image_token_index": "[IMG]"},
    ),
    "llava_next": (
        {"model_type": "llama"},
        CLIP,
        {"image_grid_pinpoints": PINPOINTS},
        ["<image>"],
        {"image_token_id": "<image>", "image_token_index": "<image>"},
    ),
    "vipllava": (
        {"model_type": "llama"},
        CLIP,
        {"vision_feature_layers": [-1, -2]},
        ["<image>"],
        {"image_token_id": "<image>", "image_token_index": "<image>"},
    ),
    "ovis2": (
        {"model_type": "qwen2"},
        {**TOWER, "patch_size": 8, "image_size": 32, "vocab_size": 64, "hidden_stride": 1, "num_visual_indicator_tokens": 5},
        {"hidden_size": 64},
        ["<image>", "<IMG_START>", "<IMG_END>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_ATOM>"],
        {"image_token_id": "<IMG_ATOM>"},
    ),
    "video_llama_3": (
        {"model_type": "qwen2"},
        {**TOWER, "patch_size": 8},
        {},
        ["<|image_pad|>", "<|video_pad|>"],
        {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
    ),
    "lfm2_vl": (
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_multiple_of": 32},
        {**TOWER, "model_type": "siglip2_vision_model", "patch_size": 8, "num_patches": 64, "vision_use_head": False},
        {"downsample_factor": 2, "projector_hidden_size": 64},
        [*LFM.values(), *(f"<|img_row_{i}_col_{j}|>" for i in (1, 2) for j in (1, 2))],
        {"image_token_id": "<image>"},
    ),
    "glm46v": ({**MROPE, "model_type": "glm4v_text"}, {**DEEP, "model_type": "glm4v_vision", "image_size": 64}, {}, GLM, GLM_IDS),
    "glm4v_moe": (
        {
            "rope_parameters": {**MROPE["rope_parameters"], "partial_rotary_factor": 1.0},
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
        },
        {**DEEP, "image_size": 64},
        {},
        GLM,
        GLM_IDS,
    ),
    "deepseek_vl": ({"model_type": "llama"}, {**SIGLIP, "vision_use_head": False}, {}, [JANUS["image_token"]], JANUS_ID),
    "janus": (
        {"model_type": "llama"},
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
            "projection_dim": 64,
            "mlp_ratio": 1.0,
            "num_image_tokens": 16,
        },
        {
            "vq_config": {
                "embed_dim": 8,
                "num_embeddings": 16,
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1,
                "num_patches": 4,
                "projection_dim": 64,
                "image_token_embed_dim": 32,
                "latent_channels": 32,
            }
        },
        [*JANUS.values()],
        JANUS_ID,
    ),
    "lighton_ocr": (
        {"model_type": "qwen3"},
        {**TOWER, "model_type": "pixtral", "patch_size": 8, "image_size": 64, "head_dim": 16},
        {"spatial_merge_size": 2},
        [*LIGHTON.values()],
        {"image_token_id": "<|image_pad|>"},
    ),
    "paddleocr_vl": (
        MROPE,
        {**TOWER, "patch_size": 8, "image_size": 32, "spatial_merge_size": 2, "temporal_patch_size": 1},
        {},
        [*PADDLE_IDS.values()],
        PADDLE_IDS,
    ),
    "smolvlm": (
        {"model_type": "llama"},
        {**TOWER, "patch_size": 8, "image_size": 32},
        {"scale_factor": 2},
        IDEFICS,
        {"image_token_id": "<image>"},
    ),
}
# That are refused, or for prompts of one picture alone.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], list[str], dict[str, str]]] = {
    "llava_onevision": (
        {"model_type": "qwen2"},
        SIGLIP,
        {"image_grid_pinpoints": PINPOINTS, "vision_feature_select_strategy": "full"},
        ["<image>", "<video>"],
        {"image_token_id": "<image>", "image_token_index": "<image>", "video_token_id": "<video>", "video_token_index": "<video>"},
    ),
    "idefics2": (
        {"model_type": "mistral"},
        {**TOWER, "patch_size": 8, "image_size": 64},
        {
            "perceiver_config": {
                "hidden_size": 64,
                "resampler_n_latents": 4,
                "resampler_depth": 1,
                "resampler_n_heads": 2,
                "resampler_head_dim": 32,
                "num_key_value_heads": 2,
            }
        },
        ["<image>", "<fake_token_around_image>", "<end_of_utterance>"],
        {"image_token_id": "<image>"},
    ),
}
