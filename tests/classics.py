"""Classic architectures of the zoo, small: recurrent, convolutional, graphs, experts, physics,
diffusion and others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB = 99


class Recurrent(nn.Module):
    """An embedding, a recurrent network and a head on its last step."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.rnn = kind(16, 16, num_layers=2, batch_first=True, **options)
        self.head = nn.Linear(16 * (2 if options.get("bidirectional") else 1), 5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y, _ = self.rnn(self.embed(x))
        return self.head(y[:, -1]), y


class Cells(nn.Module):
    """A decoder of LSTM and GRU cells with attention over the inputs, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(12, 16), nn.GRUCell(16, 16)
        self.query, self.out = nn.Linear(16, 12), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = c = g = x.new_zeros(x.shape[0], 16)
        outs = []
        for _ in range(4):
            scores = torch.softmax(torch.einsum("bd,btd->bt", self.query(g), x), -1)
            h, c = self.lstm(torch.einsum("bt,btd->bd", scores, x), (h, c))
            g = self.gru(h, g)
            outs.append(self.out(g))
        return (torch.stack(outs, 1),)


class WaveNet(nn.Module):
    """Causal, dilated, gated convolutions with skip connections."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.inp = nn.Conv1d(1, c, 1)
        self.gates = nn.ModuleList(nn.Conv1d(c, 2 * c, 2, dilation=2**k) for k in range(4))
        self.skips = nn.ModuleList(nn.Conv1d(c, c, 1) for _ in range(4))
        self.out = nn.utils.parametrizations.weight_norm(nn.Conv1d(c, 1, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x, total = self.inp(x), 0.0
        for k, (gate, skip) in enumerate(zip(self.gates, self.skips, strict=True)):
            a, b = gate(F.pad(x, (2**k, 0))).chunk(2, 1)
            y = skip(torch.tanh(a) * torch.sigmoid(b))
            total, x = total + y, x + y
        return (self.out(F.relu(total)),)


class Experts(nn.Module):
    """A mixture of experts whose routing decides how many rows each expert sees."""

    def __init__(self, dim: int = 16, n: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(dim, n)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim)) for _ in range(n)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        rows = x.flatten(0, 1)
        weight, chosen = self.router(rows).softmax(-1).topk(2, -1)
        out = torch.zeros_like(rows)
        for k, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == k)
            out = out.index_add(0, row, expert(rows[row]) * weight[row, slot, None])
        return (out.view_as(x),)


class Graph(nn.Module):
    """Message passing by gather and scatter, mean and max aggregation, a readout by graph."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(2 * dim, dim), nn.GRUCell(2 * dim, dim)
        self.score = nn.Linear(2 * dim, 1)

    def forward(self, x: Tensor, edges: Tensor) -> tuple[Tensor, ...]:
        src, dst = edges
        for _ in range(2):
            ends = torch.cat([x[src], x[dst]], -1)
            message = F.relu(self.message(ends))
            zero = torch.zeros_like(x)
            index = dst[:, None].expand_as(message)
            top = zero.scatter_reduce(0, index, message, "amax", include_self=False)
            weight = torch.exp(self.score(ends))
            total = weight.new_zeros(x.shape[0], 1).index_add(0, dst, weight)
            mean = zero.index_add(0, dst, message * weight / total[dst])
            x = self.update(torch.cat([mean, top], -1), x)
        degree = torch.zeros(x.shape[0]).scatter_add(0, dst, torch.ones(dst.shape[0]))
        return x, (x * degree[:, None]).sum(0)


class Diffusion(nn.Module):
    """A U-Net of residual blocks with group norm, time embedding and attention at the bottom."""

    class Block(nn.Module):
        def __init__(self, i: int, o: int) -> None:
            super().__init__()
            self.n1, self.c1 = nn.GroupNorm(4, i), nn.Conv2d(i, o, 3, padding=1)
            self.n2, self.c2 = nn.GroupNorm(4, o), nn.Conv2d(o, o, 3, padding=1)
            self.time, self.skip = nn.Linear(16, o), nn.Conv2d(i, o, 1)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            y = self.c1(F.silu(self.n1(x))) + self.time(t)[:, :, None, None]
            return self.c2(F.silu(self.n2(y))) + self.skip(x)

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.inp, self.out = nn.Conv2d(3, c, 3, padding=1), nn.Conv2d(c, 3, 3, padding=1)
        self.down, self.mid, self.up = self.Block(c, c), self.Block(c, 2 * c), self.Block(3 * c, c)
        self.pool = nn.Conv2d(c, c, 3, 2, 1)
        self.norm, self.qkv = nn.GroupNorm(4, 2 * c), nn.Conv2d(2 * c, 6 * c, 1)
        self.time = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16))

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        rates = torch.exp(-torch.arange(8) * 1.15)
        angles = t[:, None] * rates
        emb = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        a = self.down(self.inp(x), emb)
        y = self.mid(self.pool(a), emb)
        q, k, v = self.qkv(self.norm(y)).flatten(2).transpose(1, 2).chunk(3, -1)
        att = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])
        y = y + att[:, 0].transpose(1, 2).reshape(y.shape)
        y = F.interpolate(y, scale_factor=2, mode="nearest")
        return (self.out(self.up(torch.cat([y, a], 1), emb)),)


class Physics(nn.Module):
    """A network whose loss holds derivatives of its output by its input (torch.func)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        def u(p: Tensor) -> Tensor:
            return self.net(p)[0]

        first = torch.func.vmap(torch.func.jacrev(u))(x)
        second = torch.func.vmap(torch.func.hessian(u))(x)
        residual = first[:, 1] + self.net(x)[:, 0] * first[:, 0] - 0.01 * second[:, 0, 0]
        return self.net(x), residual


class Forces(nn.Module):
    """Forces of a system of particles: the gradient of its energy, taken inside the model by
    autograd.grad."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            apart = x[:, :, None] - x[:, None]
            far = (apart.square().sum(-1) + 1e-3).sqrt()
            energy = self.net(far[..., None]).sum((1, 2, 3))
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=self.training)
        return energy, -force


class Variational(nn.Module):
    """A variational autoencoder with convolutions, noise and a KL term."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 16, 4, 2, 1), nn.Flatten()
        )
        self.head, self.lift = nn.Linear(16 * 16, 16), nn.Linear(8, 16 * 16)
        self.dec = nn.Sequential(
            nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.ELU(), nn.ConvTranspose2d(8, 3, 4, 2, 1)
        )

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        mean, log = self.head(self.enc(x)).chunk(2, 1)
        z = mean + torch.exp(0.5 * log) * noise
        back = torch.sigmoid(self.dec(self.lift(z).unflatten(1, (16, 4, 4))))
        kl = -0.5 * (1 + log - mean.square() - log.exp()).sum(1)
        return F.binary_cross_entropy(back, torch.sigmoid(x), reduction="none").flatten(1).sum(
            1
        ), kl


