"""The precision flow: which operand of which GEMM is quantised, along which axis, with which scale, on which side.

A linear layer Y = X W^T is three GEMMs in training and one in the rollout. T tokens, K inputs, N outputs:

    GEMM                     operand             groups             bf16    bf16 train, fp8 rollout    unified (Jet-RL)
    rollout  Y  = X W^T      X  [T, K]           1x128 along K      bf16    fp8                        fp8
                             W  [N, K]           128x128            bf16    fp8                        fp8
    forward  Y  = X W^T      the same two        the same           bf16    bf16                       the same operator
    dgrad    dX = dY W       dY [T, N]           1x128 along N      bf16    bf16                       fp8
                             W  [N, K]           the codes again    bf16    bf16                       fp8
    wgrad    dW = dY^T X     dY^T [N, T]         1x128 along T      bf16    bf16                       fp8
                             X^T  [K, T]         1x128 along T      bf16    bf16                       fp8

A group always runs along the reduction, so that its scale can be taken out of the sum. dY is therefore quantised twice,
along N for dgrad and along T for wgrad; W's square blocks serve forward and dgrad alike. Groups along T make wgrad
depend on how tokens are packed: a micro-batch is packed sequence by sequence without padding, and the last group is
short, which is the same as padding it with zero rows.

What decides whether training sees the distribution that was sampled from:

- The weights that are quantised are bf16(master) on both sides, and each part of a fused layer (q, k, v; gate, up) has
  its own scales.
- `linear` below is one function: the rollout and the training forward of a unified flow call it with the same operands.
- Activation scales belong to one token (1x128 or one row). A scale per tensor depends on who else is in the batch.

Left in bf16 unless the flow says otherwise: what passes between operators, attention, embedding, lm_head; in fp32: the
inside of norms, softmax and sums, master weights, weight gradients (wgrad_output), log-probs. Gradients pass the
rounding straight through. Sources: Jet-RL (arXiv 2601.14243, sections 3 and 4), DeepSeek-V3 (arXiv 2412.19437, 3.3).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from jetrl_bench import backends, fp8, fp32, quantizer
from jetrl_bench.config import FlowConfig
from jetrl_bench.fp8 import Factor
from jetrl_bench.quantizer import QuantSpec, RowGroups


class Side(NamedTuple):
    """The numerics of one side, rollout or training."""

    fp8: bool
    """Linear layers are quantised."""
    forward: QuantSpec
    activation_groups: str
    weight_groups: str
    lm_head: str
    kv: QuantSpec | None
    """How keys and values are quantised, or None."""
    backend: str = "emulated"
    """Who multiplies (FlowConfig.backend). A real one leaves what nobody quantises to torch's own products."""
    dtype: torch.dtype = torch.bfloat16
    """Of weights and of what passes between operators; fp32: nothing is rounded (fp32.py)."""


class Weight(NamedTuple):
    """A linear layer's weight, made ready once per version. Parts of a fused layer lie below each other in N."""

    bf16: torch.Tensor
    """bf16(master) [N, K]."""
    forward: Factor
    """What the forward GEMM multiplies [N, K]: bf16, codes x power-of-two scale, or codes with fp32 scales."""
    dgrad: list[Factor]
    """What dgrad multiplies, transposed [K, N]: one factor, or one for each part where scales are fp32."""
    parts: tuple[int, ...]
    """N of each part."""
    bias: torch.Tensor | None
    quantized: bool
    masters: tuple[torch.Tensor, ...]
    """The fp32 parameters behind it (weights, then biases); empty in an engine, unless its flow is fp32: then all."""
    real: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()
    """x -> y of each part on a real back end (backends.py); empty where FP8 is emulated."""


