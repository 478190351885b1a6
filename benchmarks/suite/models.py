# ruff: noqa: C408
"""The models of the suite, each with random weights: transformers' by their configs, torchvision's
by their names, and those of own.py.

Sizes are those of real models; where layers or a vocabulary are cut, so that a training step takes
a few GiB and tens of ms, it stands in the row. A case is a model, inference or a training step,
and a type.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field as of
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.suite import own

VOCAB = 30000  # token ids are below it; no vocabulary is smaller


@dataclass(frozen=True)
class Input:
    """One input. kind: ids, bags (ids of several fields), mask, normal, uniform or edges.
    shape: without the batch. rows: of "edges", nodes of the graph; of "bags", rows of a table."""

    kind: str
    shape: tuple[int, ...]
    rows: int = 0

    def make(self, batch: int) -> Tensor:
        """Random, of the default device."""
        shape = (batch, *self.shape)
        if self.kind in ("ids", "bags"):
            return torch.randint(3, self.rows, shape)
        if self.kind == "mask":
            mask = torch.ones(shape, dtype=torch.int64)
            mask[0, 3 * self.shape[0] // 4 :] = 0
            return mask
        if self.kind == "edges":  # of all graphs at once
            return torch.randint(0, batch * self.rows, (2, batch * self.shape[0]))
        if self.kind == "nodes":
            return torch.randn(batch * self.rows, *self.shape)
        assert self.kind in ("normal", "uniform"), f"unknown kind of input {self.kind}"
        return torch.randn(shape) if self.kind == "normal" else torch.rand(shape)


def ids(length: int, rows: int = VOCAB) -> Input:
    return Input("ids", (length,), rows)


def mask(length: int) -> Input:
    return Input("mask", (length,))


def image(side: int) -> Input:
    return Input("normal", (3, side, side))


def normal(*shape: int) -> Input:
    return Input("normal", shape)


@dataclass(frozen=True)
class Model:
    """One model.

    field: what it is of. inputs: by name. batch: on a GPU. cpu: the batch on a CPU, 0: not in the
    list of CPUs. labels: its own loss, with its first input as labels, is what is trained; else
    the cross-entropy of classes or the distance from noise. f32: also in float32 on a GPU. tuned:
    also by max-autotune. bf16: bfloat16 is possible. note: what is cut. spec: what a change of the
    model changes.
    """

    name: str
    field: str
    build: Callable[[bool], nn.Module] = of(repr=False)
    inputs: dict[str, Input] = of(default_factory=dict)
    batch: int = 1
    cpu: int = 0
    labels: bool = False
    train: bool = True
    f32: bool = False
    tuned: bool = False
    bf16: bool = True
    note: str = ""
    library: str = ""
    spec: str = ""


class Named(nn.Module):
    """A transformers model with its inputs by position and the floating point tensors of its
    result as a tuple; with labels its loss alone."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        given = dict(zip(self.names, inputs, strict=True))
        if labels is not None:
            return (self.model(**given, labels=labels).loss,)
        out = self.model(**given)
        values = (out,) if isinstance(out, Tensor) else out.values()
        return tuple(t for t in values if isinstance(t, Tensor) and t.is_floating_point())


