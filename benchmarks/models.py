"""The programs that the benchmarks race, in plain PyTorch; the two language models come from
transformers.

Each `Case` makes a module and its inputs from a fixed seed, so that every process measures the same
numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Sum8(nn.Module):
    """(x + y).sum() on 8x8: nothing but the cost of a call."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x + y).sum()


class Sum8View(nn.Module):
    """Sum8 that returns a view of an input too, so that AOTAutograd's runtime wrapper has work to
    do."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x + y).sum(), x.t()


class Pointwise(nn.Module):
    """tanh * sigmoid - exp, layer_norm, gelu, softmax over rows of 1024."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x) * torch.sigmoid(x) - torch.exp(x)
        y = F.gelu(F.layer_norm(y, (y.shape[-1],)))
        return torch.softmax(y, -1)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        q, k, v = (
            t.view(batch, tokens, self.heads, dim // self.heads).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        attention = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(attention.transpose(1, 2).reshape(batch, tokens, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class BasicBlock(nn.Module):
    """ResNet's block of two 3x3 convolutions."""

    def __init__(self, cin: int, cout: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.down: nn.Module = nn.Identity()
        if stride != 1 or cin != cout:
            self.down = nn.Sequential(
                nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.down(x))


class ResNet18(nn.Module):
    """ResNet-18 for 1000 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks, cin = [], 64
        for cout, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [BasicBlock(cin, cout, stride), BasicBlock(cout, cout, 1)]
            cin = cout
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(512, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Bottleneck(nn.Module):
    """MobileNetV3's block: wider by points, each channel by itself, squeezed, narrower by
    points."""

    def __init__(
        self, cin: int, wide: int, cout: int, kernel: int, stride: int, squeeze: bool, act: Any
    ) -> None:
        super().__init__()
        self.same = stride == 1 and cin == cout
        self.act = act()
        self.wider: nn.Module = nn.Identity()
        if wide != cin:
            self.wider = nn.Sequential(
                nn.Conv2d(cin, wide, 1, bias=False), nn.BatchNorm2d(wide), act()
            )
        self.each = nn.Conv2d(wide, wide, kernel, stride, kernel // 2, groups=wide, bias=False)
        self.norm = nn.BatchNorm2d(wide)
        self.squeeze: nn.Module | None = None
        if squeeze:
            few = max(8, (wide // 4 + 4) // 8 * 8)
            self.squeeze = nn.Sequential(
                nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, few, 1), nn.ReLU(),
                nn.Conv2d(few, wide, 1), nn.Hardsigmoid(),
            )  # fmt: skip
        self.narrower = nn.Sequential(nn.Conv2d(wide, cout, 1, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm(self.each(self.wider(x))))
        if self.squeeze is not None:
            y = y * self.squeeze(y)
        y = self.narrower(y)
        return y + x if self.same else y


class MobileNetV3(nn.Module):
    """MobileNetV3, the large one, for 1000 classes."""

    def __init__(self) -> None:
        super().__init__()
        relu, hard = nn.ReLU, nn.Hardswish
        rows: tuple[tuple[int, int, int, int, bool, Any], ...] = (
            (3, 16, 16, 1, False, relu), (3, 64, 24, 2, False, relu), (3, 72, 24, 1, False, relu),
            (5, 72, 40, 2, True, relu), (5, 120, 40, 1, True, relu), (5, 120, 40, 1, True, relu),
            (3, 240, 80, 2, False, hard), (3, 200, 80, 1, False, hard),
            (3, 184, 80, 1, False, hard), (3, 184, 80, 1, False, hard),
            (3, 480, 112, 1, True, hard), (3, 672, 112, 1, True, hard),
            (5, 672, 160, 2, True, hard), (5, 960, 160, 1, True, hard),
            (5, 960, 160, 1, True, hard),
        )  # fmt: skip
        stem = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), hard()]
        blocks, cin = [], 16
        for kernel, wide, cout, stride, squeeze, act in rows:
            blocks.append(Bottleneck(cin, wide, cout, kernel, stride, squeeze, act))
            cin = cout
        last = [nn.Conv2d(cin, 960, 1, bias=False), nn.BatchNorm2d(960), hard()]
        self.features = nn.Sequential(*stem, *blocks, *last)
        self.head = nn.Sequential(nn.Linear(960, 1280), hard(), nn.Linear(1280, 1000))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


class Loss(nn.Module):
    """The mean of exp of a model's output: what a training step differentiates. The mean square
    would not do: of what comes out of a layer norm it is 1 whatever the parameters are, and nearly
    every gradient only rounding."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).exp().mean()


class TextModel(nn.Module):
    """A transformers model as a function of token ids that returns one tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        result = self.model(input_ids=ids)
        return result.logits if hasattr(result, "logits") else result.last_hidden_state


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel  # a peer's environment may not have it

    # No dropout, here and in BERT: gradients are compared with eager's.
    config = GPT2Config(use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return TextModel(GPT2LMHeadModel(config))


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return TextModel(BertModel(config))


def minilm() -> nn.Module:
    """The shape of all-MiniLM-L6."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return TextModel(BertModel(config, add_pooling_layer=False))


class Chain(nn.Module):
    """50 steps of two reductions that cannot be fused into one kernel: nothing but launches."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(50):
            x = (x.sum(0, keepdim=True) + x.sum(1, keepdim=True)) * 0.01
        return x


class Gate(nn.Module):
    """One small pointwise kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * torch.sigmoid(x) - torch.exp(x)


class NextToken(nn.Module):
    """GPT-2's own loss: cross-entropy of every next token."""

    def __init__(self) -> None:
        super().__init__()
        self.model = gpt2().model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, labels=ids).loss


class Classify(nn.Module):
    """Cross-entropy of an image model's answer against labels that are fixed."""

    def __init__(self, model: nn.Module, batch: int) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("labels", torch.randint(1000, (batch,)))

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), self.labels)


