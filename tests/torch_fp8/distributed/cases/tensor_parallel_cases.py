"""Cases of tensor and sequence parallelism on two ranks; run by run_cases.py."""

import copy

import torch
import torch.distributed as dist
from parallel_ranks import (
    RANK,
    RANKS,
    WIDTH,
    Attention,
    Block,
    Pair,
    block_plan,
    db,
    full,
    mesh_of,
    message,
    pair_plan,
    parallel,
    part,
    rand,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from tests.comm_counter import count_communication
from tests.internals import (
    RECIPES,
    Shards,
    gather_activation,
    group_amax,
    make_recipe,
    scale_from_amax,
)
from tests.steps import renew_scales
from tests.torch_fp8.nn.test_conv1d import Conv1D
from torch_fp8 import (
    Float8Linear,
    FP8Config,
    convert_to_float8,
    revert,
    scaling_state_dict,
    set_forward_precision,
)
from torch_fp8.distributed import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
    connect_fsdp,
)
from torch_fp8.ops.quantize import dequantize, quantize


def case_block_against_one_rank():
    """A Llama block of each recipe, against bfloat16's; beside it one rank with that recipe."""
    results = {}
    for recipe in RECIPES:
        torch.manual_seed(0)
        exact = Block().bfloat16()
        model, one = parallel(copy.deepcopy(exact), block_plan(), FP8Config(recipe=recipe))
        x, g = rand(2, 32, WIDTH), rand(2, 32, WIDTH, seed=1)
        inputs = {}
        outputs = {}
        for name, module in (("exact", exact), ("one", one), ("parallel", model)):
            mine, gradient = (part(x), part(g)) if name == "parallel" else (x, g)
            inputs[name] = mine.clone().requires_grad_()
            outputs[name] = module(inputs[name])
            outputs[name].backward(gradient)
        both = [
            [db(part(outputs["exact"]), outputs["parallel"]), db(outputs["exact"], outputs["one"])],
            [
                db(part(inputs["exact"].grad), inputs["parallel"].grad),
                db(inputs["exact"].grad, inputs["one"].grad),
            ],
        ]
        for (name, p), q, reference in zip(
            model.named_parameters(), one.parameters(), exact.parameters(), strict=True
        ):
            if "norm" not in name:
                both.append([db(reference.grad, p.grad), db(reference.grad, q.grad)])
        results[recipe] = both
    return results


def case_gathered_bytes_are_those_of_a_whole_cast():
    group, wrong = mesh_of().get_group(), []
    for recipe in RECIPES:
        for spec in (make_recipe(recipe).input, make_recipe(recipe).grad_output):
            for shape, dim in (
                ((2, 6, 160), 1),
                ((2, 5, 160), 1),
                ((7, 160), 0),
                ((1, 160), 0),
                ((0, 160), 0),
                ((3, 4, 96), 0),
                *([((3, 5), 1), ((2, 3, 160), 2)] if spec.granularity == "tensorwise" else []),
            ):
                x = rand(*shape, dtype=torch.float32) * torch.arange(1, shape[-1] + 1).float()
                shards = Shards(torch.Size(shape), dim, group)
                mine = part(x, dim)
                scale = None
                if spec.granularity == "tensorwise":
                    scale = scale_from_amax(group_amax(mine, group), spec.format, spec.power_of_two)
                gathered = gather_activation(mine, shards, spec, scale, torch.bfloat16)
                row, expected = gathered.rowwise(), quantize(x.reshape(-1, shape[-1]), spec)
                same = torch.equal(
                    row.qdata.view(torch.uint8), expected.qdata.view(torch.uint8)
                ) and torch.equal(row.scale, expected.scale)
                dequantized = gathered + 0
                same &= type(dequantized) is torch.Tensor and dequantized.shape == x.shape
                if not same:
                    wrong.append([recipe, str(spec), shape, dim])
    return wrong


def case_transposed_payload():
    results, group = {}, mesh_of().get_group()
    for recipe in RECIPES:
        spec, dbs = make_recipe(recipe).input, []
        for spread in (0, 8):
            x = rand(256, 128) * torch.linspace(-spread, spread, 256).exp2().bfloat16()[:, None]
            scale = None
            if spec.granularity == "tensorwise":
                amax = group_amax(part(x, 0), group)
                scale = scale_from_amax(amax, spec.format, spec.power_of_two)
            shards = Shards(x.shape, 0, group)
            gathered = gather_activation(part(x, 0), shards, spec, scale, x.dtype)
            dbs.append(db(dequantize(gathered.rowwise()).t(), dequantize(gathered.columnwise())))
        results[recipe] = dbs
    return results