def prepare_weight(
    weights: list[torch.Tensor], biases: list[torch.Tensor], side: Side, *, quantized: bool, masters: tuple = ()
) -> Weight:
    """Parts [N_i, K] (fp32 masters or their bf16 rounding) -> Weight. Quantised once per version, part by part."""
    if side.dtype == torch.float32:
        masters, sizes = (*weights, *biases), tuple(w.shape[0] for w in weights)
        return Weight(None, None, [], sizes, None, False, masters)
    parts = [w.detach().to(torch.bfloat16) for w in weights]
    bf16 = parts[0] if len(parts) == 1 else torch.cat(parts)
    bias = torch.cat([b.detach().to(torch.bfloat16) for b in biases]) if biases else None
    sizes = tuple(w.shape[0] for w in parts)
    if not quantized:
        return Weight(bf16, Factor(bf16), [Factor(bf16, transposed=True)], sizes, bias, False, masters)
    spec, scales, dgrad = side.forward, [], []
    if side.backend != "emulated":
        each = bias.split(sizes) if biases else [None] * len(parts)
        real = tuple(backends.ready(part, b, side.backend, spec) for part, b in zip(parts, each))
        return Weight(bf16, Factor(bf16), [], sizes, bias, True, masters, real)
    operand = torch.empty_like(bf16)
    for part, values in zip(parts, operand.split(sizes)):
        block = fp8.block_of(side.weight_groups, part.shape, weight=True)
        scale = quantizer.quantize_blocks(
            part, block, spec, dequantize=spec.pow2, want_scales=not spec.pow2, out=values
        )[1]
        if scale is not None:
            scales.append(_per_block(scale, block, part.shape))
            if side.weight_groups != "row":  # an output channel's scale varies along dgrad's reduction
                flipped = (min(block[1], part.shape[1]), min(block[0], part.shape[0]))
                dgrad.append(Factor(values, _per_block(scale.t(), flipped, part.shape[::-1]), transposed=True))
    forward = Factor(operand, None if spec.pow2 else torch.cat(scales))
    backward = [Factor(operand, transposed=True)] if spec.pow2 else dgrad
    return Weight(bf16, forward, backward, sizes, bias, True, masters)


