"""More families of models that see, most of them of 2026: as `support.sighted_rows.SIGHTED`."""

from __future__ import annotations

from support.sighted_parts import CLIP, DEEP, GLM, GLM_IDS, JANUS, JANUS_ID, MROPE, PINPOINTS, QWEN, QWEN_IDS, SIGLIP, TOWER, Row

LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_conv_kernel_dim": 3,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
PLACES = {"num_position_embeddings": 64}
IDS = {name: QWEN_IDS[name] for name in ("image_token_id", "video_token_id")}
KIMI = {"image_token": "<|media_pad|>", "video_token": "<|kimi_k25_video_placeholder|>"}
QIANFAN = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
NEWER: dict[str, Row] = {
    "qwen3_5": (LINEAR, {**DEEP, **PLACES}, {}, QWEN, QWEN_IDS),
    "qwen3_5_moe": (
        {**LINEAR, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
        {**DEEP, **PLACES},
        {},
        QWEN,
        QWEN_IDS,
    ),
    "glm_ocr": (MROPE, {**DEEP, "image_size": 64}, {}, GLM, GLM_IDS),
    "exaone4_5": (
        {"model_type": "exaone4", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
        {**DEEP, "num_key_value_heads": 2, "window_size": 32, "fullatt_block_indexes": [1]},
        {},
        QWEN,
        IDS,
    ),
    "kimi_k25": (
        {
            "model_type": "deepseek_v3",
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 32,
            "head_dim": 16,
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
        {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": 8,
            "pos_emb_height": 8,
            "pos_emb_width": 8,
        },
        {"projection_hidden_size": 32},
        ["<|media_begin|>", "<|media_end|>", *KIMI.values()],
        {
            "image_token_id": KIMI["image_token"],
            "video_token_id": KIMI["video_token"],
            "vision_start_token_id": "<|media_begin|>",
            "vision_end_token_id": "<|media_end|>",
        },
    ),
    "qianfan_ocr": (
        {"model_type": "qwen3"},
        {**TOWER, "patch_size": [8, 8], "image_size": [32, 32]},
        {"downsample_ratio": 0.5},
        [*QIANFAN.values(), "<image>"],
        {"image_token_id": "<IMG_CONTEXT>"},
    ),
    "hyperclovax_vision_v2": (
        {"model_type": "hyperclovax"},
        {**DEEP, "window_size": 32, "fullatt_block_indexes": [1]},
        {},
        QWEN,
        IDS,
    ),
    "deepseek_vl_hybrid": (
        {"model_type": "llama"},
        {**SIGLIP, "vision_use_head": False},
        {
            "high_res_vision_config": {
                "model_type": "sam_vision_model",
                "hidden_size": 32,
                "output_channels": 8,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 64,
                "patch_size": 8,
                "mlp_dim": 32,
                "window_size": 4,
                "global_attn_indexes": [1],
                "num_pos_feats": 16,
            }
        },
        [JANUS["image_token"]],
        JANUS_ID,
    ),
    "llava_next_video": (
        {"model_type": "llama"},
        CLIP,
        {"image_grid_pinpoints": PINPOINTS},
        ["<image>", "<video>"],
        {"image_token_id": "<image>", "image_token_index": "<image>", "video_token_id": "<video>", "video_token_index": "<video>"},
    ),
}