def case_one_scale():
    x = rand(2, 16, WIDTH) * (100.0 if RANK else 1.0)
    seen = []
    model, _ = parallel(Pair().bfloat16(), pair_plan())

    def watch(module, args):
        seen.append(args[0]._local_tensor.rowwise().scale.item())

    model.up.register_forward_pre_hook(watch)
    model(x)
    dist.all_reduce(largest := x.abs().max(), op=dist.ReduceOp.MAX)
    return [seen[0], largest.item() / 448]


def case_order_of_conversion():
    outputs = []
    single = {
        **block_plan(),
        "attention": PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Shard(1), use_local_output=True
        ),
        **{f"attention.{n}": Float8ColwiseParallel(input_layouts=Shard(1)) for n in "qkv"},
    }
    for first, plan in (
        ("parallelize", block_plan()),
        ("convert", block_plan()),
        ("convert", single),
        ("convert", block_plan(again=True)),
    ):
        torch.manual_seed(0)
        model, _ = parallel(Block(bias=True).bfloat16(), plan, first=first)
        x = part(rand(2, 32, WIDTH)).requires_grad_()
        y = model(x)
        y.backward(part(rand(2, 32, WIDTH, seed=1)))
        # Each layer's own gradient of the input is rounded before they are added.
        grads = [p.grad._local_tensor for n, p in model.named_parameters() if n != "norm1.weight"]
        outputs.append([y, *grads])
    return [
        all(torch.equal(a, b) for a, b in zip(outputs[0], other, strict=True))
        for other in outputs[1:]
    ]


def case_collectives_of_attention():
    results = {}
    for again in (False, True):
        torch.manual_seed(0)
        plan = {
            name.removeprefix("attention").removeprefix("."): style
            for name, style in block_plan(again).items()
            if name.startswith("attention")
        }
        model, _ = parallel(Attention(False).bfloat16(), plan)
        with count_communication() as forward:
            y = model(part(rand(2, 32, WIDTH)).requires_grad_())
        with count_communication() as backward:
            y.backward(part(rand(2, 32, WIDTH, seed=1)))
        results[str(again)] = [
            {f"{row.kind} {row.dtype}": row.calls for row in count.rows}
            for count in (forward, backward)
        ]
    return results


def case_float32_under_autocast():
    """The residual stream is float32: gathers are FP8, sums have autocast's 16 bits."""
    results = {}
    for sequence in (True, False):
        model, _ = parallel(Pair(), pair_plan(sequence))
        x = rand(2, 16, WIDTH, dtype=torch.float32)
        x = (part(x) if sequence else x).requires_grad_()
        with count_communication() as count, torch.autocast("cpu", torch.bfloat16):
            model(x).float().sum().backward()
        large = {
            f"{row.kind} {row.dtype}"
            for row in count.rows
            if row.payload_bytes / row.calls > 4 * WIDTH
        }
        results[str(sequence)] = [sorted(large), str(x.grad.dtype)]
    return results


def case_memory_for_backward():
    """Bytes saved of the input of a column-wise layer: whole in FP8, or the rank's own part."""
    results = {}
    x = rand(2, 64, WIDTH)
    for again in (False, True):
        model, _ = parallel(
            nn.Sequential(nn.Linear(WIDTH, 128, bias=False)).bfloat16(),
            {"0": Float8ColwiseParallel(input_layouts=Shard(1), gather_in_backward=again)},
        )
        weight = model[0].weight._local_tensor.untyped_storage().data_ptr()
        saved = {}

        def pack(tensor, saved=saved, weight=weight):
            storage = tensor.untyped_storage()
            if storage.data_ptr() != weight:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = model(part(x).requires_grad_())
        results[str(again)] = sum(saved.values()) / x.numel()
        y.sum().backward()
    return results


