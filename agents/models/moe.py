"""The feed-forward part of a layer: one MLP, or a router and many of them (mixture of experts)."""

from __future__ import annotations

import re
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig

_FUSED = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)")


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, width: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=bias)
        self.up_proj = nn.Linear(hidden, width, bias=bias)
        self.down_proj = nn.Linear(width, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., E) to (..., E)."""
        return cast("Tensor", self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class MoE(nn.Module):
    """Each token goes through the k experts that the router's softmax likes best, weighted by it.

    Tokens are sorted by expert, so that each expert is one MLP over its own tokens: the work is that of k MLPs a
    token, whatever the number of experts.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        experts = (MLP(config.hidden_size, config.moe_intermediate_size) for _ in range(config.num_experts))
        self.experts = nn.ModuleList(experts)
        self.chosen, self.normalise = config.num_experts_per_tok, config.norm_topk_prob

    def forward(self, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Map (B, T, E) to (B, T, E), and give what the router did with the `real` tokens (see `tally`)."""
        flat = x.flatten(0, 1)
        logits = self.gate(flat)
        scores = F.softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)
        weights, chosen = scores.topk(self.chosen, -1)  # (N, k) each
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        owners = chosen.flatten()  # the expert of each of the N * k places
        order = owners.argsort(stable=True)
        sizes = torch.bincount(owners, minlength=len(self.experts)).tolist()
        parts = torch.split(flat.index_select(0, order // self.chosen), sizes)
        # While training every expert runs, on no tokens if need be: its gradient is then 0, not missing, so that the
        # optimizer and other processes treat it like the rest.
        busy = [(e, part) for e, part in zip(self.experts, parts, strict=True) if len(part) or torch.is_grad_enabled()]
        done = torch.cat([expert(part) for expert, part in busy]) if busy else flat
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        by_token = done.index_select(0, back).view(-1, self.chosen, x.shape[-1])  # (N, k, E)
        out = (by_token * weights.to(x.dtype)[:, :, None]).sum(1).view_as(x)
        wanted = self.training and torch.is_grad_enabled()
        return out, tally(scores, chosen, real) if wanted else None


def tally(scores: Tensor, chosen: Tensor, real: Tensor | None) -> Tensor:
    """Return (2, experts): how many tokens each expert got, and the sum of its probabilities, over the real tokens.

    `scores` is (N, experts), `chosen` (N, k); `real` has N elements, 0 for padding, or is None: all are real.
    """
    weight = torch.ones_like(scores[:, 0]) if real is None else real.flatten().to(scores.dtype)
    load = scores.new_zeros(scores.shape[1]).index_add_(0, chosen.flatten(), weight.repeat_interleave(chosen.shape[1]))
    return torch.stack((load, weight @ scores))


def balance_loss(routed: Tensor, chosen: int) -> Tensor:
    """Return the load-balancing loss of summed tallies (2, experts), `chosen` experts a token; least when even.

    Switch Transformer (arXiv:2101.03961), equations 4 to 6, with k experts and over all layers at once, as
    transformers' `load_balancing_loss_func`: experts * sum_i(share of tokens_i * mean probability_i).
    """
    load, mass = routed.unbind()
    tokens = (load.sum() / chosen).clamp(min=1)  # 0 when all was padding
    return (load * mass).sum() * len(load) / tokens.square()


def split_experts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return views by expert of a tensor that transformers 5 keeps fused in memory; any other as it is.

    `mlp.experts.gate_up_proj` is (experts, 2 * width, hidden), `mlp.experts.down_proj` (experts, hidden, width);
    the names given are those of Hugging Face files, `mlp.experts.0.gate_proj.weight` and so on.
    """
    match = _FUSED.fullmatch(name)
    if match is None or tensor.dim() != 3:
        return {name: tensor}
    stem, kind = match.groups()
    pieces = tensor.chunk(2, 1) if kind == "gate_up_proj" else (tensor,)
    names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    return {
        f"{stem}.{i}.{part}.weight": piece[i]
        for part, piece in zip(names, pieces, strict=False)
        for i in range(len(tensor))
    }
