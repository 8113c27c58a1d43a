"""Replaces a trunk's modules by faster ones, for CPUs: norms, rotary embeddings and feed-forwards in fewer passes.

transformers writes them as chains of operators, each of which reads and writes all of a batch's states. The functions
here need one pass each by the kernels in `native`, and without these about half as many, in place if no gradients are
taken. The rounding is the same with gradients and without. Linear layers are replaced as `onednn` says.

Modules are recognised by their code: many architectures have Llama's, word for word. transformers has no public way to
replace them for a CPU, and no attribute says which of them compute the same: not the class, which each architecture
has for itself, nor the names of kernels on the hub, which rotary embeddings and feed-forwards lack. A check on Llama's
own modules shows whether the replacements still compute the same; if not, and for all other code, transformers' own
stays in use, and `tests/engine/test_fewer_passes.py` fails.
"""

from __future__ import annotations

import functools
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama as known

from guerdon.engine import onednn
from guerdon.engine.native import passes

_ROTARY = "apply_rotary_pos_emb"
_TOLERANCE = 1e-5
"""Largest accepted difference from transformers' code in float32, relative to the largest output."""
_WIDTH = 78
"""Of the numbers that they are compared with: whole vectors of every processor, and a rest."""


class FewerPasses:
    """The replacements for a trunk's modules; none is in use before `use`."""

    def __init__(self, trunk: nn.Module) -> None:
        self._forwards: list[tuple[nn.Module, MethodType]] = []
        for module in trunk.modules():
            own = module.__dict__.get("forward", type(module).forward)
            if getattr(own, "__func__", None) in _OURS:  # another Forward has already replaced it
                own = type(module).forward
            made: Any = None
            if _same_code(own, known.LlamaRMSNorm.forward) and _norms_agree():
                made = norm
            elif _same_code(own, known.LlamaMLP.forward) and isinstance(module.act_fn, _GATES) and _gated_agree():
                made = gated
            elif _rotates_as_known(own) and _rotations_agree():
                made = _with_rotated(own)
            elif own is type(module).forward:  # tensor parallelism gives layers a forward of their own
                made = onednn.replacement(module)
            if made is not None:
                self._forwards.append((module, MethodType(made, module)))

    def use(self, on: bool) -> None:
        """Installs or removes the modules' replacements."""
        for module, forward in self._forwards:
            module.__dict__.pop("forward", None)
            if on:
                module.__dict__["forward"] = forward
            elif isinstance(module, nn.Linear) and module.weight.is_mkldnn:
                module.__dict__["forward"] = MethodType(onednn.by_dense, module)


def norm(self: Any, states: Tensor) -> Tensor:
    """Llama's RMSNorm, computed in float32 for states of any dtype."""
    epsilon = self.variance_epsilon

    def chain(states: Tensor, weight: Tensor) -> Tensor:
        square = torch.linalg.vector_norm(states, dim=-1, keepdim=True, dtype=torch.float32).square()
        factor = torch.rsqrt(square / states.shape[-1] + epsilon)
        return _product((states * factor).to(states.dtype), weight)

    return passes.computed(lambda states, weight: passes.norm(states, weight, epsilon), chain, states, self.weight)


