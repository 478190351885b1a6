"""Models of the suite that no library has: diffusion, generators, segmentation, sound,
recommendation, graph networks and others, at real sizes. tests/classics.py has such in small.

Each takes a batch of tensors and returns a tensor or a tuple of them.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ResBlock(nn.Module):
    """Two convolutions with group norm, and a time embedding between them."""

    def __init__(self, cin: int, cout: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, cin), nn.Conv2d(cin, cout, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(32, cout), nn.Conv2d(cout, cout, 3, padding=1)
        self.time = nn.Linear(time, cout) if time else None
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x: Tensor, emb: Tensor | None = None) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        if self.time is not None and emb is not None:
            y = y + self.time(F.silu(emb))[:, :, None, None]
        return self.conv2(F.silu(self.norm2(y))) + self.skip(x)


class Attend(nn.Module):
    """Attention of tokens to themselves, or to a context."""

    def __init__(self, dim: int, context: int, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.out = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim)
        self.k, self.v = (nn.Linear(context, dim, bias=False) for _ in range(2))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in (self.q(x), self.k(context), self.v(context))
        )
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))


class SpatialTransformer(nn.Module):
    """A transformer block over the pixels of an image, with cross attention to a text."""

    def __init__(self, dim: int, context: int) -> None:
        super().__init__()
        self.norm, self.inp, self.out = (
            nn.GroupNorm(32, dim), nn.Conv2d(dim, dim, 1), nn.Conv2d(dim, dim, 1),
        )  # fmt: skip
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3))
        self.own, self.cross = Attend(dim, dim), Attend(dim, context)
        self.gate, self.down = nn.Linear(dim, 8 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        y = self.inp(self.norm(x)).flatten(2).transpose(1, 2)
        z = self.norms[0](y)
        y = y + self.own(z, z)
        y = y + self.cross(self.norms[1](y), context)
        value, gate = self.gate(self.norms[2](y)).chunk(2, -1)
        y = y + self.down(value * F.gelu(gate))
        return x + self.out(y.transpose(1, 2).unflatten(2, x.shape[2:]))


class NoText(nn.Module):
    """In the place of a spatial transformer where there is none."""

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return x


class DiffusionUNet(nn.Module):
    """The U-Net of a latent diffusion model: levels of residual blocks, with spatial transformers
    in all but the first."""

    def __init__(self, widths: tuple[int, ...] = (128, 256, 384), context: int = 768) -> None:
        super().__init__()
        self.width, time = widths[0], 4 * widths[0]
        self.time = nn.Sequential(nn.Linear(self.width, time), nn.SiLU(), nn.Linear(time, time))
        self.inp = nn.Conv2d(4, self.width, 3, padding=1)
        self.downs, self.ups = nn.ModuleList(), nn.ModuleList()
        self.shrinks, self.grows = nn.ModuleList(), nn.ModuleList()
        self.down_text, self.up_text = nn.ModuleList(), nn.ModuleList()
        last = self.width
        for k, w in enumerate(widths):
            self.downs.append(ResBlock(last, w, time))
            self.down_text.append(SpatialTransformer(w, context) if k else NoText())
            self.shrinks.append(nn.Conv2d(w, w, 3, 2, 1))
            last = w
        self.mid, self.mid_text = ResBlock(last, last, time), SpatialTransformer(last, context)
        for k, w in reversed(list(enumerate(widths))):
            self.grows.append(nn.Conv2d(last, last, 3, padding=1))
            self.ups.append(ResBlock(last + w, w, time))
            self.up_text.append(SpatialTransformer(w, context) if k else NoText())
            last = w
        self.norm, self.out = nn.GroupNorm(32, last), nn.Conv2d(last, 4, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor, text: Tensor) -> Tensor:
        half = self.width // 2
        rates = torch.exp(torch.arange(half, device=x.device) * (-math.log(10000.0) / half))
        angles = 1000 * t[:, None].float() * rates
        emb = self.time(torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype))
        y, kept = self.inp(x), []
        for block, attend, shrink in zip(self.downs, self.down_text, self.shrinks, strict=True):
            y = attend(block(y, emb), text)
            kept.append(y)
            y = shrink(y)
        y = self.mid_text(self.mid(y, emb), text)
        for grow, block, attend in zip(self.grows, self.ups, self.up_text, strict=True):
            y = grow(F.interpolate(y, scale_factor=2.0, mode="nearest"))
            y = attend(block(torch.cat([y, kept.pop()], 1), emb), text)
        return self.out(F.silu(self.norm(y)))


class ImageDecoder(nn.Module):
    """The decoder of a latent diffusion model's autoencoder."""

    def __init__(self, widths: tuple[int, ...] = (256, 256, 128, 64)) -> None:
        super().__init__()
        self.inp = nn.Conv2d(4, widths[0], 3, padding=1)
        pairs = zip((widths[0], *widths), widths, strict=False)
        self.blocks = nn.ModuleList(ResBlock(a, b, 0) for a, b in pairs)
        self.grows = nn.ModuleList(nn.Conv2d(w, w, 3, padding=1) for w in widths[:-1])
        self.norm, self.out = nn.GroupNorm(32, widths[-1]), nn.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inp(x)
        for k, block in enumerate(self.blocks):
            y = block(y)
            if k < len(self.grows):
                y = self.grows[k](F.interpolate(y, scale_factor=2.0, mode="nearest"))
        return self.out(F.silu(self.norm(y)))


