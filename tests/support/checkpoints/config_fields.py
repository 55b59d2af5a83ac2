"""What a model's config says, and which of it is read."""

from __future__ import annotations

#: Fields that change nothing of what a model computes, or nothing of what is served.
HARMLESS = {
    *("architectures", "auto_map", "model_type", "transformers_version", "use_cache"),
    *("initializer_range", "init_std", "layerdrop", "pretraining_tp", "gradient_checkpointing"),
    *("bos_token_id", "pad_token_id", "chunk_size_feed_forward", "is_encoder_decoder"),
    *("attention_dropout", "hidden_dropout", "residual_dropout", "embedding_dropout", "dropout"),
    *("resid_pdrop", "embd_pdrop", "attn_pdrop", "activation_dropout", "slow_but_exact"),
    *("output_hidden_states", "output_attentions", "return_dict", "problem_type", "id2label"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    *("summary_first_dropout", "classifier_dropout", "label2id", "init_device", "attn_impl"),
    # Of training and of routers' losses.
    *("router_aux_loss_coef", "output_router_logits", "router_jitter_noise", "hidden_dropout_prob"),
    *("input_jitter_noise", "num_nextn_predict_layers"),
    # Of how tensors are stored: who opens the checkpoint reads it.
    "quantization_config",
    # Of state spaces: how they begin in training, and how far transformers goes at a time.
    *("time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual"),
    *("z_loss_coefficient", "chunk_size", "mamba_chunk_size", "use_mamba_kernels"),
    # Ours are float32 in any case, and heads say how wide they are; logits are those asked for.
    *(
        "mamba_ssm_cache_dtype",
        "expand",
        "time_step_rank",
        "num_logits_to_keep",
        "mtp_layers_block_type",
    ),
    # How transformers computes the same.
    *("reorder_and_upcast_attn", "attention_softmax_in_fp32", "attn_implementation"),
    *("enable_moe_fp32_combine", "moe_shared_expert_overlap"),
    *("scale_attention_softmax_in_fp32", "_sliding_window_pattern", "cache_implementation"),
    # Of positions where there is ALiBi, of gradients, and of decoders that are no decoders.
    *("learned_pos_emb", "embedding_fraction", "emb_pdrop", "is_decoder"),
}

#: Read where what transformers makes of them is not written: see `test_terse_configs`.
DERIVED = {
    *("sliding_window_pattern", "no_rope_layer_interval", "num_key_value_heads"),
    *("max_window_layers", "full_attn_idxs"),
}
