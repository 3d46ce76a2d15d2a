"""What changes an output layer between its call and a read: the call's logits, or an error.

The other model of each pair reads its logits at once, so that they are plain before the change.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrize

from tests.internals import LazyLogits, sqnr_db
from tests.torch_fp8.loss_head.logits_cases import H, LanguageModel, V, batch, small_chunks
from torch_fp8 import FP8Config, convert_optimizer, convert_to_float8, revert


@pytest.fixture(autouse=True)
def _chunks(monkeypatch):
    small_chunks(monkeypatch)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def _head(model):
    head = model.get_submodule("base_model.model" if hasattr(model, "peft_config") else "").lm_head
    return getattr(head, "base_layer", head)


def _in_place(model):
    with torch.no_grad():
        _head(model).weight.copy_(torch.zeros(V, H))


def _data(name):
    def change(model):
        tensor = getattr(_head(model), name)
        tensor.data = torch.zeros_like(tensor)

    return change


def _bias_in_place(model):
    with torch.no_grad():
        _head(model).bias.add_(1)


def _swap(model):
    weight = _head(model).weight
    torch.utils.swap_tensors(weight, nn.Parameter(torch.zeros_like(weight)))


def _another_parameter(model):
    _head(model).weight = nn.Parameter(torch.zeros(V, H))


def _another_layer(model):
    model.lm_head = nn.Linear(H, V)


def _load(model):
    model.load_state_dict({n: 2 * t for n, t in model.state_dict().items()})


def _assign(model):
    model.load_state_dict({n: 2 * t for n, t in model.state_dict().items()}, assign=True)


def _cast_with_swaps(model):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.bfloat16)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _row_of_the_embedding(model):
    with torch.no_grad():
        model.embed.weight[5] = 0


def _freeze(model):
    _head(model).weight.requires_grad_(False)


def _thaw(model):
    _head(model).weight.requires_grad_(True)


def _frozen(model):
    model.lm_head.weight.requires_grad_(False)
    return model


def _tied(model):
    model.lm_head.weight = model.embed.weight
    return model


def _hooked(model):
    model.lm_head.register_forward_pre_hook(lambda layer, args: (2 * args[0],))
    model.lm_head.register_forward_hook(lambda layer, args, output: 2 * output)
    return model


def _input_written(model):
    with torch.no_grad():
        model.lm_head.input.zero_()


def _inputs_data(model):
    model.lm_head.input.data = torch.zeros_like(model.lm_head.input)


def _watched(model):
    model.lm_head.register_forward_pre_hook(lambda layer, args: setattr(layer, "input", args[0]))
    return model


def _lora(target):
    def prepare(model):
        model = get_peft_model(model, LoraConfig(r=4, target_modules=[target]))
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_embedding" in name:
                nn.init.normal_(parameter, std=0.3)
        return model

    return prepare


def _merge(model):
    model.merge_adapter()


def _unmerge(model):
    model.unmerge_adapter()


def _merge_safely(model):
    model.merge_adapter(safe_merge=True)


def _unload(model):
    model.merge_and_unload()


def _disable(model):
    model.disable_adapter_layers()


def _enable(model):
    model.enable_adapter_layers()


def _scale(model):
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 5)


def _switch(model):
    model.add_adapter("other", LoraConfig(r=2, target_modules=["lm_head"]))
    model.set_adapter("other")


WAYS = {
    "written": (None, _in_place),
    "weight.data": (None, _data("weight")),
    "bias written": (None, _bias_in_place),
    "bias.data": (None, _data("bias")),
    "swap_tensors": (None, _swap),
    "another parameter": (None, _another_parameter),
    "another layer": (None, _another_layer),
    "load_state_dict": (None, _load),
    "load_state_dict(assign=True)": (None, _assign),
    "cast": (None, lambda model: model.to(torch.bfloat16)),
    "cast by swaps": (None, _cast_with_swaps),
    "moved": (None, lambda model: model.to("meta")),
    "frozen": (None, _freeze),
    "trained again": (_frozen, _thaw),
    "parametrized": (
        None,
        lambda model: parametrize.register_parametrization(model.lm_head, "weight", Doubled()),
    ),
    "eval": (None, lambda model: model.eval()),
    "reverted": (None, revert),
    "the embedding": (_tied, _row_of_the_embedding),
    "hooks": (_hooked, _in_place),
    "the input written": (_watched, _input_written),
    "the input's data": (_watched, _inputs_data),
    "a frozen weight": (_frozen, _in_place),
    "frozen, data": (_frozen, _data("weight")),
}
ADAPTED = {
    "merged": ("lm_head", _merge),
    "merged safely": ("lm_head", _merge_safely),
    "merged and unloaded": ("lm_head", _unload),
    "disabled": ("lm_head", _disable),
    "enabled": ("lm_head", _enable),
    "scaled": ("lm_head", _scale),
    "switched": ("lm_head", _switch),
    "unmerged": ("lm_head", _unmerge),
    "merged elsewhere": ("inner", _merge),
    "merged into a tied embedding": ("embed", _merge),
    "unloaded into a tied embedding": ("embed", _unload),
}
KINDS = {
    "bf16": {"loss_head": "bf16"},
    "fp8": {"loss_head": "fp8"},
    "halves": {"loss_head": "bf16", "opt_level": "O2"},
    "stored": {"loss_head": "auto", "opt_level": "O2", "frozen_weights": "fp8"},
}


def _outcome(model, change, reads_first, backward, autocast):
    """Return the logits or loss and gradients after a change, or the message of an error."""
    tokens, labels = batch(0, (2, 8))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(tokens)
    assert isinstance(logits, LazyLogits) or hasattr(model, "peft_config")
    if reads_first:
        logits.argmax(-1)
    parameters = dict(model.named_parameters())
    try:
        change(model)
        if not backward:
            return logits.detach() + 0.0
        loss = F.cross_entropy(logits.float().view(-1, V), labels.view(-1))
        loss.backward()
    except RuntimeError as error:
        return str(error)
    grads = {n: p.grad for n, p in parameters.items() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


def _converted(model, kind):
    config = FP8Config("tensorwise", **KINDS[kind])
    convert_to_float8(model, config)
    if kind == "halves":
        trained = [p for p in model.parameters() if p.requires_grad]
        convert_optimizer(torch.optim.AdamW(trained), config, model=model)
    return model


def _compare(model, change, kind, backward):
    # Without autocast the float32 values of a weight in halves are multiplied, at once.
    options = {"backward": backward, "autocast": kind == "halves"}
    want = _outcome(copy.deepcopy(model), change, True, **options)
    got = _outcome(copy.deepcopy(model), change, False, **options)
    if isinstance(got, str):
        assert "lm_head' was written" in got or got == want, got
        return
    assert not isinstance(want, str), want
    if not backward:
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        return
    torch.testing.assert_close(got["loss"], want["loss"], rtol=2e-5, atol=0)
    assert got.keys() == want.keys()
    for name, grad in got.items():
        least = 45 if kind == "bf16" and "inner" not in name else 20
        assert sqnr_db(want[name].float(), grad.float()) >= least, name


@pytest.mark.parametrize("backward", [False, True], ids=["values", "loss"])
@pytest.mark.parametrize(
    ("way", "kind"),
    # torch refuses to parametrize a frozen weight that a graph holds.
    [(w, k) for w in WAYS for k in KINDS if (w, k) != ("parametrized", "stored")],
)
def test_a_change_after_the_call(way, kind, backward):
    prepare, change = WAYS[way]
    torch.manual_seed(0)
    model = LanguageModel(bias=True)
    model.lm_head.weight.requires_grad_(kind != "stored")
    model = model if prepare is None else prepare(model)
    _compare(_converted(model, kind), change, kind, backward)


@pytest.mark.parametrize("backward", [False, True], ids=["values", "loss"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", ["converted", "adapted"])
@pytest.mark.parametrize("way", ADAPTED)
def test_an_adapter_changes_after_the_call(way, first, kind, backward):
    target, change = ADAPTED[way]
    torch.manual_seed(0)
    model = LanguageModel(bias=True, tied=target == "embed")
    steps = [_lora(target), lambda model: _converted(model, kind)]
    for run in steps if first == "adapted" else steps[::-1]:
        model = run(model)
    if way == "unmerged":
        model.merge_adapter()
    if way == "enabled":
        model.disable_adapter_layers()
    _compare(model, change, kind, backward)
