"""Real FP8 back ends without a GPU: layouts on fake CUDA tensors, values by a reference product, te by signature."""

import inspect
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType, scaled_mm

from jetrl_bench import backends, fp8, hardware_check, precision
from jetrl_bench.config import FlowConfig, ModelConfig
from jetrl_bench.logprobs import Batch, sequence_logprobs
from jetrl_bench.model import init_model
from jetrl_bench.precision import make_flow

SIZES = [(30, 200, 300), (128, 256, 384), (1, 128, 640), (130, 48, 128)]  # T, N, K
TORCH = FlowConfig(rollout="fp8", train="fp8", backend="torch")
TE = FlowConfig(rollout="fp8", train="fp8", backend="te", wgrad_output="bf16")


def block_scaled_product(a, b, scale_a, recipe_a, scale_b, recipe_b, output_dtype):
    """What cuBLASLt computes from these operands, in float64, read off its documented scale layouts."""
    M, K = a.shape
    N = b.shape[1]
    k = torch.arange(K) // 128
    assert recipe_a == ScalingType.BlockWise1x128 and scale_a.stride(0) == 1
    scale_a_MK = scale_a[:, k].double()
    if recipe_b == ScalingType.BlockWise1x128:
        assert scale_b.shape == (N, -(-K // 128)) and scale_b.stride(0) == 1
        scale_b_KN = scale_b[:, k].double().t()
    else:
        assert recipe_b == ScalingType.BlockWise128x128
        assert scale_b.shape == (-(-(K // 128) // 4) * 4, -(-N // 128)) and scale_b.stride(0) == 1
        scale_b_KN = scale_b[k][:, torch.arange(N) // 128].double()
    return ((a.double() * scale_a_MK) @ (b.double() * scale_b_KN)).to(output_dtype)


def dequantised(x, block, scale, rule="default"):
    """codes x scale, exact in float64."""
    q = fp8.quantize(x, "e4m3", block, scale=scale, rule=rule)
    return q.values().double() * fp8.expand_scales(q.scales, q.block, x.shape).double()


def inputs(T, N, K, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(T, K, generator=g) * 3).bfloat16().requires_grad_()
    w = (torch.randn(N, K, generator=g) * 0.05).requires_grad_()
    return x, w, torch.randn(T, N, generator=g).bfloat16()


@pytest.mark.parametrize("scale", ["pow2", "fp32"])
@pytest.mark.parametrize("T, N, K", SIZES)
def test_three_products_are_those_of_the_dequantised_operands(monkeypatch, T, N, K, scale):
    monkeypatch.setattr(backends, "scaled_mm", block_scaled_product)
    flow = TORCH.model_copy(update={"scale": scale})
    x, w, dy = inputs(T, N, K)
    y = backends.make_linear(flow)(x, w)
    y.backward(dy)
    x_hat, w_hat = dequantised(x.detach(), (1, 128), scale), dequantised(w.detach().bfloat16(), (128, 128), scale)
    dy_hat = dequantised(dy, (1, 128), scale)
    # groups along tokens: the transposed tensors quantised 1x128
    dy_t, x_t = (
        dequantised(dy.t().contiguous(), (1, 128), scale),
        dequantised(x.detach().t().contiguous(), (1, 128), scale),
    )
    assert torch.equal(y, (x_hat @ w_hat.t()).bfloat16())
    assert torch.equal(x.grad, (dy_hat @ w_hat).bfloat16())
    assert w.grad.dtype == torch.float32
    torch.testing.assert_close(w.grad, (dy_t @ x_t.t()).float(), rtol=1e-6, atol=1e-6)


def test_forward_only_leaves_the_gradients_in_bf16(monkeypatch):
    monkeypatch.setattr(backends, "scaled_mm", block_scaled_product)
    x, w, dy = inputs(30, 64, 128)
    backends.make_linear(TORCH.model_copy(update={"forward_only": True}))(x, w).backward(dy)
    assert torch.equal(x.grad, dy @ w.detach().bfloat16())
    assert torch.equal(w.grad, (dy.t() @ x.detach()).float())


def test_rules_of_the_two_sides_are_their_own(monkeypatch):
    monkeypatch.setattr(backends, "scaled_mm", block_scaled_product)
    flow = TORCH.model_copy(update={"rollout_rule": "vllm_fp32", "train_rule": "te_fp32", "scale": "fp32"})
    x, w, _ = inputs(256, 256, 1024)
    x_hats = {rule: dequantised(x.detach(), (1, 128), "fp32", rule) for rule in ("vllm_fp32", "te_fp32")}
    assert not torch.equal(*x_hats.values())
    for side, rule in (("rollout", "vllm_fp32"), ("train", "te_fp32")):
        w_hat = dequantised(w.detach().bfloat16(), (128, 128), "fp32", rule)
        assert torch.equal(backends.make_linear(flow, side)(x, w), (x_hats[rule] @ w_hat.t()).bfloat16())


@pytest.mark.parametrize("T, N, K", SIZES)
def test_layouts_pass_the_checks_for_cuda_tensors(monkeypatch, T, N, K):
    """torch's own shape and stride checks of scaled_mm, on CUDA tensors without a GPU."""

    def quantize_blocks(x, block, spec, **_):
        shape = [-(-size // step) for size, step in zip(x.shape, block)]
        return torch.empty(x.shape, device=x.device, dtype=torch.bfloat16), torch.empty(shape, device=x.device)

    monkeypatch.setattr(backends, "quantize_blocks", quantize_blocks)
    ctx = types.SimpleNamespace()  # autograd itself wants a real device
    ctx.save_for_backward = lambda *tensors: setattr(ctx, "saved_tensors", tensors)
    rule = fp8.spec("e4m3")
    with FakeTensorMode():
        x = torch.empty(T, K, device="cuda", dtype=torch.bfloat16)
        y = backends.BlockLinear.forward(ctx, x, torch.empty(N, K, device="cuda"), None, rule, rule, torch.float32)
        assert y.shape == (T, N) and y.dtype == torch.bfloat16 and y.device.type == "cuda"
        dx, dw, *_ = backends.BlockLinear.backward(ctx, torch.empty(T, N, device="cuda", dtype=torch.bfloat16))
        assert dx.shape == (T, K) and dw.shape == (N, K) and dw.dtype == torch.float32


def test_row_major_scales_are_refused_by_torch():
    """Why m_major exists: the check that these layouts pass is one that others fail."""
    with FakeTensorMode():
        a = torch.empty(32, 384, device="cuda", dtype=torch.float8_e4m3fn)
        b = torch.empty(256, 384, device="cuda", dtype=torch.float8_e4m3fn)
        row_major = torch.empty(32, 3, device="cuda")
        block = backends.block_scales(torch.empty(2, 3, device="cuda"))
        args = (a, b.t(), backends.m_major(row_major), ScalingType.BlockWise1x128, block, ScalingType.BlockWise128x128)
        assert scaled_mm(*args).shape == (32, 256)
        for index, wrong in (
            (2, row_major),
            (4, torch.empty(3, 2, device="cuda")),
            (1, torch.empty(384, 256, device="cuda", dtype=a.dtype)),
        ):
            with pytest.raises(RuntimeError, match="must"):
                scaled_mm(*args[:index], wrong, *args[index + 1 :])


def test_this_machine_is_refused_with_all_that_is_missing():
    backends.require(FlowConfig(), "cpu")
    with pytest.raises(ValueError, match="'torch' cannot run here: device 'cpu' is not a CUDA device") as error:
        backends.require(TORCH, "cpu")
    assert "\n" not in str(error.value)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="sees no CUDA device"):
            backends.require(TORCH)
        with pytest.raises(ValueError, match="package transformer-engine is not installed"):
            backends.require(TE)


def pretend_gpu(monkeypatch, capability, cuda):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)


@pytest.mark.parametrize(
    "capability, cuda, message",
    [
        ((10, 0), "13.0", "capability 10.0"),
        ((8, 9), "12.9", "capability 8.9"),
        ((9, 0), "12.8", "CUDA 12.8"),
        ((9, 0), "12.10", None),
    ],
)
def test_other_gpus_are_refused(monkeypatch, capability, cuda, message):
    pretend_gpu(monkeypatch, capability, cuda)
    if message is None:
        backends.require(TORCH)
        return
    with pytest.raises(ValueError, match=message):
        backends.require(TORCH)


@pytest.mark.parametrize(
    "base, change, message",
    [
        (TORCH, {"format": "e2m1"}, "format must be 'e4m3', not 'e2m1'"),
        (TORCH, {"activation_groups": "row"}, "activation_groups must be 'block'"),
        (TORCH, {"rounding": "stochastic"}, "rounding must be 'nearest'"),
        (TORCH, {"wgrad_input": "from_saved_fp8"}, "wgrad_input must be 'from_bf16'"),
        (TORCH, {"grad_transport": "fp8"}, "grad_transport must be 'bf16'"),
        (TE, {"wgrad_output": "fp32"}, "wgrad_output must be 'bf16'"),
        (TE, {"scale": "fp32"}, "rollout_rule must be 'te_fp32', not 'default'"),
        (TE, {"train_rule": "vllm_ue8m0"}, "train_rule must be 'te_pow2' or 'default'"),
        (TE, {"forward_only": True}, "forward_only must be False"),
    ],
)
def test_settings_that_only_emulation_knows_are_refused(monkeypatch, base, change, message):
    pretend_gpu(monkeypatch, (9, 0), "12.9")
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    sys.modules["transformer_engine"].__spec__ = types.SimpleNamespace()
    backends.require(base)
    with pytest.raises(ValueError, match=message.replace("(", ".")):
        backends.require(base.model_copy(update=change))


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_a_flow_trains_and_rolls_out_through_its_back_end(monkeypatch, arch):
    """The same model and tokens through the emulated flow and through cuBLASLt's layouts with a reference product."""
    monkeypatch.setattr(backends, "scaled_mm", block_scaled_product)
    monkeypatch.setattr(backends, "require", lambda config: None)
    cfg = ModelConfig(
        arch=arch, hidden_size=192, num_layers=2, num_heads=3, num_kv_heads=1, head_dim=64, intermediate_size=320
    )
    model = init_model(cfg, 64, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    g = torch.Generator().manual_seed(1)
    batch = Batch(torch.randint(0, 64, (3, 20), generator=g), torch.tensor([4, 5, 6]), torch.tensor([20, 17, 20]))
    logprobs, gradients = {}, {}
    for backend in ("emulated", "torch"):
        flow = make_flow(TORCH.model_copy(update={"backend": backend}))
        assert flow.is_exact() is (backend == "emulated")
        model.zero_grad()
        out = sequence_logprobs(model, flow, batch, 1.0)[0]
        out.sum().backward()
        logprobs[backend] = out.detach()
        gradients[backend] = {name: p.grad.clone() for name, p in model.named_parameters()}
        with torch.no_grad():  # the rollout's operators
            assert torch.equal(sequence_logprobs(model, flow, batch, 1.0)[0], logprobs[backend])
    spread = (logprobs["torch"] - logprobs["emulated"]).abs()
    # last bits differ and flip roundings further on; a wrong scale or layout is far outside
    assert spread.mean() < 0.03
    for name, wanted in gradients["emulated"].items():
        error = (gradients["torch"][name] - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
        assert error < 0.08, name


# te, by the signatures of the release that was read

MANIFEST = json.loads((Path(__file__).parent / "data" / "te_signatures.json").read_text())


def signature(name):
    kinds = {
        "positional_or_keyword": inspect.Parameter.POSITIONAL_OR_KEYWORD,
        "keyword_only": inspect.Parameter.KEYWORD_ONLY,
    }
    return inspect.Signature(
        [
            inspect.Parameter(p["name"], kinds[p["kind"]], default=p.get("default", inspect.Parameter.empty))
            for p in MANIFEST["signatures"][name]
        ]
    )


@pytest.fixture
def te(monkeypatch):
    """A transformer_engine that refuses every call its real signatures would refuse, and records the others."""
    made = types.SimpleNamespace(linears=[], forwards=[], recipes=[], active=[])

    class Linear(torch.nn.Module):
        def __init__(self, *args, **kwargs):
            super().__init__()
            bound = signature("transformer_engine.pytorch.Linear").bind(*args, **kwargs).arguments
            shape = bound["out_features"], bound["in_features"]
            assert bound["bias"] is False, "te.Linear adds a bias unless told otherwise"
            self.weight = torch.nn.Parameter(torch.full(shape, torch.nan, dtype=bound["params_dtype"]))
            made.linears.append(self)

        def forward(self, *args, **kwargs):
            x = signature("transformer_engine.pytorch.Linear.forward").bind(*args, **kwargs).arguments["inp"]
            made.forwards.append((self, tuple(x.shape), made.active[-1]))
            return x @ self.weight.t()

    class autocast:
        def __init__(self, *args, **kwargs):
            self.bound = signature("transformer_engine.pytorch.autocast").bind(*args, **kwargs).arguments
            assert self.bound["enabled"] is True

        def __enter__(self):
            made.active.append(self.bound["recipe"])

        def __exit__(self, *_):
            made.active.pop()

    class Float8BlockScaling:
        def __init__(self, *args, **kwargs):
            signature("transformer_engine.common.recipe.Float8BlockScaling").bind(*args, **kwargs)
            made.recipes.append(self)

    for name in MANIFEST["class_attributes"]["transformer_engine.common.recipe.Float8BlockScaling"]:
        setattr(Float8BlockScaling, name, "as the environment said at import")

    def QParams(*args, **kwargs):
        return dict(signature("transformer_engine.common.recipe.QParams").bind(*args, **kwargs).arguments)

    modules = {
        "transformer_engine": {},
        "transformer_engine.common": {},
        "transformer_engine.common.recipe": {"Float8BlockScaling": Float8BlockScaling, "QParams": QParams},
        "transformer_engine.pytorch": {"Linear": Linear, "autocast": autocast},
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["transformer_engine"].pytorch = sys.modules["transformer_engine.pytorch"]
    return made


def test_te_scale_kind_is_set_on_the_recipe_object(te):
    fields = {p["name"] for p in MANIFEST["signatures"]["transformer_engine.common.recipe.Float8BlockScaling"]}
    operands = {"fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"}
    assert not operands & fields, "were they constructor arguments, te_recipe should pass them"
    for scale, power_of_two in (("pow2", True), ("fp32", False)):
        recipe = backends.te_recipe(scale)
        for name in operands:
            assert getattr(recipe, name) == {"power_2_scale": power_of_two, "amax_epsilon": 0.0}


def test_te_pads_tokens_and_multiplies_the_given_weight(te):
    linear = backends.make_linear(TE)
    x, w, dy = inputs(30, 64, 128)
    y = linear(x, w)
    assert y.shape == (30, 64) and torch.equal(y, x @ w.bfloat16().t())
    y.backward(dy)
    assert torch.equal(
        w.grad,
        (torch.nn.functional.pad(dy, (0, 0, 0, 98)).t() @ torch.nn.functional.pad(x.detach(), (0, 0, 0, 98))).float(),
    )
    assert [shape for _, shape, _ in te.forwards] == [(128, 128)]
    assert w.grad.dtype == torch.float32 and x.grad.shape == x.shape


def test_te_modules_belong_to_one_scale_kind(te):
    """A te module keeps the quantisers of its first forward, so a second scale kind must not meet it."""
    x, w, _ = inputs(128, 64, 128)
    pow2, fp32 = (backends.make_linear(TE.model_copy(update={"scale": scale})) for scale in ("pow2", "fp32"))
    for linear in (pow2, fp32, pow2):
        linear(x, w)
    modules = [module for module, _, _ in te.forwards]
    assert modules[0] is modules[2] and modules[0] is not modules[1]
    assert te.forwards[0][2] is te.forwards[2][2] and te.forwards[0][2] is not te.forwards[1][2]


def test_te_refuses_widths_that_its_kernels_refuse(te):
    x, w, _ = inputs(16, 40, 128)
    with pytest.raises(ValueError, match="a weight of 40 x 128 is refused"):
        backends.make_linear(TE)(x, w)


# The script for a machine with a GPU


def test_hardware_check_passes_a_right_product_and_fails_wrong_ones(monkeypatch):
    small = [hardware_check.Shape("check", "odd", 33, 80, 200)]
    monkeypatch.setattr(hardware_check, "SHAPES", small)
    monkeypatch.setattr(hardware_check, "TOKENS", (1, 17))
    monkeypatch.setattr(hardware_check, "Shape", lambda model, layer, T, N, K: small[0]._replace(T=48, N=64, K=256))
    monkeypatch.setattr(backends, "scaled_mm", block_scaled_product)
    results = list(hardware_check.checks("cpu"))
    assert len(results) == 2 * (3 + 1) and all(passed for _, passed, _ in results), results

    def one_scale_lost(a, b, scale_a, recipe_a, scale_b, recipe_b, output_dtype):
        return block_scaled_product(a, b, torch.ones_like(scale_a), recipe_a, scale_b, recipe_b, output_dtype)

    monkeypatch.setattr(backends, "scaled_mm", one_scale_lost)
    failed = {name.split(",")[0] for name, passed, _ in hardware_check.checks("cpu") if not passed}
    assert failed == {"error against emulation"}

    def noisy(*args, **kwargs):
        y = block_scaled_product(*args, **kwargs)
        return y * (1 + 2**-7 * torch.rand(len(y), 1)).to(y.dtype)

    monkeypatch.setattr(backends, "scaled_mm", noisy)
    failed = {name.split(",")[0] for name, passed, _ in hardware_check.checks("cpu") if not passed}
    assert {"run to run", "rows whatever the number of tokens"} <= failed

    def refused(*args, **kwargs):
        raise RuntimeError("scale_a must have strides")

    monkeypatch.setattr(backends, "scaled_mm", refused)
    monkeypatch.setattr(hardware_check, "_rows", lambda *_: ("rows", True, ""))
    assert [detail for _, passed, detail in hardware_check.checks("cpu") if not passed] == [
        "scale_a must have strides"
    ] * 2


def test_hardware_check_needs_its_hardware(capsys):
    if not torch.cuda.is_available():
        assert hardware_check.main([]) == 2
        assert "sees no CUDA device" in capsys.readouterr().err


def test_what_nobody_quantises_is_torchs_own_product_on_a_real_back_end(monkeypatch):
    monkeypatch.setattr(backends, "require", lambda *arguments: None)
    flow = precision.make_flow(FlowConfig(backend="torch"))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 192, generator=generator).bfloat16().requires_grad_()
    masters = tuple(torch.randn(shape, generator=generator).requires_grad_() for shape in [(64, 192), (32, 192), (64,)])
    weight = precision.prepare_weight(
        list(masters[:2]), [masters[2], torch.zeros(32)], flow.train_side, quantized=False, masters=masters
    )
    y = precision.Linear.apply(x, weight, flow, False, *masters[:2], masters[2], torch.zeros(32))
    w, b = torch.cat(masters[:2]).detach().bfloat16(), torch.cat([masters[2].detach(), torch.zeros(32)]).bfloat16()
    assert torch.equal(y, torch.nn.functional.linear(x, w, b))
    dy = torch.randn(24, 96, generator=generator).bfloat16()
    y.backward(dy)
    assert torch.equal(x.grad, dy @ w)
    assert torch.equal(torch.cat([masters[0].grad, masters[1].grad]), (dy.t() @ x.detach()).float())
    assert torch.equal(masters[2].grad, dy[:, :64].float().sum(0))