def vision(name: str) -> nn.Module:
    import torchvision  # only machines with a GPU need it

    model = getattr(torchvision.models, name)(weights=None)
    if hasattr(
        model, "heads"
    ):  # of zeros at first, so that every answer and nearly every gradient would be 0
        model.heads.head.reset_parameters()
    return model


def tiny_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def linear10() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(10)))


def tf6() -> nn.Module:
    return nn.Sequential(*(Block(256, 4) for _ in range(6)))


@dataclass(frozen=True)
class Case:
    """One program. train: a call is forward and backward with fresh gradients, in training mode.
    tokens: the inputs are token ids below this number, else normally distributed. device, dtype: of
    the module and its inputs."""

    name: str
    about: str
    build: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    train: bool = False
    tokens: int = 0
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    def make(self) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """The module and its inputs, the same ones in every process."""
        torch.manual_seed(0)
        module = self.build().train(self.train).to(self.device, self.dtype)
        return module, tuple(self._input(shape).to(self.device) for shape in self.shapes)

    def _input(self, shape: tuple[int, ...]) -> Tensor:
        return (
            torch.randint(self.tokens, shape) if self.tokens else torch.randn(shape).to(self.dtype)
        )


CASES = {
    case.name: case
    for case in (
        Case("sum8", "(x + y).sum() on 8x8", Sum8, ((8, 8), (8, 8))),
        Case("sum8-view", "sum8 and a view of an input", Sum8View, ((8, 8), (8, 8))),
        Case("tiny-mlp", "16-32-4, batch 1", tiny_mlp, ((1, 16),)),
        Case("linear10", "10 Linear layers of 64, batch 1", linear10, ((1, 64),)),
        Case("pw", "pointwise, layer_norm, gelu, softmax on 1024x1024", Pointwise, ((1024, 1024),)),
        Case("tf6", "6 transformer blocks, d 256, 4 x 64 tokens", tf6, ((4, 64, 256),)),
        Case("resnet18", "batch 4 at 128x128", ResNet18, ((4, 3, 128, 128),)),
        Case(
            "tiny-mlp-train",
            "16-32-4, batch 8, forward + backward",
            lambda: Loss(tiny_mlp()),
            ((8, 16),),
            train=True,
        ),
        Case(
            "tf6-train",
            "6 transformer blocks, 4 x 64 tokens, forward + backward",
            lambda: Loss(tf6()),
            ((4, 64, 256),),
            train=True,
        ),
        Case(
            "minilm-1", "MiniLM, 6 layers of 384, 1 x 64 tokens", minilm, ((1, 64),), tokens=30522
        ),
        Case("minilm-32", "the same, 32 x 64 tokens", minilm, ((32, 64),), tokens=30522),
        Case(
            "mobilenet", "MobileNetV3 large, batch 1 at 224x224", MobileNetV3, ((1, 3, 224, 224),)
        ),
        Case("gpt2", "GPT-2 of 124M parameters, 1 x 128 tokens", gpt2, ((1, 128),), tokens=50257),
        Case(
            "gpt2-train",
            "GPT-2 of 124M parameters, 1 x 128 tokens, forward + backward",
            lambda: Loss(gpt2()),
            ((1, 128),),
            train=True,
            tokens=50257,
        ),
        Case(
            "bert-train",
            "BERT-base, 4 x 64 tokens, forward + backward",
            lambda: Loss(bert()),
            ((4, 64),),
            train=True,
            tokens=30522,
        ),
    )
}