class Ring(nn.Module):
    """Attention in blocks with a running maximum and sum, causal by block, as ring attention does
    it."""

    def __init__(self, dim: int = 16, block: int = 4) -> None:
        super().__init__()
        self.qkv, self.block = nn.Linear(dim, 3 * dim), block

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = self.qkv(x).chunk(3, -1)
        place = torch.arange(x.shape[1])
        top = x.new_full((*x.shape[:2], 1), float("-inf"))
        total, out = torch.zeros_like(top), torch.zeros_like(q)
        for start in range(0, x.shape[1], self.block):
            at = slice(start, start + self.block)
            scores = q @ k[:, at].transpose(1, 2) / 4
            scores = scores.masked_fill(place[:, None] < place[at], float("-inf"))
            new = torch.maximum(top, scores.amax(-1, keepdim=True))
            safe = torch.where(new.isinf(), 0.0, new)
            p, scale = torch.exp(scores - safe), torch.exp(top - safe)
            total, out, top = (
                total * scale + p.sum(-1, keepdim=True),
                out * scale + p @ v[:, at],
                new,
            )
        return out / total, (top + total.log()).squeeze(-1)


class Flow(nn.Module):
    """A step of optical flow: features, a correlation of shifts, a warp by grid_sample."""

    def __init__(self) -> None:
        super().__init__()
        self.feature, self.flow = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(9, 2, 3, padding=1)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        fa, fb = self.feature(a), self.feature(b)
        shifts = F.unfold(fb, 3, padding=1).unflatten(1, (8, 9)).unflatten(-1, fb.shape[-2:])
        flow = torch.tanh(self.flow((fa[:, :, None] * shifts).mean(1)))
        eye = torch.eye(2, 3).expand(a.shape[0], 2, 3)
        grid = (
            F.affine_grid(eye, list(a.shape), align_corners=False) + flow.permute(0, 2, 3, 1) * 0.1
        )
        big = F.interpolate(flow, scale_factor=2, mode="bicubic", align_corners=False)
        return F.grid_sample(b, grid, align_corners=False, padding_mode="border"), big