def case_uneven_tokens():
    torch.manual_seed(0)
    plan = {
        "up": Float8ColwiseParallel(input_layouts=Shard(1)),
        "down": Float8RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    results = []
    for tokens in (5, 1):
        model, one = parallel(Pair().bfloat16(), plan)
        x, g = rand(2, tokens, WIDTH), rand(2, tokens, WIDTH, seed=1)
        mine = part(x).clone().requires_grad_()
        shape = {"shape": x.shape, "stride": x.stride()}
        y = model(DTensor.from_local(mine, mesh_of(), [Shard(1)], run_check=False, **shape))
        y.backward(DTensor.from_local(part(g), mesh_of(), [Shard(1)], run_check=False, **shape))
        theirs = x.clone().requires_grad_()
        expected = one(theirs)
        expected.backward(g)
        results.append(
            [
                list(y.shape),
                list(y._local_tensor.shape),
                db(expected, y),
                db(one.up.weight.grad, model.up.weight.grad),
                db(one.down.weight.grad, model.down.weight.grad),
            ]
        )
    return results, message(model, part(rand(2, 5, WIDTH)))


def case_uneven_features():
    """15 output and 33 input features on two ranks."""
    torch.manual_seed(0)
    model, one = parallel(Pair(WIDTH, 33).bfloat16(), pair_plan(), FP8Config(recipe="tensorwise"))
    x, g = rand(2, 16, WIDTH), rand(2, 16, WIDTH, seed=1)
    y = model(part(x))
    y.backward(part(g))
    expected = one(x)
    expected.backward(g)
    return [
        list(model.up.weight._local_tensor.shape),
        db(part(expected), y),
        *(db(q.grad, p.grad) for p, q in zip(model.parameters(), one.parameters(), strict=True)),
    ]


def case_frozen():
    model, _ = parallel(Pair(bias=False).bfloat16(), pair_plan(again=True))
    model.requires_grad_(False)
    x = part(rand(2, 16, WIDTH)).requires_grad_()
    kept = []

    def pack(tensor):
        if tensor.dtype in (torch.uint8, torch.float8_e4m3fn):
            kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(x)
    with count_communication() as count:
        y.sum().backward()
    gathers = count.of("all-gather").calls
    return [len(kept), gathers, x.grad is not None, model.up.weight.grad is None]


def case_not_a_number():
    results = {}
    for recipe in RECIPES:
        for where in ("input", "gradient"):
            model, _ = parallel(Pair(bias=False).bfloat16(), pair_plan(), FP8Config(recipe=recipe))
            x, g = part(rand(2, 16, WIDTH)).clone(), part(rand(2, 16, WIDTH)).clone()
            for bad in (float("nan"), float("inf")):
                if RANK:
                    (x if where == "input" else g)[0, 0, 0] = bad
                y = model(x)
                y.backward(g)
                seen = [y, model.up.weight.grad._local_tensor, model.down.weight.grad._local_tensor]
                nan = [bool((~t.isfinite()).any()) for t in seen]
                results[f"{recipe} {where} {bad}"] = nan if where == "input" else nan[1:]
                model.zero_grad()
    group = mesh_of().get_group()
    for bad in (float("nan"), float("inf")):
        amax = group_amax(torch.tensor([1.0, bad if RANK else 2.0]), group)
        results[f"amax {bad}"] = [not amax.isfinite().item()]
    return {name: seen for name, seen in results.items() if not all(seen[-2:])}


def case_refusals():
    mesh, results = mesh_of(), {}

    def built(config, plan, first):
        return message(
            lambda: parallel(nn.Sequential(Pair().bfloat16()), plan, config, mesh, first)
        )

    switchback = FP8Config(wgrad="bf16")
    nested = {f"0.{name}": style for name, style in pair_plan().items()}
    for first in ("convert", "parallelize"):
        results[f"wgrad, {first} first"] = built(switchback, nested, first)
    results["wgrad, plain"] = built(
        switchback, {f"0.{name}": style for name, style in pair_plan(False).items()}, "convert"
    )
    features = {"0.up": Float8ColwiseParallel(input_layouts=Shard(-1))}
    results["features"] = built(FP8Config(recipe="rowwise"), features, "convert")
    results["features, tensorwise"] = built(FP8Config(), features, "convert")
    results["off"] = built(FP8Config(wgrad="bf16", communication="off"), nested, "convert")
    model, _ = parallel(
        Attention(False).bfloat16(),
        {
            "": PrepareFloat8ModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            **{name: Float8ColwiseParallel() for name in "qkv"},
        },
        switchback,
    )
    results["shared input"] = message(model, part(rand(2, 16, WIDTH)))
    convert_to_float8(model.q, FP8Config(recipe="rowwise"))
    results["two recipes"] = message(model, part(rand(2, 16, WIDTH)))
    sharded = parallelize_module(nn.Sequential(nn.Linear(64, 64)), mesh, {"0": ColwiseParallel()})
    convert_to_float8(sharded)
    layer = sharded[0]
    results["no style"] = message(lambda: Float8Linear.forward(layer, rand(2, 64)))
    plain = nn.Sequential(nn.Linear(64, 64))
    convert_to_float8(plain)
    given = DTensor.from_local(rand(2, 64), mesh, [Replicate()])
    results["no DTensor"] = message(lambda: plain(given))
    transposed = nn.Sequential(Conv1D(64, 64))
    convert_to_float8(transposed)
    (layer,) = transposed
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(1)]))
    results["transposed"] = message(lambda: transposed(given))
    return results


