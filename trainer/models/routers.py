"""Routers of a mixture of experts: which experts a token takes is recorded where tokens are sampled, and taken again where they are learned
from (R3, rollout routing replay: Ma et al. 2025, https://arxiv.org/abs/2510.11370). Runs in ranks and rollout engines.

Only the choice is replayed. Its weights come from the router's own scores, so the router learns, from the experts that a token did take.
What all routers of transformers have in common is that they choose by torch.topk, at the end: nothing here knows a family.

Axes: N tokens of a micro-batch, M layers with experts, K experts that a token takes in each, E experts that it chooses from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from trainer.configs.rollout import has_experts
from trainer.errors import ConfigError
from trainer.models.heads import backbone

DENSE = "has no experts"  # ends what is said of a model without
TOPK = (torch.topk, torch.Tensor.topk)
MOST = {torch.float32: 1e-5}  # of the largest hidden state: what kernels round otherwise from one call to the next; and of other types:
MOST_ROUNDED = 1e-3


@dataclass(frozen=True, slots=True)
class Router:
    """Where one layer chooses."""

    module: nn.Module
    layer: int
    call: int  # of topk within the module's forward, from 1: groups of experts may be chosen before
    experts: int  # E
    taken: int  # K


class Routers:
    """All of a model, whose forward passes they watch from now on: `taken` records, `replayed` has them take what was recorded."""

    def __init__(self, found: list[Router]):
        self.layers = [router.layer for router in found]
        self.experts, self.k = found[0].experts, found[0].taken
        self.recorded: list[torch.Tensor] | None = None  # by layer [N, K], while they are
        self.given_NMK: torch.Tensor | None = None  # what tokens take; `none` where a router chooses itself
        self.none = torch.iinfo(dtype_of(self.experts)).max
        self.differ_M = [torch.zeros(())] * len(found)  # tokens of the last pass whose router would have chosen others
        for place, router in enumerate(found):
            router.module.forward = self._watched(router.module.forward, place, router.call)

    def _watched(self, forward: Callable[..., Any], place: int, call: int) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self.recorded is None and self.given_NMK is None:
                return forward(*args, **kwargs)
            with _Choosing(call, lambda scores_NE, own: self._choose(place, scores_NE, own)):
                return forward(*args, **kwargs)

        return watched

    def _choose(self, place: int, scores_NE: torch.Tensor, own: Any) -> Any:
        """What topk returns. Called anew for the same tokens where activations are recomputed."""
        taken = own
        if self.given_NMK is not None:
            given_NK = self.given_NMK[:, place].long()
            taken_NK = torch.where(given_NK == self.none, own.indices, given_NK)
            self.differ_M[place] = (taken_NK.sort(-1).values != own.indices.sort(-1).values).any(-1).sum()
            taken = torch.return_types.topk((scores_NE.gather(-1, taken_NK), taken_NK))
        if self.recorded is not None:
            self.recorded[place] = taken.indices
        return taken

    @contextmanager
    def taken(self) -> Iterator[Callable[[], torch.Tensor]]:
        """Within it, a call after each pass gives the experts that its tokens took [N, M, K], in uint8 or int16 (`dtype_of`)."""
        self.recorded = [torch.empty(0)] * len(self.layers)
        recorded = self.recorded
        try:
            yield lambda: torch.stack(recorded, 1).to(dtype_of(self.experts))
        finally:
            self.recorded = None

    def replay(self, given_NMK: torch.Tensor | None) -> None:
        """For passes from now on, and for their activations that are computed anew. None: each router chooses itself."""
        self.given_NMK = given_NMK

    def counted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the last pass: (token, layer) that a record was given for, and those of them where the router would have chosen others."""
        assert self.given_NMK is not None, "of a pass that replayed"
        return (self.given_NMK[:, :, 0] != self.none).sum(), torch.stack(self.differ_M).sum()


class _Choosing(TorchFunctionMode):
    """Has `choose` answer one call of topk."""

    def __init__(self, call: int, choose: Callable[[torch.Tensor, Any], Any]):
        super().__init__()
        self.left, self.choose = call, choose

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in TOPK:
            self.left -= 1
            if self.left == 0:
                return self.choose(args[0] if args else kwargs["input"], found)
        return found


