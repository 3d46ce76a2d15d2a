import warnings
from typing import Any

import pytest
import torch
from transformers import CompileConfig, ContinuousBatchingConfig

from tests.fp8_checkpoints import tiny_llama
from tests.internals import Float8Layer, WeightQuantizer, current_pass, linear_function, quantizer
from torch_fp8 import FP8Config, convert_to_float8, rollout
from torch_fp8.ops.quantize import dequantize

IDS = torch.randint(4, 256, (3, 6), generator=torch.Generator().manual_seed(0))
NEW = 8
COMMON: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}


def policy(recipe, **options):
    torch.manual_seed(0)
    model = tiny_llama(pad_token_id=0).bfloat16()
    convert_to_float8(model, FP8Config(recipe=recipe, **options))
    model.train()
    model(IDS, labels=IDS).loss.backward()  # delayed scaling has a history now
    return model


def plain(model):
    return model.generate(input_ids=IDS[:1], **COMMON)


def batched(model):
    mask = torch.ones_like(IDS)
    mask[1, :3] = 0
    return model.generate(input_ids=IDS, attention_mask=mask, **COMMON)


def static(model):
    mask = torch.ones_like(IDS)
    return model.generate(
        input_ids=IDS, attention_mask=mask, cache_implementation="static", **COMMON
    )


def continuous(model):
    config = ContinuousBatchingConfig(num_blocks=8, block_size=32, max_batch_tokens=64)
    model.generation_config.do_sample = False
    with torch.no_grad():
        return model.generate_batch(
            [row.tolist() for row in IDS],
            **{"max_new_tokens": NEW, "continuous_batching_config": config},
        )


WAYS = {"plain": plain, "batched": batched, "static": static, "continuous": continuous}


@pytest.fixture
def casts(spy):
    return spy(quantizer, "quantize_layouts", lambda x, *_, **options: x.data_ptr())


def weights_of(model):
    return [m.weight.data_ptr() for m in model.modules() if isinstance(m, Float8Layer)]


def test_generate_is_a_scope_by_itself(casts):
    model = policy("rowwise").eval()
    casts.clear()
    first = plain(model)
    weights = weights_of(model)
    assert sorted(place for place in casts if place in weights) == sorted(weights)
    model.lm_head.weight.data.neg_()
    assert not torch.equal(plain(model), first)
    with torch.no_grad():  # outside of it nobody can tell
        casts.clear()
        model(IDS)
        model(IDS)
    assert len([place for place in casts if place in weights]) == 2 * len(weights)


def test_assisted_generation_returns_the_greedy_tokens():
    """The policy checks several proposed tokens in one forward, and none changes another's scale.

    With one scale per tensor this row gets other tokens.
    """
    model, assistant = policy("rowwise").eval(), tiny_llama(num_hidden_layers=1, pad_token_id=0)
    greedy = model.generate(IDS[1:2], **COMMON)
    assert torch.equal(model.generate(IDS[1:2], assistant_model=assistant, **COMMON), greedy)


@pytest.mark.parametrize(
    ("way", "recipe"),
    [
        ("plain", "blockwise"),
        ("batched", "rowwise"),
        ("static", "rowwise"),
        ("continuous", "blockwise"),
    ],
)
def test_the_tokens_are_those_of_the_training_forward(monkeypatch, way, recipe):
    """Each product of a rollout has the weight and the recipe of training, and so has each token:
    among what the training forward finds likeliest after the same tokens.
    """
    model = policy(recipe)
    used: dict[str, list[tuple[Any, Any]]] = {}
    original = linear_function.fprop

    def spy(*arguments, **needs):
        y, operands = original(*arguments, **needs)
        options, granularity = arguments[4], operands.input.rowwise.granularity
        used.setdefault(options.name, []).append((operands.weight, granularity))
        return y, operands

    monkeypatch.setattr(linear_function, "fprop", spy)
    model(IDS)
    trained = {name: seen[-1] for name, seen in used.items()}
    used.clear()
    with rollout(model):
        made = WAYS[way](model)
    assert used.keys() == trained.keys()
    assert len(used) == 14
    for name, seen in used.items():
        assert len(seen) >= NEW
        (w, granularity), kept = trained[name], seen[0][0]
        assert torch.equal(dequantize(kept), dequantize(w)), name
        for now, of_input in seen:
            assert now is kept  # of the first token
            assert of_input == granularity
    rows = made
    if way == "continuous":
        tokens = [output.prompt_ids + output.generated_tokens for output in made.values()]
        rows = torch.tensor(tokens)
    assert rows.shape == (1 if way == "plain" else len(IDS), IDS.shape[1] + NEW)
    attention = torch.ones_like(rows)
    if way == "batched":
        attention[1, :3] = 0
    logits = model(rows, attention_mask=attention).logits[:, IDS.shape[1] - 1 : -1].float()
    chosen = logits.gather(-1, rows[:, -NEW:, None]).squeeze(-1)
    assert bool((logits.amax(-1) - chosen < 0.01).all())
    assert bool((logits.amax(-1) - logits.median(-1).values > 0.3).all())


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_outside_of_a_rollout_training_goes_on_as_before(recipe):
    model = policy(recipe)
    with rollout(model):
        plain(model)
        layers = [m for m in model.modules() if isinstance(m, Float8Layer)]
        assert all(layer.fp8.payloads.payload is not None for layer in layers)
        assert not any(layer.training for layer in layers)
        assert model.training
    assert all(layer.fp8.payloads.payload is None for layer in layers)
    assert all(layer.training for layer in layers)
    off = policy("rowwise", eval_fp8=False)
    with rollout(off):
        assert all(m.training for m in off.modules() if isinstance(m, Float8Layer))


@pytest.mark.long
def test_a_compiled_decode_says_that_it_casts_weights_at_each_token():
    current_pass.warn_once.cache_clear()
    model = policy("rowwise").eval()
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compiled(IDS)
        assert not [w for w in said if "every token" in str(w.message)]
        for _ in range(2):
            compiled(IDS[:, :1])
    told = [str(w.message) for w in said if "every token" in str(w.message)]
    assert len(told) == 1
    assert "disable_compile=True" in told[0]


@pytest.mark.long
def test_transformers_compiled_decode_with_a_static_cache_casts_no_weight(monkeypatch):
    """As it compiles on CUDA by itself."""
    cast: list[Any] = []
    original = WeightQuantizer.for_fprop

    def counted(self, weight):
        cast.append(weight.shape)
        return original(self, weight)

    model = policy("rowwise")
    options = {"attention_mask": torch.ones_like(IDS), "cache_implementation": "static", **COMMON}
    with rollout(model):
        expected = model.generate(input_ids=IDS, disable_compile=True, **options)
    compiling = CompileConfig(backend="aot_eager", mode=None)  # type: ignore[arg-type]
    compiling._compile_all_devices = True
    current_pass.warn_once.cache_clear()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(WeightQuantizer, "for_fprop", counted)
    with rollout(model, compiled=True), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*casts the weights of its FP8 layers")
        assert len(cast) == 14
        made = model.generate(input_ids=IDS, compile_config=compiling, **options)
    assert len(cast) == 14
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert torch.equal(made, expected)