class Superres(nn.Module):
    """Reflection padding, pixel shuffle, bicubic and bilinear resizing, average pooling with
    overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 12, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = F.relu(self.a(F.pad(x, (1, 1, 1, 1), mode="reflect")))
        y = F.pixel_shuffle(self.b(F.pad(y, (1, 1, 1, 1), mode="replicate")), 2)
        base = F.interpolate(x, scale_factor=2, mode="bicubic", align_corners=False)
        small = F.interpolate(y, size=(11, 13), mode="bilinear", align_corners=True)
        return (
            y + base,
            F.avg_pool2d(small, 3, 2, 1),
            F.adaptive_max_pool2d(F.pixel_unshuffle(y, 2), 3),
        )


class Recommender(nn.Module):
    """Embedding bags of several fields, factorised crosses and a wide part."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(VOCAB, 8, mode=m) for m in ("sum", "mean"))
        self.wide, self.deep = (
            nn.Embedding(VOCAB, 1),
            nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        parts = [bag(x) for bag in self.bags]
        cross = (parts[0] * parts[1]).sum(1, keepdim=True)
        return (torch.sigmoid(self.deep(torch.cat(parts, 1)) + cross + self.wide(x).sum(1)),)


class Spectral(nn.Module):
    """A Fourier neural operator: complex weights on the low frequencies of a real transform."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 5, 2) / 4)
        self.skip = nn.Conv1d(4, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        low = torch.fft.rfft(x)[..., :5]
        mixed = torch.einsum("bix,iox->box", low, torch.view_as_complex(self.weight.contiguous()))
        out = torch.zeros(x.shape[0], 4, x.shape[-1] // 2 + 1, dtype=mixed.dtype)
        out[..., :5] = mixed
        return (F.gelu(torch.fft.irfft(out, n=x.shape[-1]) + self.skip(x)),)


class Quantized(nn.Module):
    """Linear layers with int8 weights, made float on the fly."""

    def __init__(self) -> None:
        super().__init__()
        for k in range(2):
            w = torch.randn(16, 16)
            scale = w.abs().amax(1, keepdim=True) / 127
            self.register_buffer(f"w{k}", (w / scale).round().to(torch.int8))
            self.register_buffer(f"s{k}", scale)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = F.relu(F.linear(x, self.w0.to(x.dtype) * self.s0))
        return (F.linear(y, self.w1.to(x.dtype) * self.s1),)


class Capsule(nn.Module):
    """Transformer encoder of torch.nn with a causal mask and padding, and cross attention."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True),
            2,
            enable_nested_tensor=False,
        )
        self.cross = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        memory = self.encoder(x, mask=mask, is_causal=True)
        out, weight = self.cross(y, memory, memory)
        return out, weight