def _on_gpu(
    name: str, about: str, build: Callable[[], nn.Module], *shapes: tuple[int, ...], **more: Any
) -> Case:
    return Case(name, about, build, shapes, device="cuda", **more)


_BF16: dict[str, Any] = {"dtype": torch.bfloat16}
_GPT2: dict[str, Any] = {"tokens": 50257, **_BF16}
_BERT: dict[str, Any] = {"tokens": 30522, **_BF16}
_TRAIN: dict[str, Any] = {"train": True, **_BF16}
_IMAGES = (32, 3, 224, 224)
GPU_CASES = {
    case.name: case
    for case in (
        _on_gpu(
            "chain", "51 kernels of reductions on 64x64, each needs the one before", Chain, (64, 64)
        ),
        _on_gpu("sum128", "(x + y).sum() on 128x128", Sum8, (128, 128), (128, 128)),
        _on_gpu("gate", "tanh(x) * sigmoid(x) - exp(x) on 64x64", Gate, (64, 64)),
        _on_gpu("tiny-mlp", "16-32-4, batch 1", tiny_mlp, (1, 16)),
        _on_gpu(
            "tf6",
            "6 transformer blocks, d 256, 4 x 64 tokens, float16",
            tf6,
            (4, 64, 256),
            dtype=torch.float16,
        ),
        _on_gpu(
            "gpt2-8", "GPT-2 of 124M parameters, 1 x 8 tokens, bfloat16", gpt2, (1, 8), **_GPT2
        ),
        _on_gpu(
            "gpt2", "GPT-2 of 124M parameters, 4 x 512 tokens, bfloat16", gpt2, (4, 512), **_GPT2
        ),
        _on_gpu("bert", "BERT-base, 4 x 512 tokens, bfloat16", bert, (4, 512), **_BERT),
        _on_gpu(
            "resnet50",
            "batch 32 at 224x224, bfloat16",
            lambda: vision("resnet50"),
            _IMAGES,
            **_BF16,
        ),
        _on_gpu(
            "vit",
            "ViT-B/16, batch 32 at 224x224, bfloat16",
            lambda: vision("vit_b_16"),
            _IMAGES,
            **_BF16,
        ),
        _on_gpu(
            "gpt2-train",
            "gpt2 and its loss, forward + backward",
            NextToken,
            (4, 512),
            train=True,
            **_GPT2,
        ),
        _on_gpu(
            "bert-train",
            "bert, forward + backward",
            lambda: Loss(bert()),
            (4, 512),
            train=True,
            **_BERT,
        ),
        _on_gpu(
            "resnet50-train",
            "resnet50 and cross-entropy, forward + backward",
            lambda: Classify(vision("resnet50"), 32),
            _IMAGES,
            **_TRAIN,
        ),
        _on_gpu(
            "vit-train",
            "vit and cross-entropy, forward + backward",
            lambda: Classify(vision("vit_b_16"), 32),
            _IMAGES,
            **_TRAIN,
        ),
    )
}