def generator(width: int = 64) -> nn.Module:
    """DCGAN's generator: transposed convolutions from noise to an image of 64x64."""
    layers: list[nn.Module] = []
    last = 100
    for k, w in enumerate((8 * width, 4 * width, 2 * width, width)):
        stride, padding = (2, 1) if k else (1, 0)
        layers += [nn.ConvTranspose2d(last, w, 4, stride, padding, bias=False)]
        layers += [nn.BatchNorm2d(w), nn.ReLU()]
        last = w
    return nn.Sequential(*layers, nn.ConvTranspose2d(last, 3, 4, 2, 1), nn.Tanh())


class SegmentationUNet(nn.Module):
    """The U-Net of medical images: pooled on the way down, transposed convolutions on the way
    up."""

    def __init__(self, width: int = 32, levels: int = 4) -> None:
        super().__init__()
        widths = [width * 2**k for k in range(levels + 1)]
        self.downs = nn.ModuleList(
            self.block(a, b) for a, b in zip((3, *widths), widths, strict=False)
        )
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.grows = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in pairs)
        self.ups = nn.ModuleList(self.block(2 * b, b) for _, b in pairs)
        self.out = nn.Conv2d(width, 2, 1)

    @staticmethod
    def block(cin: int, cout: int) -> nn.Module:
        """Two convolutions with batch norm."""
        layers: list[nn.Module] = []
        for c in (cin, cout):
            layers += [nn.Conv2d(c, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout)]
            layers += [nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for k, down in enumerate(self.downs):
            x = down(F.max_pool2d(x, 2) if k else x)
            kept.append(x)
        kept.pop()
        for grow, up in zip(self.grows, self.ups, strict=True):
            x = up(torch.cat([grow(x), kept.pop()], 1))
        return self.out(x)


class WaveNet(nn.Module):
    """Causal, dilated, gated convolutions with skip connections."""

    def __init__(self, width: int = 64, blocks: int = 2, depth: int = 10) -> None:
        super().__init__()
        self.inp = nn.Conv1d(1, width, 1)
        self.dilations = [2**k for _ in range(blocks) for k in range(depth)]
        self.gates = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 2, dilation=d) for d in self.dilations
        )
        self.skips = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in self.dilations)
        self.out1, self.out2 = nn.Conv1d(width, width, 1), nn.Conv1d(width, 256, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.inp(x), torch.zeros((), device=x.device, dtype=x.dtype)
        for d, gate, skip in zip(self.dilations, self.gates, self.skips, strict=True):
            a, b = gate(F.pad(x, (d, 0))).chunk(2, 1)
            more, rest = skip(torch.tanh(a) * torch.sigmoid(b)).chunk(2, 1)
            total, x = total + more, x + rest
        return self.out2(F.relu(self.out1(F.relu(total))))


class SuperResolution(nn.Module):
    """EDSR: residual blocks without norms, then pixel shuffle."""

    def __init__(self, width: int = 64, blocks: int = 16) -> None:
        super().__init__()
        self.inp = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1),
            )
            for _ in range(blocks)
        )
        self.grows = nn.ModuleList(nn.Conv2d(width, 4 * width, 3, padding=1) for _ in range(2))
        self.out = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = y = self.inp(x)
        for block in self.blocks:
            y = y + block(y)
        y = y + first
        for grow in self.grows:
            y = F.pixel_shuffle(grow(y), 2)
        return self.out(y)


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Dlrm(nn.Module):
    """A recommender: embeddings of many fields, products of all pairs, and two networks."""

    def __init__(self, fields: int = 26, rows: int = 20000, dim: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum") for _ in range(fields))
        self.bottom = mlp(13, 512, 256, dim)
        self.top = mlp(dim + fields * (fields + 1) // 2, 1024, 1024, 512, 256, 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = F.relu(self.bottom(dense))
        bags = [table(ids[:, k]) for k, table in enumerate(self.tables)]
        all_of = torch.stack([x, *bags], 1)
        products = all_of @ all_of.transpose(1, 2)
        n = all_of.shape[1]
        i, j = torch.tril_indices(n, n, -1, device=x.device)
        return self.top(torch.cat([x, products[:, i, j]], 1))


class DeepCross(nn.Module):
    """A recommender: explicit crosses of features beside a deep network (DCN v2)."""

    def __init__(
        self, fields: int = 26, rows: int = 20000, dim: int = 32, crosses: int = 4
    ) -> None:
        super().__init__()
        self.table, self.fields = nn.Embedding(fields * rows, dim), fields
        self.rows, width = rows, fields * dim + 13
        self.crosses = nn.ModuleList(nn.Linear(width, width) for _ in range(crosses))
        self.deep, self.out = mlp(width, 1024, 512), nn.Linear(width + 512, 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        offsets = torch.arange(self.fields, device=ids.device) * self.rows
        x0 = x = torch.cat([dense, self.table(ids[:, :, 0] + offsets).flatten(1)], 1)
        for cross in self.crosses:
            x = x0 * cross(x) + x
        return torch.sigmoid(self.out(torch.cat([x, F.relu(self.deep(x0))], 1)))


class GraphConvolution(nn.Module):
    """A graph network: means of neighbours, with residuals and layer norm."""

    def __init__(self, dim: int = 128, layers: int = 6) -> None:
        super().__init__()
        self.own = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.other = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        src, dst = edges
        ones = torch.ones(dst.shape, device=x.device, dtype=x.dtype)
        degree = torch.zeros(x.shape[0], device=x.device, dtype=x.dtype).index_add(0, dst, ones)
        for own, other, norm in zip(self.own, self.other, self.norms, strict=True):
            sums = torch.zeros_like(x).index_add(0, dst, x[src])
            x = x + F.relu(norm(own(x) + other(sums / degree.clamp(min=1)[:, None])))
        return x


class GraphAttention(nn.Module):
    """A graph network whose nodes attend to their neighbours: a softmax over each node's edges."""

    def __init__(self, dim: int = 128, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.values = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.scores = nn.ModuleList(nn.Linear(dim, 2 * heads) for _ in range(layers))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        src, dst = edges
        for value, score in zip(self.values, self.scores, strict=True):
            v, (a, b) = value(x).unflatten(-1, (self.heads, -1)), score(x).chunk(2, -1)
            e = F.leaky_relu(a[src] + b[dst], 0.2)
            index = dst[:, None].expand_as(e)
            top = torch.full_like(a, -1e4).scatter_reduce(0, index, e.detach(), "amax")
            p = torch.exp(e - top[dst])
            total = torch.zeros_like(a).index_add(0, dst, p)
            y = torch.zeros_like(v).index_add(0, dst, v[src] * (p / total[dst])[..., None])
            x = x + F.elu(y.flatten(1))
        return x


class LanguageLstm(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self, vocab: int = 10000, dim: int = 512) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, dim), nn.Linear(dim, vocab)
        self.rnn = nn.LSTM(dim, dim, num_layers=2, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(ids))[0])


class RadianceField(nn.Module):
    """A NeRF: positions as sines, a network with a skip, and the sum along each ray."""

    def __init__(self, dim: int = 256, octaves: int = 10) -> None:
        super().__init__()
        self.octaves = octaves
        inner = 3 + 6 * octaves
        self.first, self.second = mlp(inner, dim, dim, dim, dim), mlp(dim + inner, dim, dim, dim)
        self.density, self.colour = nn.Linear(dim, 1), mlp(dim, dim // 2, 3)

    def forward(self, points: Tensor) -> Tensor:
        rates = 2.0 ** torch.arange(self.octaves, device=points.device)
        angles = (points[..., None].float() * rates).flatten(-2)
        x = torch.cat([points, angles.sin().to(points.dtype), angles.cos().to(points.dtype)], -1)
        y = F.relu(self.second(torch.cat([F.relu(self.first(x)), x], -1)))
        opaque = 1 - torch.exp(-F.softplus(self.density(y)) / points.shape[1])
        through = torch.cumprod(1 - opaque + 1e-4, 1)
        return (through * opaque * torch.sigmoid(self.colour(y))).sum(1)


class FourierOperator(nn.Module):
    """A Fourier neural operator in two dimensions: complex weights on the low frequencies."""

    def __init__(self, width: int = 32, modes: int = 12, layers: int = 4) -> None:
        super().__init__()
        self.modes = modes
        self.inp, self.out = nn.Conv2d(1, width, 1), nn.Conv2d(width, 1, 1)
        self.skips = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(layers))
        self.weights = nn.ParameterList(
            torch.randn(width, width, modes, modes, 2) / width for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        x, m = self.inp(x), self.modes
        for skip, weight in zip(self.skips, self.weights, strict=True):
            low = torch.fft.rfft2(x)[:, :, :m, :m]
            mixed = torch.einsum("bixy,ioxy->boxy", low, torch.view_as_complex(weight))
            full = F.pad(mixed, (0, x.shape[-1] // 2 + 1 - m, 0, x.shape[-2] - m))
            x = F.gelu(torch.fft.irfft2(full, s=x.shape[-2:]) + skip(x))
        return self.out(x)