def _per_block(scale: torch.Tensor, block: tuple[int, int], shape) -> torch.Tensor:
    """Scales of any layout -> one per row and block of 128 columns: [R, ceil C / 128]."""
    num = -(-shape[1] // fp8.BLOCK)
    rows = scale.repeat_interleave(block[0], 0)[: shape[0]]
    return rows if scale.shape[1] == num else rows.expand(shape[0], num)


def _quantized_rows(x: torch.Tensor, groups: str, spec: QuantSpec):
    """bf16 [T, C] grouped along C -> codes and scales [T, ceil C / 128]."""
    block = fp8.block_of(groups, x.shape)
    codes, scale = quantizer.quantize_blocks(x, block, spec, dequantize=False, want_scales=True)
    return codes, _per_block(scale, block, x.shape)


def _row_groups(activation_groups: str, spec: QuantSpec, parts: tuple[int, ...]) -> RowGroups:
    return RowGroups(spec, parts, fp8.BLOCK if activation_groups == "block" else max(parts))


def linear(x: torch.Tensor, weight: Weight, side: Side) -> torch.Tensor:
    """Y = X W^T (+ bias), bf16 [T, K] -> bf16 [T, N]: the forward operator of both sides."""
    if side.dtype == torch.float32:
        return fp32.linear(x, weight.masters[: len(weight.parts)], weight.masters[len(weight.parts) :])
    if weight.real:
        return torch.cat([part(x) for part in weight.real], 1)
    if not weight.quantized and side.backend != "emulated":
        return torch.nn.functional.linear(x, weight.bf16, weight.bias)
    if not weight.quantized:
        return fp8.gemm(x, weight.forward, bias=weight.bias)
    if side.forward.pow2:
        if side.activation_groups == "tensor":
            return fp8.gemm(quantizer.quantize_blocks(x, x.shape, side.forward)[0], weight.forward, bias=weight.bias)
        return fp8.gemm(
            x, weight.forward, bias=weight.bias, groups=_row_groups(side.activation_groups, side.forward, (x.shape[1],))
        )
    codes, scales = _quantized_rows(x, side.activation_groups, side.forward)
    return fp8.gemm(codes, weight.forward, x_scales=scales, bias=weight.bias)


def head(x: torch.Tensor, weight: Weight, side: Side) -> torch.Tensor:
    """Logits [T, V]: bf16, or fp32 where lm_head is fp32 (bf16 operands, exact products, fp32 sum, no rounding)."""
    return fp8.gemm(x, weight.forward, dtype=torch.float32) if side.lm_head == "fp32" else linear(x, weight, side)


class Linear(torch.autograd.Function):
    """linear() or head() with the backward of the table above: apply(x, weight, flow, is_head, *weight.masters)."""

    @staticmethod
    def forward(ctx, x, weight: Weight, flow: "PrecisionFlow", is_head: bool, *masters):
        side, config = flow.train_side, flow.config
        ctx.weight, ctx.flow, ctx.is_head = weight, flow, is_head
        if weight.quantized and config.wgrad_input == "from_saved_fp8" and not config.forward_only:
            block = fp8.block_of(side.activation_groups, x.shape)
            codes, scales = quantizer.quantize_blocks(x, block, side.forward, dequantize=False, want_scales=True)
            ctx.save_for_backward(fp8.encode(codes, config.format), scales)
            ctx.block = (min(block[0], x.shape[0]), min(block[1], x.shape[1]))
        else:
            ctx.save_for_backward(x)
        return head(x, weight, side) if is_head else linear(x, weight, side)

    @staticmethod
    def backward(ctx, dy):
        weight, flow, config = ctx.weight, ctx.flow, ctx.flow.config
        quantized = weight.quantized and not config.forward_only
        if len(ctx.saved_tensors) == 2:
            codes, scales = ctx.saved_tensors
            x = fp8.Quantized(codes, scales, ctx.block, config.format).dequantize()
        else:
            (x,) = ctx.saved_tensors
        if dy.dtype == torch.float32:  # fp32 head: its gradient reaches the bf16 stream rounded once
            dy = dy.to(torch.bfloat16)
        dx = dgrad(dy, weight, flow, quantized=quantized)
        if config.grad_transport == "fp8" and not ctx.is_head:
            dx = quantizer.quantize_blocks(dx, (1, fp8.BLOCK), flow.grad)[0]
        if quantized:
            dw = wgrad(dy, x, weight, flow)
        else:
            dw = fp8.gemm_tokens(dy, x) if config.backend == "emulated" else (dy.t() @ x).float()
        if config.wgrad_output == "bf16":
            dw = dw.to(torch.bfloat16).float()
        grads = list(dw.split(weight.parts)) if len(weight.parts) > 1 else [dw]
        if weight.bias is not None:
            grads += dy.float().sum(0).split(weight.parts)
        return dx, None, None, None, *grads


def dgrad(dy: torch.Tensor, weight: Weight, flow: "PrecisionFlow", *, quantized: bool) -> torch.Tensor:
    """dX = dY W; dY grouped along N inside each part, W as the forward's codes (forward_only: both bf16)."""
    if not quantized and flow.config.backend != "emulated":
        return dy @ weight.bf16
    if not quantized:
        factor = Factor(weight.bf16, transposed=True) if weight.quantized else weight.dgrad[0]
        return fp8.gemm(dy, factor)
    groups = flow.config.activation_groups
    if flow.rounds_rows_alone():
        return fp8.gemm(dy, weight.dgrad[0], groups=_row_groups(groups, flow.grad, weight.parts))
    aligned = groups == "block" and all(n % fp8.BLOCK == 0 for n in weight.parts)  # no group crosses a part
    parts = [dy] if aligned and flow.grad.pow2 else dy.split(weight.parts, 1)
    if flow.grad.pow2:
        parts = [flow.quantize_grad(d, fp8.block_of(groups, d.shape)) for d in parts]
        return fp8.gemm(parts[0] if len(parts) == 1 else torch.cat(parts, 1), weight.dgrad[0])
    total = None
    for d, factor in zip(parts, weight.dgrad):
        block = fp8.block_of(groups, d.shape)
        codes, scales = flow.quantize_grad(d, block, dequantize=False)
        part = fp8.gemm(codes, factor, x_scales=_per_block(scales, block, d.shape), dtype=torch.float32)
        total = part if total is None else total + part
    return total.to(torch.bfloat16)


def wgrad(dy: torch.Tensor, x: torch.Tensor, weight: Weight, flow: "PrecisionFlow") -> torch.Tensor:
    """dW = dY^T X in fp32 [N, K]; both operands grouped along the tokens, dY inside each part."""
    groups = flow.config.activation_groups
    if groups == "tensor" and len(weight.parts) > 1:
        parts = dy.split(weight.parts, 1)
        return torch.cat([wgrad(d, x, weight._replace(parts=(n,)), flow) for d, n in zip(parts, weight.parts)])
    if flow.rounds_rows_alone() and groups == "block":
        return fp8.gemm_tokens(dy, x, spec=flow.grad)
    dy_block, x_block = (fp8.transposed_block_of(groups, t.shape) for t in (dy, x))
    if flow.grad.pow2:
        return fp8.gemm_tokens(flow.quantize_grad(dy, dy_block), flow.quantize_input(x, x_block))
    (a, a_scale), (b, b_scale) = (
        flow.quantize_grad(dy, dy_block, dequantize=False), flow.quantize_input(x, x_block, dequantize=False)
    )  # fmt: skip
    a_scale = _per_block(a_scale.t(), dy_block[::-1], dy.shape[::-1])
    return fp8.gemm_tokens(a, b, a_scale, _per_block(b_scale.t(), x_block[::-1], x.shape[::-1]))


class ConversionReport(NamedTuple):
    """Which tensors are quantised in training, and why the others are not."""

    converted: list[str]
    left: dict[str, str]


class PrecisionFlow:
    """A FlowConfig made executable (see the module's table)."""

    def __init__(self, config: FlowConfig):
        backends.require(config)
        fp32_scales = not fp8.spec(config.format, config.scale, config.train_rule).pow2
        if config.train == "fp8" and not config.forward_only and config.weight_groups == "row" and fp32_scales:
            raise ValueError(
                "flow.weight_groups 'row' with fp32 scales cannot run dgrad in FP8: scales of output channels vary "
                "along its reduction; use 'block', power-of-two scales, or forward_only"
            )
        self.config = config
        self.rollout_side = self._side(config.rollout == "fp8", config.rollout_rule, kv=config.kv_cache == "fp8")
        self.train_side = self._side(
            config.train == "fp8", config.train_rule, kv=config.kv_cache == "fp8" and config.train == "fp8"
        )
        self.grad = fp8.spec(config.grad_format, config.scale, config.train_rule)
        self._noise_count = 0
        self._real = None if config.backend == "emulated" else backends.make_linear(config)

    def real_linear(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """linear() on a real back end, differentiable in the masters: all three GEMMs are the back end's."""
        weights, biases = weight.masters[: len(weight.parts)], weight.masters[len(weight.parts) :]
        each = biases or [None] * len(weights)
        return torch.cat([self._real(x, w, b) for w, b in zip(weights, each)], 1)

    def _side(self, quantized: bool, rule: str, *, kv: bool) -> Side:
        c = self.config
        forward = fp8.spec(c.format, c.scale, rule)
        cache = forward if kv else None
        dtype = torch.float32 if c.rollout == "fp32" else torch.bfloat16
        return Side(quantized, forward, c.activation_groups, c.weight_groups, c.lm_head, cache, c.backend, dtype)

    def rounds_rows_alone(self) -> bool:
        """A gradient's row is quantised without another row or a stream of noise, by power-of-two scales."""
        c = self.config
        return self.grad.pow2 and c.activation_groups != "tensor" and c.rounding == "nearest"

    def quantize_grad(self, x, block, *, dequantize=True, dtype=torch.bfloat16):
        """A gradient in the gradient format; codes and scales if not dequantised. Rounding may be stochastic."""
        noise = None
        if self.config.rounding == "stochastic":
            noise = fp8.uniform_noise(x.shape, self._noise_count)
            self._noise_count += 1
        out, scales = quantizer.quantize_blocks(
            x, block, self.grad, dequantize=dequantize, dtype=dtype, noise=noise, want_scales=not dequantize
        )
        return out if dequantize else (out, scales)

    def quantize_input(self, x, block, *, dequantize=True, dtype=torch.bfloat16):
        """The wgrad's other operand: to nearest even."""
        out, scales = quantizer.quantize_blocks(
            x, block, self.grad, dequantize=dequantize, dtype=dtype, want_scales=not dequantize
        )
        return out if dequantize else (out, scales)

    @property
    def noise_count(self) -> int:
        """Position in the stream of stochastic rounding; part of a resumable state."""
        return self._noise_count

    @noise_count.setter
    def noise_count(self, value: int) -> None:
        self._noise_count = value

    def is_exact(self) -> bool:
        """Rollout and training log-probs are bit-equal on unchanged weights, by construction."""
        c = self.config
        same = self.rollout_side == self.train_side
        per_tensor = c.activation_groups == "tensor" and (c.rollout == "fp8" or c.lm_head == "fp8")
        return same and not per_tensor and c.train_kernels == "same" and c.backend == "emulated"

    def export(self, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, fp32 master) -> (name, bf16): what a rollout engine receives and quantises itself.
        An fp32 flow sends the masters."""
        for name, tensor in named:
            yield name, tensor.detach().to(self.rollout_side.dtype)

    def engine_args(self) -> dict:
        """Quantisation and KV dtype of the rollout engine, in vLLM's words."""
        c = self.config
        args: dict = {
            "dtype": str(self.rollout_side.dtype).removeprefix("torch."),
            "kv_cache_dtype": "fp8" if c.kv_cache == "fp8" else "auto",
        }
        if c.rollout == "fp8":
            block = [fp8.BLOCK, fp8.BLOCK] if c.weight_groups == "block" else None
            args["quantization"] = "fp8"
            args["hf_overrides"] = {
                "quantization_config": {
                    "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block,
                    "fmt": c.format, "scale_fmt": "ue8m0" if self.rollout_side.forward.pow2 else "float",
                }
            }  # fmt: skip
        return args

    def describe(self) -> dict[str, str]:
        """One line for every operand: format, groups, scale. For records, tables and the precision-flow graph."""
        c = self.config

        def operand(quantized: bool, groups: str, spec: QuantSpec, format: str) -> str:
            return f"{format} {groups} {'pow2' if spec.pow2 else 'fp32'} scales" if quantized else plain

        along = {"block": "1x128 along {}", "row": "1 x row along {}", "tensor": "per tensor"}[c.activation_groups]
        square = {"block": "128x128", "row": "1 x row", "tensor": "per tensor"}[c.weight_groups]
        backward = c.train == "fp8" and not c.forward_only
        r, t = self.rollout_side, self.train_side
        plain = "fp32" if c.rollout == "fp32" else "bf16"
        return {
            "rollout X": operand(r.fp8, along.format("K"), r.forward, c.format),
            "rollout W": operand(r.fp8, square, r.forward, c.format),
            "forward X": operand(t.fp8, along.format("K"), t.forward, c.format),
            "forward W": operand(t.fp8, square, t.forward, c.format),
            "dgrad dY": operand(backward, along.format("N"), self.grad, c.grad_format),
            "dgrad W": operand(backward, square, t.forward, c.format),
            "wgrad dY": operand(backward, along.format("T"), self.grad, c.grad_format),
            "wgrad X": operand(backward, along.format("T"), self.grad, c.grad_format)
            + (", from the saved FP8 activation" if backward and c.wgrad_input == "from_saved_fp8" else ""),
            "wgrad output": c.wgrad_output,
            "gradient between operators": c.grad_transport if plain == "bf16" else plain,
            "lm_head": c.lm_head if plain == "bf16" else plain,
            "kv cache, rollout": f"{c.format} per token and head" if r.kv else plain,
            "kv, training attention": f"{c.format} per token and head" if t.kv else plain,
            "training kernels": c.train_kernels,
            "master weights": c.master,
            "backend": c.backend,
            "exact": "yes, by construction" if self.is_exact() else "no",
        }

    def convert_(self, model: torch.nn.Module) -> ConversionReport:
        """Emulation leaves the module as it is; the report says which weights its linear layers quantise."""
        converted, left = [], {}
        for name, _ in model.named_parameters():
            if name.endswith("_proj.weight"):
                if self.config.train == "fp8":
                    converted.append(name)
                else:
                    left[name] = f"flow.train is {self.config.train}"
            elif name == "lm_head.weight" or name.endswith("embed_tokens.weight"):
                table = "fp32" if self.config.train == "fp32" else "bf16"
                left[name] = f"lm_head is {self.describe()['lm_head']}; the embedding is looked up in {table}"
            else:
                left[name] = "norms and biases are not GEMM operands"
        return ConversionReport(converted, left)


def make_flow(config: FlowConfig) -> PrecisionFlow:
    """The flow of a configuration, or ValueError with what is missing for its back end."""
    return PrecisionFlow(config)
