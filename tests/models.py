"""Models of the test suite, small and with random weights: transformers' by their configs, a ResNet
and a U-Net."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class BasicBlock(nn.Module):
    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.down: nn.Module = nn.Identity()
        if stride != 1 or c_in != c_out:
            self.down = nn.Sequential(
                nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm2d(c_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.down(x))


class ResNet(nn.Module):
    """A ResNet of basic blocks; widths=(64, 128, 256, 512), blocks=2 each is ResNet-18."""

    def __init__(
        self, widths: tuple[int, ...] = (16, 32), blocks: int = 1, classes: int = 10
    ) -> None:
        super().__init__()
        c = widths[0]
        self.stem = nn.Sequential(
            nn.Conv2d(3, c, 7, 2, 3, bias=False),
            nn.BatchNorm2d(c),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        layers: list[nn.Module] = []
        for k, width in enumerate(widths):
            for b in range(blocks):
                layers.append(BasicBlock(c, width, 2 if k > 0 and b == 0 else 1))
                c = width
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(c, classes)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(self.stem(x))
        return self.head(F.adaptive_avg_pool2d(y, 1).flatten(1))


class UNet(nn.Module):
    """Two levels down and up, with group norm, skip connections by cat, and nearest upsampling."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()

        def conv(i: int, o: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(4, o), nn.SiLU())

        self.inc, self.d1, self.d2 = conv(3, c), conv(c, 2 * c), conv(2 * c, 4 * c)
        self.u1, self.u2 = conv(6 * c, 2 * c), conv(3 * c, c)
        self.out = nn.Conv2d(c, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.inc(x)
        b = self.d1(F.max_pool2d(a, 2))
        c = self.d2(F.avg_pool2d(b, 2))
        y = self.u1(torch.cat([F.interpolate(c, scale_factor=2, mode="nearest"), b], 1))
        y = self.u2(torch.cat([F.interpolate(y, scale_factor=2, mode="bilinear"), a], 1))
        return torch.sigmoid(self.out(y))


class Logits(nn.Module):
    """Runs a transformers model and returns its first output as a plain tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        out = self.model(x)
        first = out[0]
        assert isinstance(first, Tensor)
        return first


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    cfg = GPT2Config(
        n_layer=2, n_head=4, n_embd=64, vocab_size=211, n_positions=64, use_cache=False
    )
    return Logits(GPT2LMHeadModel(cfg))


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    cfg = BertConfig(
        num_hidden_layers=2, num_attention_heads=4, hidden_size=64, intermediate_size=128,
        vocab_size=211, max_position_embeddings=64,
    )  # fmt: skip
    return Logits(BertModel(cfg))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    cfg = LlamaConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=64,
        intermediate_size=128, vocab_size=211, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return Logits(LlamaForCausalLM(cfg))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTModel

    cfg = ViTConfig(
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_size=64,
        intermediate_size=128,
        image_size=32,
        patch_size=8,
    )
    return Logits(ViTModel(cfg))


def tokens(batch: int) -> Tensor:
    return torch.randint(0, 211, (batch, 24))


def images(batch: int) -> Tensor:
    return torch.randn(batch, 3, 32, 32)


MODELS = {
    "gpt2": (gpt2, tokens),
    "bert": (bert, tokens),
    "llama": (llama, tokens),
    "vit": (vit, images),
    "resnet": (ResNet, images),
    "unet": (UNet, images),
}

SOME = ("gpt2", "resnet", "unet")
"""Models that stand for all where a test of each would take long: the others are slow."""


def network() -> nn.Module:
    """Convolutions, norms with running statistics, pooling and dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, stride=2), nn.GroupNorm(4, 32), nn.SiLU(), nn.Dropout(0.2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def step(call: Any, module: nn.Module, x: Tensor, train: bool) -> list[Tensor]:
    """What a call gives, gradients and buffers too."""
    torch.manual_seed(5)
    module.zero_grad()
    with torch.set_grad_enabled(train):
        out = call(x)
        out = out if isinstance(out, Tensor) else next(iter(out.values()))
        if train:
            out.float().pow(2).mean().backward()
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    return [out.detach(), *grads, *module.buffers()]
