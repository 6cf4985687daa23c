"""One GPT, twice: as an `nn.Module` for the peers, and as a function of its parameters for fspeed; the same numbers."""
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import fspeed as fs
from fspeed.functional import nested


@dataclass(frozen=True)
class Size:
    """17.0M parameters by default."""
    layers: int = 6
    d: int = 384
    heads: int = 6
    vocab: int = 8192
    seq: int = 256
    batch: int = 4


TINY = Size(layers=12, d=64, heads=4, vocab=256, seq=64)
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Block(nn.Module):
    def __init__(self, s: Size):
        super().__init__()
        self.heads = s.heads
        self.ln1, self.ln2 = nn.LayerNorm(s.d), nn.LayerNorm(s.d)
        self.qkv, self.proj = nn.Linear(s.d, 3 * s.d), nn.Linear(s.d, s.d)
        self.up, self.down = nn.Linear(s.d, 4 * s.d), nn.Linear(4 * s.d, s.d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.qkv(self.ln1(x)), "b t (three h d) -> three b h t d", three=3, h=self.heads)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(rearrange(a, "b h t d -> b t (h d)"))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    """forward(tokens, targets) -> mean cross-entropy."""

    def __init__(self, s: Size):
        super().__init__()
        self.tok, self.pos = nn.Embedding(s.vocab, s.d), nn.Embedding(s.seq, s.d)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.ln = nn.LayerNorm(s.d)
        self.head = nn.Linear(s.d, s.vocab, bias=False)
        for m in self.modules():
            if isinstance(m, (nn.Linear, nn.Embedding)):
                nn.init.normal_(m.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tok(tokens) + self.pos.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.ln(x)).flatten(0, 1), targets.flatten())


def module(size: Size, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(size)


def params(size: Size) -> dict:
    """The module's parameters as a tree."""
    return nested({name: p.detach() for name, p in module(size).named_parameters()})


def block(size: Size):
    """A `Block`'s forward as a function of its parameters."""
    norm = lambda p, x: F.layer_norm(x, (size.d,), p["weight"], p["bias"])
    linear = lambda p, x: F.linear(x, p["weight"], p["bias"])

    def run(p, x):
        q, k, v = rearrange(linear(p["qkv"], norm(p["ln1"], x)), "b t (three h d) -> three b h t d", three=3, h=size.heads)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(p["proj"], rearrange(a, "b h t d -> b t (h d)"))
        return x + linear(p["down"], F.gelu(linear(p["up"], norm(p["ln2"], x))))

    return run


def loss(size: Size):
    """The module's forward as a loss of fspeed."""
    norm = lambda p, x: F.layer_norm(x, (size.d,), p["weight"], p["bias"])
    layer_of = fs.layer(block(size))

    @fs.layer
    def head(p, x):
        return F.linear(x, p["weight"])

    def run(p, batch, key):
        tokens, targets = batch
        x = F.embedding(tokens, p["tok"]["weight"]) + p["pos"]["weight"]
        for layer in p["blocks"]:
            x = layer_of(layer, x)
        logits = head(p["head"], norm(p["ln"], x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return run


def step(size: Size, layers: str | tuple[str, ...] = "blocks/*") -> fs.Step:
    """The bare step, with the peers' optimizer."""
    (b1, b2), rest = ADAMW["betas"], {k: v for k, v in ADAMW.items() if k not in ("lr", "betas")}
    return fs.step(loss(size), fs.optim.adamw(ADAMW["lr"], b1=b1, b2=b2, **rest), layers=layers)


def batch(size: Size, number: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens of a random walk that a model can learn: each token has four successors."""
    table = torch.randint(0, size.vocab, (size.vocab, 4), generator=torch.Generator().manual_seed(1))
    g = torch.Generator().manual_seed(1000 * number + rank)
    tokens = [torch.randint(0, size.vocab, (size.batch,), generator=g)]
    for choice in torch.randint(0, 4, (size.seq, size.batch), generator=g):
        tokens.append(table[tokens[-1], choice])
    x = torch.stack(tokens, 1)
    return x[:, :-1].contiguous(), x[:, 1:].contiguous()