def case_torchs_own_styles():
    """Converted layers under them: FP8 GEMMs, 16-bit collectives, the SQNR of one rank."""
    results = []
    for sequence in (True, False):
        torch.manual_seed(0)
        exact = Pair().bfloat16()
        layout = {"input_layouts": Shard(1)} if sequence else {}
        out = {"output_layouts": Shard(1)} if sequence else {}
        plan = {"up": ColwiseParallel(**layout), "down": RowwiseParallel(**out)}
        model, one = parallel(copy.deepcopy(exact), plan, first="convert")
        x, g = rand(2, 32, WIDTH), rand(2, 32, WIDTH, seed=1)
        with count_communication() as count:
            y = model(part(x) if sequence else x)
            y.backward(part(g) if sequence else g)
        expected = [module(x) for module in (exact, one)]
        for z in expected:
            z.backward(g)
        whole, alone = (part(z) if sequence else z for z in expected)
        gradients = [
            [db(e.grad, p.grad), db(e.grad, q.grad)]
            for e, p, q in zip(
                exact.parameters(), model.parameters(), one.parameters(), strict=True
            )
        ]
        dtypes = sorted({str(row.dtype) for row in count.rows})
        results.append([dtypes, [[db(whole, y), db(whole, alone)], *gradients]])
    return results


def case_layers_that_are_not_converted():
    """Skipped ones run as under torch's style; so does all after `revert`, and in high precision
    evaluation; what PrepareFloat8ModuleInput gathered reads as a plain tensor."""
    torch.manual_seed(0)
    exact = Attention(True).bfloat16()
    plan = {
        "": PrepareFloat8ModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        **{name: Float8ColwiseParallel() for name in "qkv"},
        "o": Float8RowwiseParallel(output_layouts=Shard(1)),
    }
    x = rand(2, 32, WIDTH)
    expected = part(exact(x))
    config = FP8Config(skip=("v",), eval_fp8=False)
    model, _ = parallel(copy.deepcopy(exact), plan, config)
    mine = part(x).clone().requires_grad_()
    y = model(mine)
    y.sum().backward()
    model.eval()
    with torch.no_grad():
        evaluated = model(part(x))
    model.train()
    set_forward_precision(model, "bf16")
    in_bf16 = model(part(x))
    revert(model)
    reverted = model(part(x))
    theirs = x.clone().requires_grad_()
    exact(theirs).sum().backward()
    return {
        "skipped": db(expected, y),
        "grad": db(part(theirs.grad), mine.grad),
        "evaluated": db(expected, evaluated),
        "forward in BF16": db(expected, in_bf16),
        "reverted": db(expected, reverted),
    }


def case_checkpointing_of_activations():
    results = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        model, _ = parallel(Block().bfloat16(), block_plan(), FP8Config(recipe="delayed"))
        for step in range(2):
            x = part(rand(2, 32, WIDTH, seed=step)).requires_grad_()
            y = checkpoint(model, x, use_reentrant=False) if is_checkpointed else model(x)
            y.backward(part(rand(2, 32, WIDTH, seed=9)))
            renew_scales()
        state = scaling_state_dict(model)
        results.append([x.grad, *(p.grad._local_tensor for p in model.parameters())])
        results[-1] += [state[key] for key in sorted(state)]
    return all(torch.equal(want, got) for want, got in zip(*results, strict=True))


def case_delayed_histories():
    model, one = parallel(Pair().bfloat16(), pair_plan(), FP8Config(recipe="delayed"))
    for step in range(3):
        x = rand(2, 16, WIDTH, seed=step) * 2.0**step
        g = rand(2, 16, WIDTH, seed=step + 9)
        model(part(x)).backward(part(g))
        one(x).backward(g)
        renew_scales()
    ours, theirs = scaling_state_dict(model), scaling_state_dict(one)
    away = {}
    for name, value in theirs.items():
        everywhere = [torch.empty_like(value) for _ in range(RANKS)]
        dist.all_gather(everywhere, ours[name])
        assert all(torch.equal(everywhere[0], other) for other in everywhere), name
        away[name] = ((ours[name] - value).abs() / value.clamp(min=1e-30)).max().item()
    return away