def gated(self: Any, x: Tensor) -> Tensor:
    """Llama's feed-forward."""
    is_gelu = isinstance(self.act_fn, _GELU)
    kind = passes.GELU_BY_TANH if is_gelu else passes.SILU

    def chain(gate: Tensor, up: Tensor) -> Tensor:
        if is_gelu:
            return _product(F.gelu(gate, approximate="tanh"), up)
        return _product(F.silu(gate, inplace=not torch.is_grad_enabled()), up)

    both = self.gate_proj(x), self.up_proj(x)
    return self.down_proj(passes.computed(lambda gate, up: passes.gated(gate, up, kind), chain, *both))


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Llama's rotary embedding of queries and keys."""

    def chain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out = x * cos.unsqueeze(unsqueeze_dim)
        (first, second), (one, two) = x.chunk(2, -1), out.chunk(2, -1)
        sines = sin.unsqueeze(unsqueeze_dim).chunk(2, -1)
        if torch.is_grad_enabled():
            return torch.cat([torch.addcmul(one, second, sines[0], value=-1), torch.addcmul(two, first, sines[1])], -1)
        one.addcmul_(second, sines[0], value=-1)
        two.addcmul_(first, sines[1])
        return out

    def native(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
        return passes.rotated(x, cos, sin) if unsqueeze_dim == 1 else None

    return passes.computed(native, chain, q, cos, sin), passes.computed(native, chain, k, cos, sin)


def _product(mine: Tensor, other: Tensor) -> Tensor:
    """Returns the product, in place of the first factor if autograd does not need it."""
    return mine * other if torch.is_grad_enabled() else mine.mul_(other)


_GELU = type(ACT2FN["gelu_pytorch_tanh"])
_GATES = (nn.SiLU, type(ACT2FN["silu"]), _GELU)
_OURS: set[Any] = {norm, gated, onednn.by_dense, *onednn.REPLACEMENTS.values()}


@functools.cache
def _with_rotated(forward: FunctionType) -> FunctionType:
    """Returns the function with our rotary embedding among its globals: it takes it from there and not from `self`."""
    globals_ = {**forward.__globals__, _ROTARY: rotated}
    made = FunctionType(forward.__code__, globals_, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    _OURS.add(made)
    return made


def _rotates_as_known(forward: Any) -> bool:
    """Whether the function calls Llama's rotary embedding, by its usual name."""
    if not isinstance(forward, FunctionType) or _ROTARY not in forward.__code__.co_names:
        return False
    rotary = forward.__globals__.get(_ROTARY)
    if not isinstance(rotary, FunctionType) or not _same_code(rotary, known.apply_rotary_pos_emb):
        return False
    return _same_code(rotary.__globals__.get("rotate_half"), known.rotate_half)


def _same_code(one: Any, other: Any) -> bool:
    """Whether both are plain functions with the same code; docstrings and other strings may differ."""
    if not isinstance(one, FunctionType) or not isinstance(other, FunctionType):
        return False
    a, b = one.__code__, other.__code__

    def constants(code: Any) -> list[Any]:
        return [x for x in code.co_consts if not isinstance(x, str)]

    alike = a.co_code == b.co_code and a.co_names == b.co_names and constants(a) == constants(b)
    return alike and one.__defaults__ == other.__defaults__ and not (one.__closure__ or other.__closure__)


@functools.cache
def _norms_agree() -> bool:
    module = known.LlamaRMSNorm(_WIDTH, eps=0.1)
    module.weight.data = torch.linspace(-1, 2, _WIDTH)
    return _agree(known.LlamaRMSNorm.forward, norm, module, _numbers(3, _WIDTH))


@functools.cache
def _gated_agree() -> bool:
    agree = True
    for name in ("silu", "gelu_pytorch_tanh"):
        with torch.random.fork_rng(devices=[]):  # initialising it must not advance the run's random state
            config = LlamaConfig(hidden_size=32, intermediate_size=_WIDTH, mlp_bias=True, hidden_act=name)
            module = known.LlamaMLP(config)
        for parameter in module.parameters():
            parameter.data = _numbers(*parameter.shape)
        agree &= _agree(known.LlamaMLP.forward, gated, module, _numbers(1, 3, 32))
    return agree


@functools.cache
def _rotations_agree() -> bool:
    shapes = ((1, 4, 3, _WIDTH), (1, 2, 3, _WIDTH), (1, 3, _WIDTH), (1, 3, _WIDTH))
    return _agree(known.apply_rotary_pos_emb, rotated, *(_numbers(*shape) for shape in shapes))


def _agree(own: Any, made: Any, *inputs: Any) -> bool:
    with torch.no_grad():
        want, got = own(*inputs), made(*inputs)
    pairs = zip(want, got, strict=True) if isinstance(want, tuple) else [(want, got)]
    return all((a - b).abs().max().item() <= _TOLERANCE * a.abs().max().item() for a, b in pairs)


def _numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
