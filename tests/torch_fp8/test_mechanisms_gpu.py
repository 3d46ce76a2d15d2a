"""What no kernel's own test runs on a card, whole: grouped GEMMs, experts, exchanges and steps.

Each test runs on the CPU, too, so that it is right before a card runs it.
"""

import copy

import pytest
import torch
import torch.distributed as dist

from tests.internals import CastOptions, links, make_recipe, sqnr_db
from tests.models import llama
from tests.steps import adamw
from torch_fp8 import FP8Config, convert_to_float8
from torch_fp8.ops.quantize import QuantizedTensor, quantize_layouts
from torch_fp8.ops.scaled_grouped_mm import reason_not_grouped, scaled_grouped_matmul

FORMS = [(64, 48), (72, 200), (256, 512)]
OPTIONS = {
    "O2": {},
    "O3": {"opt_level": "O3"},
    "release": {"opt_level": "O3", "gradient_release": True},
    "cached": {"cache_weights": True},
}
TOKENS = (32, 37, 32)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and reason_not_grouped(torch.device("cuda"), False):
        pytest.skip(reason_not_grouped(torch.device("cuda"), False))
    return torch.device(request.param)


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def cast(x):
    options = CastOptions.of(make_recipe("rowwise").weight, rowwise=True, columnwise=False)
    return quantize_layouts(x, options)[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("k", "n"), FORMS, ids=str)
def test_grouped_gemms_agree_with_the_reference(device, k, n, dtype):
    """>= 50 dB: 55 are left of a result that is rounded to BF16."""
    ends = torch.tensor([16, 176, 192, 304], dtype=torch.int32, device=device)
    rows, count = 320, len(ends)  # 16 behind the last group
    x, grad = (torch.randn(rows, size, device=device) for size in (k, n))
    weight = cast(torch.randn(count * n, k, device=device))
    stacked = weight._replace(
        qdata=weight.qdata.view(count, n, k), scale=weight.scale.view(count, n, 1)
    )
    pairs = {"rows": (cast(x), stacked)}
    columns = [t.t().contiguous() for t in (grad, x)]  # (N, M), (K, M)
    scales = [torch.rand(count, len(t), device=device) + 0.5 for t in columns]
    payloads = [t.to(torch.float8_e4m3fn) for t in columns]
    pairs["sums"] = tuple(map(QuantizedTensor, payloads, scales, ["rowwise"] * 2))
    for form, (a, b) in pairs.items():
        result = scaled_grouped_matmul(a, b, ends, form, dtype)
        expected = scaled_grouped_matmul(a, b, ends, form, torch.float32, emulate=True)
        assert sqnr_db(expected, result.float()) >= 50, form
        if form == "rows":
            assert not result[ends[-1] :].any()


@pytest.mark.parametrize("layout", ["plain", "gpt-oss"])
def test_experts_are_as_near_to_bf16s_as_on_the_cpu(device, layout):
    pytest.importorskip("transformers")
    from tests.moe_experts import batch, experts

    stock = experts(layout)
    x, index, scores = batch(96)
    grad = torch.randn_like(x)
    results = []
    for place, fp8 in ((torch.device("cpu"), False), (torch.device("cpu"), True), (device, True)):
        module = copy.deepcopy(stock).to(place)
        if fp8:
            convert_to_float8(module, FP8Config(recipe="rowwise"))
        leaf = x.to(place, copy=True).requires_grad_()
        with torch.autocast(place.type, torch.bfloat16):
            y = module(leaf, index.to(place), scores.to(place))
        y.float().backward(grad.to(place))
        grads = {name: p.grad for name, p in module.named_parameters()}
        results.append({"y": y.detach(), "x": leaf.grad, **grads})
    exact, reference, ours = results
    for name, value in exact.items():
        least = sqnr_db(value.float(), reference[name].float()) - 1  # of one dB, by other sums
        assert sqnr_db(value.float(), ours[name].cpu().float()) >= least, name


@pytest.mark.gpu
def test_exchanges_are_timed(group):
    times = links._measured(dict.fromkeys(links.KINDS, group), torch.device("cuda"))
    assert set(times) == set(links.KINDS)
    assert all(t.eight_bits > 0 and t.plain > 0 for t in times.values())


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_steps_of_a_llama_lose_what_they_lose_on_the_cpu(device, options):
    """The last with one token and without gradients. 5e-3: two roundings of the loss to BF16."""
    pytest.importorskip("transformers")
    losses = []
    for place in ("cpu", device):
        torch.manual_seed(0)
        model = llama(hidden_size=128, head_dim=64).to(place)
        config = FP8Config(recipe="tensorwise", **options)
        optimizer, _ = adamw(model, config, lr=1e-3)
        generator = torch.Generator().manual_seed(1)
        for count in TOKENS:
            tokens = torch.randint(64, (2, count), generator=generator).to(place)
            with torch.autocast(torch.device(place).type, torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        with torch.no_grad(), torch.autocast(torch.device(place).type, torch.bfloat16):
            logits = model.eval()(input_ids=tokens[:, :1]).logits
        losses.append(logits.float().square().mean().item())
    *expected, decoded = losses[: len(losses) // 2]
    assert losses[-4:-1] == pytest.approx(expected, rel=5e-3)
    assert losses[-1] == pytest.approx(decoded, rel=5e-2)