class Plain(nn.Module):
    """A model with its result as a tuple."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        out = self.model(*inputs)
        if isinstance(out, dict):
            out = tuple(out.values())
        return (out,) if isinstance(out, Tensor) else tuple(out)


DEPTHS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
    "num_decoder_layers",
)  # fmt: skip


def configured(config: str, changes: dict[str, Any], small: bool) -> Any:
    """A transformers config; small: of two layers."""
    kind = getattr(importlib.import_module("transformers"), config)
    if small:
        default = kind()
        cut = {k: 2 for k in DEPTHS if isinstance(changes.get(k, getattr(default, k, None)), int)}
        changes = changes | cut
    return kind(**changes)


def hf(
    name: str,
    field: str,
    kind: str,
    config: str,
    inputs: dict[str, Input],
    batch: int,
    changes: dict[str, Any],
    **rest: Any,
) -> Model:
    """transformers.<kind>(transformers.<config>(**changes)). cut=False: its depth is more than a
    number, and stays in small too."""
    cut = rest.pop("cut", True)

    def build(small: bool) -> nn.Module:
        model = getattr(importlib.import_module("transformers"), kind)
        return Named(model(configured(config, changes, small and cut)), tuple(inputs))

    spec = f"{kind} {config} {changes}"
    return Model(name, field, build, inputs, batch, library="transformers", spec=spec, **rest)


def tv(
    name: str, batch: int, side: int = 224, field: str = "vision", path: str = "", **rest: Any
) -> Model:
    """torchvision.models.<path or name> without weights and dropout."""
    options = rest.pop("options", {})
    given = rest.pop("given", image(side))

    def build(small: bool) -> nn.Module:
        models: Any = importlib.import_module("torchvision.models")
        *rooms, kind = (path or name).split(".")
        for room in rooms:
            models = getattr(models, room)
        model = getattr(models, kind)(weights=None, **options)
        for m in model.modules():
            if isinstance(m, nn.Dropout):
                m.p = 0.0
            if type(m).__name__ == "StochasticDepth":
                m.p = 0.0
        return Plain(model)

    spec = f"{path or name} {options}"
    return Model(name, field, build, {"x": given}, batch, library="torchvision", spec=spec, **rest)


def ours(
    name: str,
    field: str,
    kind: Callable[[], nn.Module],
    inputs: dict[str, Input],
    batch: int,
    **rest: Any,
) -> Model:
    """A model of own.py."""
    spec = inspect.getsource(kind)
    return Model(name, field, lambda small: Plain(kind()), inputs, batch, spec=spec, **rest)


# ---- what most configs say
TEXT = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
LM = TEXT | dict(use_cache=False, vocab_size=32000)
NO_DROP = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
GPT_DROP = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
SEQ2SEQ = dict(use_cache=False, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0)
SPEECH = dict(
    apply_spec_augment=False, layerdrop=0.0, hidden_dropout=0.0, attention_dropout=0.0,
    activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0, num_hidden_layers=6,
)  # fmt: skip
WAVES = {"input_values": normal(32000)}
IMAGE = {"pixel_values": image(224)}


def llama_like(hidden: int, inner: int, heads: int, kv: int, layers: int, **rest: Any) -> Any:
    """Sizes of a decoder of today."""
    return LM | dict(
        hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=kv, num_hidden_layers=layers, **rest,
    )  # fmt: skip


def decoder(
    family: str, length: int, batch: int, changes: dict[str, Any], name: str = "", **rest: Any
) -> Model:
    """transformers.<family>ForCausalLM, trained with its own loss."""
    config = rest.pop("config", f"{family}Config")
    room = rest.pop("field", "text")
    return hf(
        name or family.lower(),
        room,
        f"{family}ForCausalLM",
        config,
        {"input_ids": ids(length)},
        batch,
        changes,
        labels=True,
        **rest,
    )


MOE, STATE, PAIRS = "mixture of experts", "state space", "encoder-decoder"
IDS_MASK = {"input_ids": ids(256), "attention_mask": mask(256)}
IDS_IDS = {"input_ids": ids(256), "decoder_input_ids": ids(128)}
# fmt: off
DECODERS = (
    hf("gpt2", "text", "GPT2LMHeadModel", "GPT2Config", {"input_ids": ids(512)}, 4,
       dict(use_cache=False, **GPT_DROP), labels=True, cpu=1, tuned=True),
    decoder("Llama", 512, 2, llama_like(2048, 5632, 32, 4, 6), cpu=1, tuned=True,
            note="6 layers"),
    decoder("Mistral", 512, 2, llama_like(4096, 14336, 32, 8, 2, sliding_window=256),
            note="2 layers"),
    decoder("Qwen2", 512, 2, llama_like(896, 4864, 14, 2, 12), cpu=1,
            note="12 layers, a small vocabulary"),
    decoder("Qwen3", 512, 2, llama_like(1024, 3072, 16, 8, 12, head_dim=128), tuned=True,
            note="12 layers, a small vocabulary"),
    decoder("Gemma2", 512, 2, llama_like(2304, 9216, 8, 4, 4, head_dim=256, sliding_window=256),
            note="4 layers, a small vocabulary"),
    decoder("Gemma3", 512, 2, llama_like(1152, 6912, 4, 1, 8, head_dim=256, sliding_window=256),
            config="Gemma3TextConfig", tuned=True, note="8 layers, a small vocabulary"),
    decoder("Phi3", 512, 2, llama_like(3072, 8192, 32, 32, 2), note="2 layers"),
    decoder("Falcon", 512, 2, LM | dict(hidden_size=2048, num_attention_heads=32,
            num_hidden_layers=6, alibi=True, new_decoder_architecture=False),
            note="6 layers, a small vocabulary"),
    decoder("OPT", 512, 4, dict(use_cache=False, dropout=0.0), cpu=1),
    decoder("Bloom", 512, 2, LM | dict(hidden_size=1024, n_layer=8, n_head=16),
            note="8 layers, a small vocabulary"),
    decoder("GPTNeoX", 512, 2, LM | dict(hidden_size=1024, num_hidden_layers=12,
            num_attention_heads=16, intermediate_size=4096), cpu=1, note="12 layers"),
    decoder("GPTJ", 512, 2, LM | GPT_DROP | dict(n_embd=2048, n_head=16, rotary_dim=64, n_layer=4),
            note="4 layers, half as wide"),
)
EXPERTS = (
    decoder("Mixtral", 256, 2, llama_like(1024, 3584, 16, 4, 4, num_local_experts=8,
            num_experts_per_tok=2), field=MOE, tuned=True, note="4 layers, a quarter as wide"),
    decoder("Qwen3Moe", 256, 2, llama_like(1024, 3072, 16, 4, 4, head_dim=64, num_experts=32,
            num_experts_per_tok=4, moe_intermediate_size=512), field=MOE, tuned=True,
            note="4 layers, half as wide"),
    decoder("DeepseekV3", 256, 2, llama_like(1024, 2816, 16, 16, 4, q_lora_rank=384,
            kv_lora_rank=256, qk_rope_head_dim=32, qk_nope_head_dim=64, v_head_dim=64,
            n_routed_experts=16, n_shared_experts=1, num_experts_per_tok=4, n_group=4,
            topk_group=2, first_k_dense_replace=1, moe_intermediate_size=512), field=MOE,
            note="4 layers, a seventh as wide"),
    decoder("GptOss", 256, 2, llama_like(1024, 1024, 16, 4, 4, head_dim=64, num_local_experts=8,
            num_experts_per_tok=2, sliding_window=128), field=MOE,
            note="4 layers, a third as wide"),
)
STATES = (
    decoder("Mamba", 64, 4, LM | dict(hidden_size=768, state_size=16, num_hidden_layers=2),
            field=STATE, note="2 layers, 64 tokens"),
    decoder("Mamba2", 512, 2, LM | dict(hidden_size=1024, state_size=128, num_hidden_layers=6,
            num_heads=32, head_dim=64, n_groups=1, chunk_size=128), field=STATE, tuned=True,
            note="6 layers"),
    decoder("Rwkv", 64, 4, LM | dict(hidden_size=768, num_hidden_layers=2, context_length=64),
            field=STATE, note="2 layers, 64 tokens"),
    decoder("RecurrentGemma", 64, 4, LM | dict(hidden_size=1024, intermediate_size=6144,
            num_attention_heads=8, num_key_value_heads=1, head_dim=128, lru_width=1024,
            attention_window_size=64, num_hidden_layers=3), field=STATE,
            note="3 layers, 64 tokens"),
)
ENCODERS = (
    hf("bert", "text", "BertForMaskedLM", "BertConfig", {"input_ids": ids(512)}, 4, NO_DROP,
       labels=True, cpu=1, tuned=True, f32=True),
    hf("roberta", "text", "RobertaForMaskedLM", "RobertaConfig", IDS_MASK, 8,
       NO_DROP | dict(max_position_embeddings=514), labels=True, tuned=True),
    hf("albert", "text", "AlbertForMaskedLM", "AlbertConfig", {"input_ids": ids(256)}, 4,
       NO_DROP | dict(hidden_size=768, num_attention_heads=12, intermediate_size=3072),
       labels=True, cpu=1),
    hf("distilbert", "text", "DistilBertForMaskedLM", "DistilBertConfig", IDS_MASK, 8,
       dict(dropout=0.0, attention_dropout=0.0), labels=True, cpu=2),
    hf("electra", "text", "ElectraModel", "ElectraConfig", IDS_MASK, 8,
       NO_DROP | dict(embedding_size=768, hidden_size=768, num_attention_heads=12,
                      intermediate_size=3072)),
    hf("deberta_v2", "text", "DebertaV2Model", "DebertaV2Config", IDS_MASK, 4,
       NO_DROP | dict(hidden_size=768, num_attention_heads=12, intermediate_size=3072,
                      num_hidden_layers=6, vocab_size=32000, relative_attention=True,
                      pos_att_type=["c2p", "p2c"], position_buckets=256, share_att_key=True),
       cpu=1, note="6 layers, a small vocabulary"),
    hf("xlnet", "text", "XLNetModel", "XLNetConfig", {"input_ids": ids(256)}, 4,
       dict(d_model=768, n_layer=6, n_head=12, d_inner=3072, dropout=0.0), note="6 layers"),
    hf("longformer", "text", "LongformerModel", "LongformerConfig",
       {"input_ids": ids(512), "attention_mask": mask(512)}, 2,
       NO_DROP | dict(attention_window=256, num_hidden_layers=4, max_position_embeddings=1026),
       note="4 layers"),
    hf("fnet", "text", "FNetModel", "FNetConfig", {"input_ids": ids(512)}, 4,
       dict(hidden_dropout_prob=0.0, use_tpu_fourier_optimizations=False), bf16=False, f32=True,
       cpu=1),
    hf("modernbert", "text", "ModernBertForMaskedLM", "ModernBertConfig", IDS_MASK, 4,
       dict(vocab_size=50368, num_hidden_layers=12, cls_token_id=1, sep_token_id=2,
            pad_token_id=0), labels=True, tuned=True, note="12 layers"),
    hf("convbert", "text", "ConvBertModel", "ConvBertConfig", {"input_ids": ids(256)}, 4,
       NO_DROP | dict(num_hidden_layers=6), note="6 layers"),
)
BOTH = (
    hf("t5", PAIRS, "T5ForConditionalGeneration", "T5Config", IDS_IDS, 8,
       dict(use_cache=False, dropout_rate=0.0, decoder_start_token_id=0), cpu=1, tuned=True),
    hf("bart", PAIRS, "BartForConditionalGeneration", "BartConfig", IDS_IDS, 4,
       SEQ2SEQ | dict(d_model=768, encoder_layers=6, decoder_layers=6, encoder_ffn_dim=3072,
                      decoder_ffn_dim=3072, encoder_attention_heads=12,
                      decoder_attention_heads=12), cpu=1, tuned=True),
    hf("m2m_100", PAIRS, "M2M100Model", "M2M100Config", IDS_IDS, 4,
       SEQ2SEQ | dict(vocab_size=32000, encoder_layers=4, decoder_layers=4,
                      encoder_layerdrop=0.0, decoder_layerdrop=0.0),
       note="4 + 4 layers, a small vocabulary"),
)
VISION = (
    hf("vit", "vision", "ViTForImageClassification", "ViTConfig", IMAGE, 16,
       NO_DROP | dict(num_labels=1000), cpu=1, tuned=True),
    hf("beit", "vision", "BeitModel", "BeitConfig", IMAGE, 16,
       NO_DROP | dict(use_relative_position_bias=True, drop_path_rate=0.0)),
    hf("dinov2", "vision", "Dinov2Model", "Dinov2Config", IMAGE, 8,
       NO_DROP | dict(image_size=224, patch_size=14)),
    hf("swin", "vision", "SwinForImageClassification", "SwinConfig", IMAGE, 16,
       NO_DROP | dict(drop_path_rate=0.0, num_labels=1000), cpu=1, tuned=True),
    hf("convnext", "vision", "ConvNextForImageClassification", "ConvNextConfig", IMAGE, 16,
       dict(num_labels=1000), cpu=1, tuned=True, f32=True, cut=False),
    hf("segformer", "vision", "SegformerForSemanticSegmentation", "SegformerConfig",
       {"pixel_values": image(256)}, 8,
       NO_DROP | dict(drop_path_rate=0.0, classifier_dropout_prob=0.0, num_labels=150), cpu=1),
    hf("mobilevit", "vision", "MobileViTForImageClassification", "MobileViTConfig",
       {"pixel_values": image(256)}, 16,
       NO_DROP | dict(num_labels=1000, classifier_dropout_prob=0.0)),
    hf("poolformer", "vision", "PoolFormerForImageClassification", "PoolFormerConfig", IMAGE, 16,
       dict(drop_path_rate=0.0, num_labels=1000)),
    hf("dpt", "vision", "DPTForDepthEstimation", "DPTConfig", {"pixel_values": image(224)}, 4,
       NO_DROP | dict(image_size=224, hidden_size=768, num_attention_heads=12,
                      intermediate_size=3072, num_hidden_layers=6,
                      backbone_out_indices=[0, 2, 4, 5]), note="6 layers", cut=False),
    hf("videomae", "video", "VideoMAEModel", "VideoMAEConfig",
       {"pixel_values": normal(16, 3, 224, 224)}, 2, NO_DROP | dict(num_hidden_layers=6),
       note="6 layers"),
    Model("clip", "images and text", lambda small: clip(small),
          {"pixel_values": image(224), "input_ids": ids(77)}, 16, tuned=True,
          library="transformers", spec="CLIPModel B/32, 6 + 6 layers", note="6 + 6 layers"),
    Model("detr", "vision", lambda small: detr(small), {"pixel_values": image(384)}, 4,
          library="transformers", spec="Detr with ResNet-50"),
)
CONVOLUTIONS = (
    tv("resnet18", 32, f32=True, cpu=4),
    tv("resnet50", 16, f32=True, cpu=1, tuned=True),
    tv("resnext50_32x4d", 16),
    tv("mobilenet_v2", 32, f32=True, cpu=4),
    tv("mobilenet_v3_large", 32, f32=True, cpu=4, tuned=True),
    tv("efficientnet_b0", 16, f32=True, cpu=1, tuned=True),
    tv("densenet121", 16, f32=True, cpu=1),
    tv("regnet_y_1_6gf", 16, f32=True, cpu=1),
    tv("vgg16_bn", 8, f32=True),
    tv("squeezenet1_1", 32, cpu=4),
    tv("shufflenet_v2_x1_0", 32, f32=True, cpu=4),
    tv("googlenet", 16, options=dict(aux_logits=False, init_weights=False)),
    tv("maxvit_t", 8),
    tv("deeplabv3_resnet50", 4, 256, path="segmentation.deeplabv3_resnet50",
       options=dict(weights_backbone=None)),
    tv("r3d_18", 4, field="video", path="video.r3d_18", given=normal(3, 16, 112, 112), f32=True),
)
SOUND = (
    hf("whisper", "speech", "WhisperForConditionalGeneration", "WhisperConfig",
       {"input_features": normal(80, 3000), "decoder_input_ids": ids(128)}, 2,
       SEQ2SEQ | dict(d_model=512, encoder_layers=6, decoder_layers=6, encoder_ffn_dim=2048,
                      decoder_ffn_dim=2048, encoder_attention_heads=8, decoder_attention_heads=8,
                      vocab_size=51865), tuned=True),
    hf("wav2vec2", "speech", "Wav2Vec2ForCTC", "Wav2Vec2Config", WAVES, 4, SPEECH, cpu=1,
       tuned=True, note="6 layers"),
    hf("hubert", "speech", "HubertModel", "HubertConfig", WAVES, 4, SPEECH, note="6 layers"),
    hf("wavlm", "speech", "WavLMModel", "WavLMConfig", WAVES, 4, SPEECH, note="6 layers"),
    hf("ast", "speech", "ASTModel", "ASTConfig", {"input_values": normal(512, 128)}, 4,
       NO_DROP | dict(max_length=512), note="half as long"),
    hf("hifigan", "speech", "SpeechT5HifiGan", "SpeechT5HifiGanConfig",
       {"spectrogram": normal(64, 80)}, 4, {}, f32=True, cpu=1),
)
GRAPH = {"x": Input("nodes", (128,), 8192), "edges": Input("edges", (65536,), 8192)}
CLICKS = {"dense": normal(13), "ids": Input("bags", (26, 4), 20000)}
OWN = (
    ours("diffusion_unet", "diffusion", own.DiffusionUNet,
         {"x": normal(4, 32, 32), "t": Input("uniform", ()), "text": normal(77, 768)}, 8,
         f32=True, cpu=1, tuned=True),
    ours("image_decoder", "diffusion", own.ImageDecoder, {"x": normal(4, 32, 32)}, 2, f32=True),
    ours("dcgan", "vision", own.generator, {"x": normal(100, 1, 1)}, 128, f32=True, cpu=8),
    ours("segmentation_unet", "vision", own.SegmentationUNet, {"x": image(256)}, 8, f32=True,
         cpu=1),
    ours("super_resolution", "vision", own.SuperResolution, {"x": image(48)}, 16),
    ours("wavenet", "speech", own.WaveNet, {"x": normal(1, 8192)}, 4, f32=True),
    ours("dlrm", "recommendation", own.Dlrm, CLICKS, 2048, cpu=128, tuned=True),
    ours("deep_cross", "recommendation", own.DeepCross, CLICKS, 2048, cpu=128),
    ours("graph_convolution", "graph network", own.GraphConvolution, GRAPH, 1, cpu=1),
    ours("graph_attention", "graph network", own.GraphAttention, GRAPH, 1, cpu=1),
    ours("lstm", "text", own.LanguageLstm, {"ids": ids(64, 10000)}, 16),
    ours("radiance_field", "rendering", own.RadianceField, {"points": normal(64, 3)}, 1024),
    ours("fourier_operator", "physics", own.FourierOperator, {"x": normal(1, 64, 64)}, 16,
         bf16=False, f32=True, cpu=1),
)
# fmt: on


def clip(small: bool) -> nn.Module:
    """CLIP B/32, of six layers each."""
    t = importlib.import_module("transformers")
    depth = dict(num_hidden_layers=2 if small else 6)
    config = t.CLIPConfig(text_config=TEXT | depth | dict(eos_token_id=2), vision_config=depth)
    return Named(t.CLIPModel(config), ("pixel_values", "input_ids"))


def detr(small: bool) -> nn.Module:
    """DETR with a ResNet-50."""
    t = importlib.import_module("transformers")
    depth = 2 if small else 6
    config = t.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, encoder_layers=depth, decoder_layers=depth,
        backbone_config=t.ResNetConfig(out_features=["stage4"]),
    )  # fmt: skip
    return Named(t.DetrForObjectDetection(config), ("pixel_values",))


MODELS = {
    model.name: model
    for model in (
        *CONVOLUTIONS, *OWN, *DECODERS, *ENCODERS, *VISION, *BOTH, *EXPERTS, *STATES, *SOUND,
    )
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model, inference or a training step, and a type: what a process holds and a row shows.
    small: two layers and a batch of two, to test the harness."""

    model: Model
    train: bool
    dtype: str
    device: str
    small: bool = False

    @property
    def name(self) -> str:
        return f"{self.model.name}/{'train' if self.train else 'infer'}/{self.dtype}"

    @property
    def batch(self) -> int:
        if self.small:
            return min(2, self.model.batch)
        return self.model.cpu if self.device == "cpu" else self.model.batch

    @property
    def spec(self) -> str:
        """A digest that changes with the program."""
        what = (self.model.spec, self.model.inputs, self.batch, self.model.labels, self.small)
        return hashlib.sha256(repr(what).encode()).hexdigest()[:12]

    def build(self) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """The model, in evaluation or training mode, and its inputs: the same in every process."""
        dtype = getattr(torch, self.dtype)
        torch.manual_seed(0)
        with torch.device(self.device):
            model = self.model.build(self.small)
            inputs = tuple(x.make(self.batch) for x in self.model.inputs.values())
        model.train(self.train).to(device=self.device, dtype=dtype)
        return model, tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)


def cases(device: str, small: bool = False) -> dict[str, Case]:
    """All of a device, by name; those whose library is missing are left out by `missing`."""
    found = []
    for dtype in ("float32",) if device == "cpu" else ("bfloat16", "float32"):
        for train in (False, True):
            for model in MODELS.values():
                wanted = (
                    model.cpu
                    if device == "cpu"
                    else (model.bf16 if dtype == "bfloat16" else model.f32)
                )
                if wanted and (model.train or not train):
                    found.append(Case(model, train, dtype, device, small))
    return {case.name: case for case in found}


def missing(library: str) -> bool:
    return bool(library) and importlib.util.find_spec(library) is None