class _Looking(TorchFunctionMode):
    """Notes the last topk of each module over `tokens` rows: its number among all of that module's, and its sizes."""

    def __init__(self, tokens: int):
        super().__init__()
        self.tokens = tokens
        self.calls: list[list[Any]] = []  # modules at work, outermost first, and how many there were in each
        self.found: dict[str, tuple[nn.Module, int, int, int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in TOPK and self.calls:
            for each in self.calls:
                each[2] += 1
            scores = args[0] if args else kwargs["input"]
            name, module, count = self.calls[-1]
            if scores.dim() == 2 and tuple(found.indices.shape[:-1]) == (self.tokens,) and found.indices.size(1) < scores.size(1):
                self.found[name] = module, count, scores.size(1), found.indices.size(1)
        return found


def dtype_of(experts: int) -> torch.dtype:
    """Of a record of choices among so many; its largest number says that there is none of a token."""
    return torch.uint8 if experts < 256 else torch.int16


@torch.no_grad()
def look(lm: Any, compute: Callable[[], Any], tokens: int) -> list[Router]:
    """The routers that `compute`, a pass of `lm` over so many tokens, meets, by layer; those of a pass that ends early, too.

    Raises ValueError where there are none, or where a record has no place for them.
    """
    hooks: list[Any] = []
    with _Looking(tokens) as looking:
        for name, module in backbone(lm).named_modules():
            hooks.append(module.register_forward_pre_hook(lambda m, _, name=name: looking.calls.append([name, m, 0])))
            hooks.append(module.register_forward_hook(lambda *_: looking.calls.pop() and None))
        try:
            compute()
        finally:
            for hook in hooks:
                hook.remove()
    found = [Router(module, _layer(name), *sizes) for name, (module, *sizes) in looking.found.items()]
    if not found:
        raise ValueError("no router of it chooses experts by torch.topk")
    if len({(router.experts, router.taken) for router in found}) > 1 or len({router.layer for router in found}) < len(found):
        raise ValueError("its layers have several routers, or choose different numbers of experts")
    return sorted(found, key=lambda router: router.layer)


def _layer(name: str) -> int:
    """Of a module's name, such as layers.3.mlp.gate."""
    number = re.search(r"(?:^|\.)(\d+)\.", name)
    if number is None:
        raise ValueError(f"its router {name} belongs to no layer")
    return int(number[1])


@torch.no_grad()
def attach(lm: Any, compute: Callable[[], Any], tokens: int) -> Routers:
    """The routers of `lm`, once they have shown that `compute`, a pass of it over so many tokens, takes what it is given.

    Raises ValueError for a model that has none, or where it does not. Collective under ZeRO-3; four passes.
    """
    routers = Routers(look(lm, compute, tokens))
    hidden: list[torch.Tensor] = []
    hook = backbone(lm).register_forward_hook(lambda _, __, output: hidden.append(output.last_hidden_state.float()))
    try:
        with routers.taken() as taken:
            compute()
            own_NMK = taken()
        for given_NMK in (own_NMK, (own_NMK.long() + 1) % routers.experts):
            routers.replay(given_NMK)
            compute()
    finally:
        routers.replay(None)
        hook.remove()
    own, same, other = hidden
    size, most = own.abs().max().clamp(min=1e-30), MOST.get(next(lm.parameters()).dtype, MOST_ROUNDED)
    if not (same - own).abs().max() <= most * size:
        raise ValueError("given the experts that it chose, it computes something else than without")
    if not (other - own).abs().max() > most * size:
        raise ValueError("given other experts than it chose, it computes the same")
    return routers


def tried(lm: Any, compute: Callable[[], Any], tokens: int, setting: str) -> tuple[Routers | None, str]:
    """`attach`, where rollout.router_replay, the `setting`, asks for it; and why not where it did not. Raises ConfigError where it must."""
    if setting == "off":
        return None, "rollout.router_replay=off"
    config = lm.config.get_text_config()
    why = f"{config.model_type} {DENSE}"
    if has_experts(config.to_dict()):
        try:
            return attach(lm, compute, tokens), ""
        except ValueError as error:
            why = f"{config.model_type}: {error}"
    if setting == "required":
        raise ConfigError(f"rollout.router_replay=required: {why}; use off")
    return None, why
