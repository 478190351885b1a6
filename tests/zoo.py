# ruff: noqa: C408
"""A zoo of architectures, each small and with random weights: transformers' by their configs,
torchvision's where it is installed, and classics written here. Every one takes a batch and gives
tensors.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.classics import (
    VOCAB,
    Capsule,
    Cells,
    Diffusion,
    Experts,
    Flow,
    Forces,
    Graph,
    Physics,
    Quantized,
    Recommender,
    Recurrent,
    Ring,
    Spectral,
    Superres,
    Variational,
    WaveNet,
)

Data = Callable[[int], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """One architecture. data(batch): its inputs. trains: a training step is meaningful. breaks:
    Dynamo breaks its graph (data-dependent Python); numbered: it makes the batch a number, so that
    each has a graph; dynamic: it takes any batch; exports: torch.export takes it. sensitive: its
    gradients move by more than eager's distance from float64 when every parameter is off by a
    rounding (50 batch norms in a row, over few points)."""

    make: Callable[[], nn.Module]
    data: Data
    trains: bool = True
    breaks: bool = False
    numbered: bool = False
    dynamic: bool = True
    exports: bool = True
    sensitive: bool = False


class Named(nn.Module):
    """Calls a model with its inputs by name and returns the floating point tensors of its
    result."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        out = self.model(**dict(zip(self.names, inputs, strict=True)))
        values = out.values() if hasattr(out, "values") else out
        return tuple(t for t in values if isinstance(t, Tensor) and t.is_floating_point())


def hf(
    kind: str, config: str, names: str, data: Data, changes: dict[str, Any], **rest: Any
) -> Case:
    """transformers.<kind>(transformers.<config>(**changes)), called with inputs of these names."""

    def make() -> nn.Module:
        transformers = importlib.import_module("transformers")
        cfg = getattr(transformers, config)(**changes)
        return Named(getattr(transformers, kind)(cfg), tuple(names.split()))

    return Case(make, data, **rest)


def tokens(batch: int) -> tuple[Tensor, ...]:
    return (torch.randint(3, VOCAB, (batch, 16)),)


def pairs(batch: int) -> tuple[Tensor, ...]:
    return (torch.randint(3, VOCAB, (batch, 16)), torch.randint(3, VOCAB, (batch, 10)))


def masked(batch: int) -> tuple[Tensor, ...]:
    mask = torch.ones(batch, 16, dtype=torch.int64)
    mask[0, 11:] = 0
    return (*tokens(batch), mask)


def images(side: int) -> Data:
    return lambda batch: (torch.randn(batch, 3, side, side),)


def waves(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 1600),)


# What most decoders and encoders call their sizes.
TEXT = dict(
    num_hidden_layers=2, num_attention_heads=4, hidden_size=32, intermediate_size=64,
    vocab_size=VOCAB, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
LM = TEXT | dict(num_key_value_heads=2, use_cache=False)
VISION = dict(
    num_hidden_layers=2, num_attention_heads=4, hidden_size=32, intermediate_size=64, image_size=32,
    patch_size=8,
)  # fmt: skip
NO_DROP = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
SPEECH = dict(
    num_hidden_layers=2, num_attention_heads=4, hidden_size=32, intermediate_size=64,
    vocab_size=VOCAB, conv_dim=(16, 16, 16), conv_stride=(5, 4, 2), conv_kernel=(10, 4, 2),
    num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, apply_spec_augment=False,
    layerdrop=0.0, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
    feat_proj_dropout=0.0, final_dropout=0.0,
)  # fmt: skip
SEQ2SEQ = dict(
    vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64,
    use_cache=False, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, pad_token_id=0,
)  # fmt: skip
SWIN = dict(
    image_size=32,
    patch_size=4,
    embed_dim=16,
    depths=[2, 2],
    num_heads=[2, 4],
    window_size=4,
    drop_path_rate=0.0,
)
RESNET = dict(
    embedding_size=8,
    hidden_sizes=[16, 32],
    depths=[1, 1],
    layer_type="basic",
    out_features=["stage2"],
)


def resnet_backbone() -> Any:
    return importlib.import_module("transformers").ResNetConfig(**RESNET)


def detr(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 3, 64, 64),)