def case_issued_before_it_is_needed():
    from tests.internals import WeightQuantizer, all_gather, linear_function

    events = []
    watched = [
        (all_gather, "all_gather", "issue"),
        (WeightQuantizer, "for_fprop", "cast"),
        (WeightQuantizer, "for_dgrad", "cast"),
        (linear_function, "scaled_matmul", "gemm"),
    ]
    originals = [(module, name, getattr(module, name)) for module, name, _ in watched]
    result = all_gather.Gather.result

    def wrap(function, event):
        def wrapped(*args, **kwargs):
            events.append(event)
            return function(*args, **kwargs)

        return wrapped

    def waits(self):
        if self._result is None:
            events.append("wait")
        return result(self)

    model, _ = parallel(Pair(bias=False).bfloat16(), pair_plan(again=True))
    x, g = part(rand(2, 16, WIDTH)).requires_grad_(), part(rand(2, 16, WIDTH))
    try:
        for module, name, event in watched:
            setattr(module, name, wrap(getattr(module, name), event))
        all_gather.Gather.result = waits
        y = model(x)
        forward, events[:] = list(events), []
        y.backward(g)
    finally:
        for module, name, function in originals:
            setattr(module, name, function)
        all_gather.Gather.result = result
    return [forward, events]


def case_compiled():
    """Refused by name where something is gathered in FP8; else what eager mode computes."""
    results = {}
    for communication in ("fp8", "off"):
        torch.manual_seed(0)
        config = FP8Config(communication=communication)
        model, _ = parallel(Pair().bfloat16(), pair_plan(), config)
        x = part(rand(2, 16, WIDTH))
        expected = model(x)
        output = torch.compile(model, backend="aot_eager")(x)
        try:
            output.sum().backward()
            results[communication] = torch.equal(output, expected)
        except NotImplementedError as error:
            results[communication] = str(error)
    return results


class GatedMLP(nn.Module):
    """With a channel of gate and up that is aligned, and 200 times larger."""

    def __init__(self, hidden=256):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = (nn.Linear(WIDTH, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, WIDTH, bias=False)
        with torch.no_grad():
            self.up.weight[3] = self.gate.weight[3]
            self.gate.weight[3] *= 200
            self.up.weight[3] *= 200

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def median_db(reference, x):
    """SQNR in dB of the median row; one row of outliers would hide the others."""
    reference, x = full(reference).detach().float(), full(x).detach().float()
    noise = (x - reference).square().sum(-1)
    ratio = reference.square().sum(-1) / noise.clamp(min=1e-30)
    return min(float(10 * ratio.log10().median()), 200.0)


def case_smooth_swiglu():
    """Under tensor parallelism and FSDP2, output and the down projection's gradient, by recipe."""
    results = {}
    x, g = rand(2, 64, WIDTH), rand(2, 64, WIDTH, seed=1)
    exact = GatedMLP().bfloat16()
    y = exact(x)
    y.backward(g)
    want = y, exact.down.weight.grad.t()
    plan = {
        "gate": Float8ColwiseParallel(),
        "up": Float8ColwiseParallel(),
        "down": Float8RowwiseParallel(),
    }
    for recipe in ("tensorwise", "delayed"):
        for communication in ("fp8", "off"):
            config = FP8Config(recipe=recipe, smooth_swiglu=True, communication=communication)
            split, one = parallel(GatedMLP().bfloat16(), plan, config)
            sharded = nn.Sequential(GatedMLP().bfloat16())
            convert_to_float8(sharded, config)
            fully_shard(sharded[0])
            fully_shard(sharded)
            connect_fsdp(sharded, config)
            found = []
            for model, down in ((split, split.down), (one, one.down), (sharded, sharded[0].down)):
                y = model(x)
                y.backward(g)
                made = y, full(down.weight.grad).t()
                found.append([median_db(*pair) for pair in zip(want, made, strict=True)])
            results[f"{recipe}, {communication}"] = found
    return results


def case_overrides():
    """Layers of one FSDP2 group with recipes of their own, against the same on one rank."""
    overrides = {"gate": {"recipe": "delayed"}, "up": {"recipe": "blockwise"}}
    results = {}
    for level in ("O1", "O3"):
        config = FP8Config(recipe="tensorwise", opt_level=level, overrides=overrides)
        sharded, one = (nn.Sequential(GatedMLP().bfloat16()) for _ in range(2))
        for model in (sharded, one):
            convert_to_float8(model, config)
        fully_shard(sharded[0])
        fully_shard(sharded)
        said = str(connect_fsdp(sharded, config))
        x, g = rand(2, 64, WIDTH), rand(2, 64, WIDTH, seed=1)
        found = []
        for _ in range(2):
            y, want = sharded(x), one(x)
            found.append(db(want, y))
            y.backward(g)
            want.backward(g)
        found.append(db(one[0].up.weight.grad, full(sharded[0].up.weight.grad)))
        state = {key.rpartition(".")[2] for key in scaling_state_dict(sharded)}
        results[level] = [found, said, sorted(state)]
    return results