HF: dict[str, Case] = {
    # ---- text, decoders
    "mistral": hf(
        "MistralForCausalLM", "MistralConfig", "input_ids", tokens, LM | dict(sliding_window=8)
    ),
    "mixtral": hf(
        "MixtralForCausalLM",
        "MixtralConfig",
        "input_ids",
        tokens,
        LM | dict(num_local_experts=4, num_experts_per_tok=2),
    ),
    "qwen2": hf("Qwen2ForCausalLM", "Qwen2Config", "input_ids attention_mask", masked, LM),
    "qwen3": hf("Qwen3ForCausalLM", "Qwen3Config", "input_ids", tokens, LM | dict(head_dim=8)),
    "qwen3_moe": hf(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        "input_ids",
        tokens,
        LM | dict(head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    ),
    "gemma2": hf(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        "input_ids",
        tokens,
        LM | dict(head_dim=8, sliding_window=8),
    ),
    "gemma3": hf(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        "input_ids",
        tokens,
        LM | dict(head_dim=8, sliding_window=8),
    ),
    "phi3": hf("Phi3ForCausalLM", "Phi3Config", "input_ids", tokens, LM),
    "falcon": hf(
        "FalconForCausalLM",
        "FalconConfig",
        "input_ids",
        tokens,
        TEXT | dict(use_cache=False, alibi=False, new_decoder_architecture=False),
    ),
    "falcon_alibi": hf(
        "FalconForCausalLM",
        "FalconConfig",
        "input_ids attention_mask",
        masked,
        TEXT | dict(use_cache=False, alibi=True),
    ),
    "opt": hf(
        "OPTForCausalLM",
        "OPTConfig",
        "input_ids",
        tokens,
        TEXT | dict(ffn_dim=64, word_embed_proj_dim=32, use_cache=False, dropout=0.0),
    ),
    "bloom": hf(
        "BloomForCausalLM",
        "BloomConfig",
        "input_ids",
        tokens,
        dict(n_layer=2, n_head=4, hidden_size=32, vocab_size=VOCAB, use_cache=False),
    ),
    "gpt_neox": hf(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", "input_ids", tokens, TEXT | dict(use_cache=False)
    ),
    "gptj": hf(
        "GPTJForCausalLM",
        "GPTJConfig",
        "input_ids",
        tokens,
        dict(
            n_layer=2,
            n_head=4,
            n_embd=32,
            rotary_dim=4,
            vocab_size=VOCAB,
            use_cache=False,
            n_positions=64,
        ),
    ),
    "cohere": hf("CohereForCausalLM", "CohereConfig", "input_ids", tokens, LM),
    "deepseek_v3": hf(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        "input_ids",
        tokens,
        LM
        | dict(
            num_key_value_heads=4,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            moe_intermediate_size=32,
        ),
    ),
    "gpt_oss": hf(
        "GptOssForCausalLM",
        "GptOssConfig",
        "input_ids",
        tokens,
        LM | dict(head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
    ),
    "mamba": hf(
        "MambaForCausalLM",
        "MambaConfig",
        "input_ids",
        tokens,
        dict(vocab_size=VOCAB, hidden_size=32, state_size=4, num_hidden_layers=2, use_cache=False),
    ),
    "mamba2": hf(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        "input_ids",
        tokens,
        dict(
            vocab_size=VOCAB,
            hidden_size=32,
            state_size=8,
            num_hidden_layers=2,
            num_heads=8,
            head_dim=8,
            n_groups=2,
            chunk_size=8,
            use_cache=False,
        ),
    ),
    "rwkv": hf(
        "RwkvForCausalLM",
        "RwkvConfig",
        "input_ids",
        tokens,
        dict(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=2,
            context_length=64,
            use_cache=False,
        ),
    ),
    "recurrent_gemma": hf(
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaConfig",
        "input_ids",
        tokens,
        LM | dict(lru_width=32, attention_window_size=8, num_hidden_layers=3),
    ),
    "xlstm": hf(
        "xLSTMForCausalLM",
        "xLSTMConfig",
        "input_ids",
        tokens,
        dict(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=2,
            num_blocks=2,
            num_heads=4,
            use_cache=False,
            chunk_size=8,
        ),
    ),
    # ---- text, encoders
    "roberta": hf(
        "RobertaForMaskedLM", "RobertaConfig", "input_ids attention_mask", masked, TEXT | NO_DROP
    ),
    "albert": hf(
        "AlbertModel", "AlbertConfig", "input_ids", tokens, TEXT | NO_DROP | dict(embedding_size=16)
    ),
    "distilbert": hf(
        "DistilBertModel",
        "DistilBertConfig",
        "input_ids attention_mask",
        masked,
        dict(
            n_layers=2,
            n_heads=4,
            dim=32,
            hidden_dim=64,
            vocab_size=VOCAB,
            max_position_embeddings=64,
            dropout=0.0,
            attention_dropout=0.0,
        ),
    ),
    "electra": hf(
        "ElectraModel",
        "ElectraConfig",
        "input_ids",
        tokens,
        TEXT | NO_DROP | dict(embedding_size=16),
    ),
    "deberta": hf(
        "DebertaModel",
        "DebertaConfig",
        "input_ids attention_mask",
        masked,
        TEXT | NO_DROP | dict(relative_attention=True, pos_att_type=["c2p", "p2c"]),
        breaks=True,
    ),
    "deberta_v2": hf(
        "DebertaV2Model",
        "DebertaV2Config",
        "input_ids attention_mask",
        masked,
        TEXT
        | NO_DROP
        | dict(
            relative_attention=True,
            pos_att_type=["c2p", "p2c"],
            position_buckets=8,
            share_att_key=True,
        ),
    ),
    "xlnet": hf(
        "XLNetModel",
        "XLNetConfig",
        "input_ids",
        tokens,
        dict(vocab_size=VOCAB, d_model=32, n_layer=2, n_head=4, d_inner=64, dropout=0.0),
    ),
    "longformer": hf(
        "LongformerModel",
        "LongformerConfig",
        "input_ids attention_mask",
        masked,
        TEXT | NO_DROP | dict(attention_window=[8, 8]),
        breaks=True,
        exports=False,
    ),
    "big_bird": hf(
        "BigBirdModel",
        "BigBirdConfig",
        "input_ids",
        tokens,
        TEXT | NO_DROP | dict(attention_type="original_full"),
    ),
    "big_bird_sparse": hf(
        "BigBirdModel",
        "BigBirdConfig",
        "input_ids",
        lambda b: (torch.randint(3, VOCAB, (b, 96)),),
        TEXT
        | NO_DROP
        | dict(
            attention_type="block_sparse",
            block_size=8,
            num_random_blocks=2,
            max_position_embeddings=128,
        ),
        # Its random blocks come from numpy, anew at every step
        trains=False,
        breaks=True,
    ),
    "fnet": hf(
        "FNetModel",
        "FNetConfig",
        "input_ids",
        tokens,
        TEXT | dict(hidden_dropout_prob=0.0, use_tpu_fourier_optimizations=False),
    ),
    "modernbert": hf(
        "ModernBertModel",
        "ModernBertConfig",
        "input_ids attention_mask",
        masked,
        TEXT
        | dict(cls_token_id=1, sep_token_id=2, local_attention=8, global_attn_every_n_layers=2),
    ),
    "nystromformer": hf(
        "NystromformerModel",
        "NystromformerConfig",
        "input_ids",
        tokens,
        TEXT | NO_DROP | dict(num_landmarks=16, segment_means_seq_len=16),
    ),
    "convbert": hf(
        "ConvBertModel",
        "ConvBertConfig",
        "input_ids",
        tokens,
        TEXT | NO_DROP | dict(embedding_size=32, conv_kernel_size=3),
    ),
    "funnel": hf(
        "FunnelModel",
        "FunnelConfig",
        "input_ids",
        tokens,
        dict(
            vocab_size=VOCAB,
            block_sizes=[1, 1],
            num_decoder_layers=1,
            d_model=32,
            n_head=4,
            d_head=8,
            d_inner=64,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
        ),
    ),
    "perceiver": hf(
        "PerceiverModel",
        "PerceiverConfig",
        "inputs",
        lambda b: (torch.randn(b, 20, 24),),
        dict(
            num_latents=8,
            d_latents=32,
            d_model=24,
            num_blocks=1,
            num_self_attends_per_block=2,
            num_self_attention_heads=4,
            num_cross_attention_heads=4,
            attention_probs_dropout_prob=0.0,
        ),
    ),
    "reformer": hf(
        "ReformerModel",
        "ReformerConfig",
        "input_ids",
        tokens,
        dict(
            vocab_size=VOCAB,
            hidden_size=32,
            attention_head_size=8,
            num_attention_heads=4,
            attn_layers=["local", "local"],
            local_attn_chunk_length=8,
            axial_pos_embds=False,
            max_position_embeddings=64,
            feed_forward_size=64,
            is_decoder=False,
            hidden_dropout_prob=0.0,
            local_attention_probs_dropout_prob=0.0,
        ),
    ),
    # ---- text to text
    "t5": hf(
        "T5ForConditionalGeneration",
        "T5Config",
        "input_ids decoder_input_ids",
        pairs,
        dict(
            vocab_size=VOCAB,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            use_cache=False,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        ),
    ),
    "bart": hf(
        "BartForConditionalGeneration", "BartConfig", "input_ids decoder_input_ids", pairs, SEQ2SEQ
    ),
    "m2m_100": hf(
        "M2M100Model",
        "M2M100Config",
        "input_ids decoder_input_ids",
        pairs,
        SEQ2SEQ | dict(encoder_layerdrop=0.0, decoder_layerdrop=0.0),
    ),
    # ---- images
    "deit": hf("DeiTModel", "DeiTConfig", "pixel_values", images(32), VISION | NO_DROP),
    "dinov2": hf("Dinov2Model", "Dinov2Config", "pixel_values", images(32), VISION | NO_DROP),
    "beit": hf(
        "BeitModel",
        "BeitConfig",
        "pixel_values",
        images(32),
        VISION | NO_DROP | dict(use_relative_position_bias=True, drop_path_rate=0.0),
    ),
    "swin": hf("SwinModel", "SwinConfig", "pixel_values", images(32), SWIN),
    "swinv2": hf("Swinv2Model", "Swinv2Config", "pixel_values", images(32), SWIN),
    "convnext": hf(
        "ConvNextModel",
        "ConvNextConfig",
        "pixel_values",
        images(32),
        dict(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
    ),
    "mobilenet_v2": hf(
        "MobileNetV2Model",
        "MobileNetV2Config",
        "pixel_values",
        images(32),
        dict(depth_multiplier=0.25, image_size=32),
        sensitive=True,
    ),
    "mobilevit": hf(
        "MobileViTModel",
        "MobileViTConfig",
        "pixel_values",
        images(128),
        dict(
            image_size=128,
            hidden_sizes=[16, 24, 32],
            neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 32],
            num_attention_heads=4,
            hidden_dropout_prob=0.0,
        ),
    ),
    "regnet": hf(
        "RegNetModel",
        "RegNetConfig",
        "pixel_values",
        images(32),
        dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4),
    ),
    "efficientnet": hf(
        "EfficientNetModel",
        "EfficientNetConfig",
        "pixel_values",
        images(32),
        dict(
            image_size=32,
            width_coefficient=0.25,
            depth_coefficient=0.2,
            hidden_dim=320,
            drop_connect_rate=0.0,
        ),
    ),
    "segformer": hf(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        "pixel_values",
        images(64),
        NO_DROP
        | dict(
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[4, 2],
            hidden_sizes=[8, 16],
            patch_sizes=[7, 3],
            strides=[4, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[2, 2],
            decoder_hidden_size=16,
            drop_path_rate=0.0,
            classifier_dropout_prob=0.0,
        ),
    ),
    "pvt_v2": hf(
        "PvtV2Model",
        "PvtV2Config",
        "pixel_values",
        images(64),
        NO_DROP
        | dict(
            image_size=64,
            depths=[1] * 4,
            hidden_sizes=[8, 8, 16, 16],
            num_attention_heads=[1, 1, 2, 2],
            mlp_ratios=[2] * 4,
            drop_path_rate=0.0,
        ),
    ),
    "dpt": hf(
        "DPTForDepthEstimation",
        "DPTConfig",
        "pixel_values",
        images(32),
        VISION
        | NO_DROP
        | dict(
            num_hidden_layers=4,
            backbone_out_indices=[0, 1, 2, 3],
            neck_hidden_sizes=[8, 8, 16, 16],
            fusion_hidden_size=16,
        ),
    ),
    "glpn": hf(
        "GLPNForDepthEstimation",
        "GLPNConfig",
        "pixel_values",
        images(64),
        NO_DROP
        | dict(
            num_encoder_blocks=4,
            depths=[1] * 4,
            sr_ratios=[4, 2, 1, 1],
            hidden_sizes=[8, 8, 16, 16],
            num_attention_heads=[1, 1, 2, 2],
            mlp_ratios=[2] * 4,
            decoder_hidden_size=8,
            drop_path_rate=0.0,
        ),
    ),
    "upernet": Case(lambda: Named(_upernet(), ("pixel_values",)), images(64)),
    "sam": Case(
        lambda: Named(_sam(), ("pixel_values", "input_points")),
        lambda b: (torch.randn(b, 3, 32, 32), torch.rand(b, 1, 1, 2) * 32),
        numbered=True,
    ),
    "detr": Case(lambda: Named(_detr(), ("pixel_values",)), detr),
    "conditional_detr": Case(lambda: Named(_conditional_detr(), ("pixel_values",)), detr),
    "deformable_detr": Case(lambda: Named(_deformable_detr(), ("pixel_values",)), detr),
    "mask2former": Case(lambda: Named(_mask2former(), ("pixel_values",)), detr),
    "yolos": hf(
        "YolosModel",
        "YolosConfig",
        "pixel_values",
        images(32),
        VISION | NO_DROP | dict(image_size=[32, 32], num_detection_tokens=4),
    ),
    "vit_mae": hf(
        "ViTMAEModel",
        "ViTMAEConfig",
        "pixel_values noise",
        lambda b: (torch.randn(b, 3, 32, 32), torch.rand(b, 16)),
        VISION | NO_DROP,
    ),
    "focalnet": hf(
        "FocalNetModel",
        "FocalNetConfig",
        "pixel_values",
        images(32),
        dict(
            image_size=32,
            embed_dim=16,
            hidden_sizes=[16, 32],
            depths=[1, 1],
            focal_levels=[2, 2],
            focal_windows=[3, 3],
            drop_path_rate=0.0,
        ),
    ),
    "poolformer": hf(
        "PoolFormerModel",
        "PoolFormerConfig",
        "pixel_values",
        images(32),
        dict(
            hidden_sizes=[8, 16],
            depths=[1, 1],
            num_encoder_blocks=2,
            patch_sizes=[7, 3],
            strides=[4, 2],
            padding=[2, 1],
            drop_path_rate=0.0,
        ),
    ),
    "swin2sr": hf(
        "Swin2SRForImageSuperResolution",
        "Swin2SRConfig",
        "pixel_values",
        images(16),
        dict(
            image_size=16,
            patch_size=1,
            embed_dim=16,
            depths=[1],
            num_heads=[2],
            window_size=4,
            upscale=2,
            drop_path_rate=0.0,
        ),
    ),
    # ---- images and text
    "clip": Case(
        lambda: Named(_clip("CLIP"), ("pixel_values", "input_ids")),
        lambda b: (*images(32)(b), *tokens(b)),
    ),
    "siglip": Case(
        lambda: Named(_clip("Siglip"), ("pixel_values", "input_ids")),
        lambda b: (*images(32)(b), *tokens(b)),
    ),
    "vilt": hf(
        "ViltModel",
        "ViltConfig",
        "input_ids pixel_values",
        lambda b: (*tokens(b), *images(32)(b)),
        VISION | NO_DROP | dict(vocab_size=VOCAB),
        breaks=True,
        exports=False,
    ),
    "blip": Case(
        lambda: Named(_blip(), ("input_ids", "pixel_values")),
        lambda b: (*tokens(b), *images(32)(b)),
    ),
    # ---- video
    "videomae": hf(
        "VideoMAEModel",
        "VideoMAEConfig",
        "pixel_values",
        lambda b: (torch.randn(b, 4, 3, 16, 16),),
        VISION | NO_DROP | dict(image_size=16, num_frames=4, tubelet_size=2),
    ),
    "timesformer": hf(
        "TimesformerModel",
        "TimesformerConfig",
        "pixel_values",
        lambda b: (torch.randn(b, 4, 3, 16, 16),),
        VISION | NO_DROP | dict(image_size=16, num_frames=4, drop_path_rate=0),
    ),
    # ---- sound
    "whisper": hf(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        "input_features decoder_input_ids",
        lambda b: (torch.randn(b, 16, 64), torch.randint(3, VOCAB, (b, 10))),
        SEQ2SEQ
        | dict(
            num_mel_bins=16,
            max_source_positions=32,
            max_target_positions=32,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
    ),
    "wav2vec2": hf("Wav2Vec2ForCTC", "Wav2Vec2Config", "input_values", waves, SPEECH),
    "hubert": hf("HubertModel", "HubertConfig", "input_values", waves, SPEECH),
    "wavlm": hf("WavLMModel", "WavLMConfig", "input_values", waves, SPEECH),
    "wav2vec2_conformer": hf(
        "Wav2Vec2ConformerModel", "Wav2Vec2ConformerConfig", "input_values", waves, SPEECH
    ),
    "encodec": hf(
        "EncodecModel",
        "EncodecConfig",
        "input_values",
        lambda b: (torch.randn(b, 1, 640),),
        dict(
            num_filters=4,
            num_residual_layers=1,
            upsampling_ratios=[4, 4],
            hidden_size=16,
            codebook_size=16,
            codebook_dim=16,
            target_bandwidths=[6.0],
            num_lstm_layers=1,
            audio_channels=1,
            sampling_rate=8000,
        ),
        trains=False,
        breaks=True,
        exports=False,
    ),
    "speecht5": hf(
        "SpeechT5ForSpeechToText",
        "SpeechT5Config",
        "input_values decoder_input_ids",
        lambda b: (torch.randn(b, 1600), torch.randint(3, VOCAB, (b, 10))),
        dict(
            vocab_size=VOCAB,
            hidden_size=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            conv_dim=(16, 16, 16),
            conv_stride=(5, 4, 2),
            conv_kernel=(10, 4, 2),
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=2,
            use_cache=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            positional_dropout=0.0,
            encoder_layerdrop=0.0,
            decoder_layerdrop=0.0,
            apply_spec_augment=False,
            feat_proj_dropout=0.0,
        ),
    ),
    "vits": hf(
        "VitsModel",
        "VitsConfig",
        "input_ids",
        tokens,
        dict(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_dim=64,
            flow_size=32,
            spectrogram_bins=33,
            upsample_initial_channel=32,
            upsample_rates=[4, 4],
            upsample_kernel_sizes=[8, 8],
            resblock_kernel_sizes=[3],
            resblock_dilation_sizes=[[1, 3]],
            prior_encoder_num_wavenet_layers=2,
            posterior_encoder_num_wavenet_layers=2,
            duration_predictor_num_flows=2,
            depth_separable_num_layers=1,
            noise_scale=0.0,
            noise_scale_duration=0.0,
        ),
        trains=False,
        breaks=True,
    ),
    "audio_spectrogram": hf(
        "ASTModel",
        "ASTConfig",
        "input_values",
        lambda b: (torch.randn(b, 32, 16),),
        TEXT
        | NO_DROP
        | dict(patch_size=8, frequency_stride=4, time_stride=4, max_length=32, num_mel_bins=16),
    ),
    "univnet": hf(
        "UnivNetModel",
        "UnivNetConfig",
        "input_features noise_sequence",
        lambda b: (torch.randn(b, 12, 16), torch.randn(b, 12, 8)),
        dict(
            model_in_channels=8,
            model_hidden_channels=8,
            num_mel_bins=16,
            resblock_kernel_sizes=[3, 3],
            resblock_stride_sizes=[4, 2],
            resblock_dilation_sizes=[[1, 3], [1, 3]],
            kernel_predictor_num_blocks=1,
            kernel_predictor_hidden_channels=8,
            kernel_predictor_dropout=0.0,
        ),
        trains=False,
    ),
    # ---- time series
    "patchtst": hf(
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        "past_values",
        lambda b: (torch.randn(b, 32, 3),),
        dict(
            num_input_channels=3,
            context_length=32,
            patch_length=4,
            patch_stride=4,
            d_model=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_dim=32,
            prediction_length=4,
            attention_dropout=0.0,
            ff_dropout=0.0,
            head_dropout=0.0,
            path_dropout=0.0,
            positional_dropout=0.0,
            loss="mse",
        ),
    ),
    "patchtsmixer": hf(
        "PatchTSMixerForPrediction",
        "PatchTSMixerConfig",
        "past_values",
        lambda b: (torch.randn(b, 32, 3),),
        dict(
            num_input_channels=3,
            context_length=32,
            patch_length=4,
            patch_stride=4,
            d_model=16,
            num_layers=2,
            prediction_length=4,
            dropout=0.0,
            head_dropout=0.0,
        ),
    ),
}


def _transformers() -> Any:
    return importlib.import_module("transformers")


def _clip(family: str) -> nn.Module:
    t = _transformers()
    text = TEXT | (dict(projection_size=32) if family == "Siglip" else {})
    return getattr(t, f"{family}Model")(
        getattr(t, f"{family}Config")(text_config=text, vision_config=VISION)
    )


def _blip() -> nn.Module:
    t = _transformers()
    text = TEXT | NO_DROP | dict(encoder_hidden_size=32, projection_dim=16)
    cfg = t.BlipConfig(
        text_config=text, vision_config=VISION, projection_dim=16, image_text_hidden_size=16
    )
    return t.BlipForImageTextRetrieval(cfg)


def _sam() -> nn.Module:
    t = _transformers()
    vision = VISION | dict(
        output_channels=16, window_size=2, global_attn_indexes=[1], mlp_dim=64, num_pos_feats=8
    )
    prompt = dict(
        hidden_size=16,
        image_size=32,
        patch_size=8,
        mask_input_channels=8,
        num_point_embeddings=4,
        image_embedding_size=4,
    )
    mask = dict(
        hidden_size=16,
        mlp_dim=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        iou_head_hidden_dim=16,
    )
    return t.SamModel(
        t.SamConfig(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=mask)
    )


DETR = dict(
    d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_queries=5, dropout=0.0,
    use_timm_backbone=False, use_pretrained_backbone=False, num_labels=3,
)  # fmt: skip


def _detr() -> nn.Module:
    t = _transformers()
    return t.DetrForObjectDetection(t.DetrConfig(**DETR, backbone_config=resnet_backbone()))


def _conditional_detr() -> nn.Module:
    t = _transformers()
    cfg = t.ConditionalDetrConfig(**DETR, backbone_config=resnet_backbone())
    return t.ConditionalDetrForObjectDetection(cfg)


def _deformable_detr() -> nn.Module:
    t = _transformers()
    backbone = t.ResNetConfig(**(RESNET | dict(out_features=["stage1", "stage2"])))
    cfg = t.DeformableDetrConfig(**DETR, backbone_config=backbone, num_feature_levels=2)
    return t.DeformableDetrForObjectDetection(cfg)


def _mask2former() -> nn.Module:
    t = _transformers()
    backbone = t.SwinConfig(
        image_size=64, patch_size=4, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2],
        window_size=2, drop_path_rate=0.0, out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    cfg = t.Mask2FormerConfig(
        backbone_config=backbone, hidden_dim=32, feature_size=32, mask_feature_size=32,
        encoder_layers=1, decoder_layers=2, num_attention_heads=2, dim_feedforward=32,
        encoder_feedforward_dim=32, num_queries=4, num_labels=3, dropout=0.0,
    )  # fmt: skip
    return t.Mask2FormerModel(cfg)


def _upernet() -> nn.Module:
    t = _transformers()
    backbone = t.ConvNextConfig(
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    return t.UperNetForSemanticSegmentation(
        t.UperNetConfig(
            backbone_config=backbone,
            hidden_size=16,
            num_labels=3,
            auxiliary_channels=8,
            auxiliary_in_channels=16,
        )
    )


def floats(*shape: int) -> Data:
    return lambda batch: (torch.randn(batch, *shape),)


def graphs(batch: int) -> tuple[Tensor, ...]:
    return torch.randn(6 * batch, 8), torch.randint(0, 6 * batch, (2, 14 * batch))


OWN: dict[str, Case] = {
    "lstm": Case(lambda: Recurrent(nn.LSTM), tokens),
    "gru": Case(lambda: Recurrent(nn.GRU, bidirectional=True), tokens),
    "rnn": Case(lambda: Recurrent(nn.RNN), tokens),
    "cells": Case(Cells, floats(6, 12)),
    "wavenet": Case(WaveNet, floats(1, 40)),
    "experts": Case(Experts, floats(6, 16), breaks=True),
    "graph": Case(Graph, graphs),
    "diffusion": Case(Diffusion, lambda b: (torch.randn(b, 3, 16, 16), torch.rand(b) * 100)),
    "physics": Case(Physics, floats(2), numbered=True),
    "forces": Case(Forces, floats(5, 3), trains=False, breaks=True),
    "variational": Case(Variational, lambda b: (torch.randn(b, 3, 16, 16), torch.randn(b, 8))),
    "ring": Case(Ring, floats(12, 16)),
    "flow": Case(
        Flow, lambda b: (torch.randn(b, 3, 12, 12), torch.randn(b, 3, 12, 12)), dynamic=False
    ),
    "superres": Case(Superres, floats(3, 10, 12)),
    "recommender": Case(Recommender, tokens),
    "spectral": Case(Spectral, floats(4, 16)),
    "quantized": Case(Quantized, floats(16), trains=False),
    "nn_transformer": Case(Capsule, lambda b: (torch.randn(b, 10, 16), torch.randn(b, 4, 16))),
}


def tv(name: str, side: int = 64, **options: Any) -> Case:
    """torchvision.models.<name> with random weights."""

    def make() -> nn.Module:
        models = importlib.import_module("torchvision.models")
        model = getattr(models, name)(weights=None, num_classes=7, **options)
        return Tuple(model)

    return Case(make, images(side))


class Tuple(nn.Module):
    """A model with its result as a tuple of tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        out = self.model(x)
        return (out,) if isinstance(out, Tensor) else tuple(out)


TORCHVISION: dict[str, Case] = {
    "tv_resnet18": tv("resnet18"),
    "tv_mobilenet_v3": tv("mobilenet_v3_small", dropout=0.0),
    "tv_efficientnet": tv("efficientnet_b0", dropout=0.0, stochastic_depth_prob=0.0),
    "tv_densenet": tv("densenet121", 32, growth_rate=8, block_config=(2, 2), num_init_features=8),
    "tv_shufflenet": tv("shufflenet_v2_x0_5"),
    "tv_squeezenet": tv("squeezenet1_1", dropout=0.0),
    "tv_mnasnet": tv("mnasnet0_5", dropout=0.0),
    "tv_regnet": tv("regnet_y_400mf"),
    "tv_vgg": tv("vgg11_bn", dropout=0.0),
    "tv_swin_v2": tv("swin_v2_t", 64, stochastic_depth_prob=0.0),
    "tv_convnext": tv("convnext_tiny", stochastic_depth_prob=0.0),
    "tv_maxvit": tv("maxvit_t", 224, stochastic_depth_prob=0.0),
    "tv_googlenet": tv("googlenet", aux_logits=False, init_weights=False, dropout=0.0),
}
